"""Batch: the requests that decode, one token each per step, in one left-padded batch of mlx-lm.

Belongs to the engine thread; an Outbox is where a request's tokens cross to the thread of its job. Where the
device has a queue and nothing else waits for it, the next step is under way before the last one is read ("ahead"),
which hides Python behind a GPU; it is read first when a request joins, so that all rows are at the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import mlx.core as mx

from pipeline.engines.base import TokenStep
from pipeline.engines.mlx import cache as kv
from pipeline.engines.mlx.cache import Chunk
from pipeline.engines.mlx.lm import BatchKVCache
from pipeline.engines.mlx.model import Model
from pipeline.engines.mlx.sampler import Report, Sampler, draw, report
from pipeline.engines.text import Change, Text
from pipeline.errors import CrossfillError, EngineError
from pipeline.logprob import TokenLogprob


class Outbox:
    """Where the tokens of one request's samples wait for the thread of its job."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[TokenStep | CrossfillError] = SimpleQueue()
        self._failure: CrossfillError | None = None

    def put(self, step: TokenStep) -> None:
        self._steps.put(step)

    def fail(self, error: CrossfillError) -> None:
        """Wake the reader with `error`, ahead of steps it has not read. Any thread."""
        self._failure = self._failure or error
        self._steps.put(error)

    def read(self, samples: int) -> Iterator[TokenStep]:
        """The steps until each of the `samples` had one with `finish`. Raises what `fail` was given."""
        while samples:
            step = self._steps.get()
            if self._failure is not None:
                raise self._failure
            assert isinstance(step, TokenStep)
            yield step
            samples -= step.finish is not None


class Row:
    """One text that decodes, the `sample`-th of its request. `limit`: tokens that it may have."""

    def __init__(self, text: Text, limit: int, outbox: Outbox, *, sample: int = 0) -> None:
        self.text = text
        self.sampler = Sampler(text.sampling, text.seed)
        self.limit = limit
        self.drawn = 0  # sampled, perhaps not emitted yet
        self.keep = False  # set by any thread: the prompt's KV is wanted behind the last step
        self.kept: Chunk | None = None
        self._outbox = outbox
        self._sample = sample

    @property
    def prompt_tokens(self) -> int:
        return len(self.text.prompt)

    @property
    def last_token(self) -> int:
        return self.text.prompt[-1]

    @property
    def logprobs(self) -> int | None:
        return self.text.sampling.logprobs

    @property
    def position(self) -> int:
        """Where the next token to draw will stand."""
        return self.prompt_tokens + self.drawn

    def push(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Emit one token; True when it was the last. Engine thread."""
        finish = self.text.push(token)
        self._outbox.put(TokenStep((token,), finish, self._sample, None if logprob is None else (logprob,)))
        return finish is not None

    def fail(self, error: BaseException) -> None:
        """The thread of its job gets `error`, as a CrossfillError."""
        self._outbox.fail(failure(error))


def failure(error: BaseException) -> CrossfillError:
    """What a request is told of `error`."""
    return error if isinstance(error, CrossfillError) else EngineError(f"MLX failed: {error}")


class _Drawn(NamedTuple):
    """Under way: a token for each row `(rows,)`, and how likely it was, where the row asks."""

    tokens: Any
    reports: list[Report | None]


class Batch:
    """Rows that step together."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self._caches: list[Any] = []
        self._inputs: Any = None  # (rows,): the token each row is fed next
        self._drawn: _Drawn | None = None  # not read yet

    def join(self, row: Row, caches: Sequence[Any]) -> int:
        """Add a row whose `caches` hold all of its prompt but the last token.

        Returns the tokens emitted. Raises EngineError when the caches do not fit.
        """
        kv.require_fits(self._model, caches, row.prompt_tokens - 1)
        emitted = self._read() if self._drawn is not None else 0
        batched = [_batched(one) for one in caches]
        first = mx.array([row.last_token])
        if self.rows:
            for ours, theirs in zip(self._caches, batched, strict=True):
                ours.extend(theirs)
            self._inputs = mx.concatenate([self._inputs, first])
        else:
            self._caches, self._inputs = batched, first
        self.rows.append(row)
        return emitted

    def prompt(self, row: Row) -> Chunk | None:
        """Evaluated copies of the KV of a row's prompt, all tokens but the last. None when it does not decode."""
        if row not in self.rows:
            return row.kept
        at, tokens = self.rows.index(row), row.prompt_tokens - 1
        layers: list[tuple[Any, Any]] = []
        for one in self._caches if tokens else ():
            start = int(one.left_padding[at].item())
            rows = slice(start, start + tokens)
            layers.append((one.keys[at : at + 1, :, rows], one.values[at : at + 1, :, rows]))
        return kv.chunk(layers, 0) if layers else Chunk(0, 0, None)

    def leave(self, row: Row) -> None:
        """Take a row out, wherever it is. Idempotent."""
        if row in self.rows:
            self._keep([at for at, one in enumerate(self.rows) if one is not row])

    def step(self, *, ahead: bool) -> int:
        """Every row gets its next token; returns how many were emitted. Needs at least one row.

        A row whose own text cannot go on (a grammar that turns out too large to be followed) fails, and it alone.
        """
        if self._drawn is None:
            changes = self._changes()
            if not self.rows:
                return 0
            # Nothing is under way, so somebody may wait for a first token: it is read before Python turns to the next.
            self._drawn = self._forward(self._inputs, changes)
            emitted = self._read()
            if ahead and self.rows and self._may_go_ahead():
                self._drawn = self._forward(self._inputs)
        else:
            emitted = self._read(self._forward(self._drawn.tokens) if ahead and self._may_go_ahead() else None)
        return emitted

    def _may_go_ahead(self) -> bool:
        """Not where a row has drawn its last token: the next step would be computed for nothing. And where what may
        come next depends on the tokens so far, they must be read first."""
        return all(row.drawn < row.limit and not row.text.changes for row in self.rows)

    def _changes(self) -> list[Change | None]:
        """What each row's logits go through; rows that cannot say it leave."""
        found: dict[Row, Change | None] = {}
        for row in self.rows:
            try:
                found[row] = row.text.change()
            except Exception as error:
                row.fail(error)
        if len(found) < len(self.rows):
            self._keep([at for at, row in enumerate(self.rows) if row in found])
        return list(found.values())

    def _forward(self, inputs: Any, changes: Sequence[Change | None] = ()) -> _Drawn:
        logits = self._model.module(inputs[:, None], cache=self._caches)[:, -1, :]
        tokens = draw([row.sampler for row in self.rows], [row.position for row in self.rows], logits, changes)
        reports = [
            None if row.logprobs is None else report(logits[at : at + 1], tokens[at : at + 1], row.logprobs)
            for at, row in enumerate(self.rows)
        ]
        for row in self.rows:
            row.drawn += 1
        mx.async_eval(tokens, [one for one in reports if one])
        return _Drawn(tokens, reports)

    def _read(self, following: _Drawn | None = None) -> int:
        drawn, self._drawn = self._drawn, following
        assert drawn is not None
        self._inputs = drawn.tokens
        tokens = drawn.tokens.tolist()
        staying = []
        for at, (row, token, one) in enumerate(zip(list(self.rows), tokens, drawn.reports, strict=True)):
            if not _pushed_last(row, token, one and one.read(token)):
                staying.append(at)
        if len(staying) < len(tokens):
            for at in set(range(len(tokens))) - set(staying):
                self.rows[at].kept = self.prompt(self.rows[at]) if self.rows[at].keep else None
            self._keep(staying)
        return len(tokens)

    def _keep(self, staying: list[int]) -> None:
        if not staying:
            self.clear()
            return
        self.rows = [self.rows[at] for at in staying]
        for one in self._caches:
            one.filter(staying)
        chosen = mx.array(staying)
        self._inputs = self._inputs[chosen]
        if self._drawn is not None:
            self._drawn = _Drawn(self._drawn.tokens[chosen], [self._drawn.reports[at] for at in staying])


def _pushed_last(row: Row, token: int, logprob: TokenLogprob | None) -> bool:
    """Whether nothing follows `token`: it was the last, or its row's text failed of it."""
    try:
        return row.push(token, logprob)
    except Exception as error:
        row.fail(error)
        return True


def _batched(one: Any) -> Any:
    """A batch of the one cache, around the same arrays: `KVCache.merge` would copy them and drop the spare room."""
    batched = BatchKVCache([0])
    if one.offset:
        batched.keys, batched.values = one.keys, one.values
        batched.offset = mx.array([one.offset])
        batched._idx = one.offset
    return batched
