"""Text: one sample of one request as it grows, what it lets come next, and when it ends.

What is done to logits is described here in host arrays and done by each engine in its own: bias, then the penalties,
then what is forbidden. The order is vLLM's. Knows no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.base import FinishReason
from pipeline.grammar import Compiler, Matcher
from pipeline.request import Request, Sampling

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one row of logits `(vocab,)`, in the order of the fields.

    `biased` ids get `bias` added. `repeated` ids are divided by `repetition` where positive, else multiplied by it
    (Keskar et al. 2019). From `sampled` ids `penalty` is taken: presence, and frequency for each occurrence (OpenAI's
    definition). Ids that are not `allowed` (None: all are) or are `forbidden` become -inf.
    """

    biased: Ids
    bias: Values
    repeated: Ids
    repetition: float
    sampled: Ids
    penalty: Values
    allowed: NDArray[np.bool_] | None
    forbidden: Ids

    def apply(self, logits: Values) -> Values:
        """A changed copy."""
        changed = np.array(logits, np.float32)
        changed[self.biased] += self.bias
        repeated = changed[self.repeated]
        changed[self.repeated] = np.where(repeated > 0, repeated / self.repetition, repeated * self.repetition)
        changed[self.sampled] -= self.penalty
        if self.allowed is not None:
            changed[~self.allowed] = -np.inf
        changed[self.forbidden] = -np.inf
        return changed


_NONE: Ids = np.empty(0, np.int64)
_NO_VALUES: Values = np.empty(0, np.float32)


class Text:
    """`limit`: tokens at most. `seed`: of its draws, for a request without one too. Belongs to the engine's thread."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        vocab_size: int,
        *,
        limit: int,
        seed: int,
        matcher: Matcher | None = None,
        answered: int = 0,
        again: Sequence[int] = (),
    ) -> None:
        """The last `answered` ids of the prompt are answer; `matcher` is behind them. `again`: the first tokens must be
        these, whatever is likely."""
        self.sampling = sampling
        self.seed = seed
        self.tokens: list[int] = []
        self.prompt = prompt
        self._vocab_size = vocab_size
        self._limit = limit
        self._matcher = matcher
        ends = matcher.eos_token_ids if matcher else ()  # a text that matches whole must end, whatever was asked for
        self.stops = frozenset((*sampling.stop_token_ids, *ends))
        self._again = again
        self._counts = Counter(prompt[len(prompt) - answered :])
        repeats = sampling.repetition_penalty != 1
        self._seen = set(prompt) if repeats else None
        self._repeated: Ids = np.unique(np.array(prompt, np.int64)) if repeats else _NONE
        biased = {token: bias for token, bias in sampling.logit_bias if 0 <= token < vocab_size}
        self._biased: Ids = np.fromiter(biased, np.int64, len(biased))
        self._bias: Values = np.fromiter(biased.values(), np.float32, len(biased))

    @property
    def position(self) -> int:
        """Where the next token will stand, 0-based."""
        return len(self.prompt) + len(self.tokens)

    @property
    def changes(self) -> bool:
        """Whether `change` depends on the tokens so far, or may be other than None."""
        sampling = self.sampling
        return bool(sampling.penalised or len(self._biased) or sampling.min_tokens > 0 or self._matcher or self._again)

    def change(self) -> Change | None:
        """What the next token's logits go through first; None: nothing."""
        if not self.changes:
            return None
        if len(self.tokens) < len(self._again):
            return self._only(self._again[len(self.tokens)])
        allowed = self._allowed()
        return Change(
            biased=self._biased,
            bias=self._bias,
            repeated=self._repeated,
            repetition=self.sampling.repetition_penalty,
            sampled=np.fromiter(self._counts, np.int64, len(self._counts)),
            penalty=self._penalty(),
            allowed=allowed,
            forbidden=self._forbidden(allowed),
        )

    def push(self, token_id: int) -> FinishReason | None:
        """The next token is there. Returns why it is the last, or None."""
        self.tokens.append(token_id)
        self._counts[token_id] += 1
        if self._seen is not None and token_id not in self._seen:
            self._seen.add(token_id)
            self._repeated = np.append(self._repeated, token_id)
        if token_id in self.stops:
            return "stop"
        if self._matcher:
            self._matcher.consume(token_id)
        return "length" if len(self.tokens) >= self._limit else None

    def _only(self, token_id: int) -> Change:
        allowed = np.arange(self._vocab_size) == token_id
        return Change(_NONE, _NO_VALUES, _NONE, 1.0, _NONE, _NO_VALUES, allowed, _NONE)

    def _penalty(self) -> Values:
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        return self.sampling.presence_penalty + self.sampling.frequency_penalty * counts

    def _allowed(self) -> NDArray[np.bool_] | None:
        if self._matcher is None:
            return None
        bits = np.unpackbits(np.frombuffer(self._matcher.allowed(), np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def _forbidden(self, allowed: NDArray[np.bool_] | None) -> Ids:
        """Stop ids before `min_tokens`, but where the grammar lets nothing else follow."""
        if len(self.tokens) >= self.sampling.min_tokens:
            return _NONE
        stops = np.array([stop for stop in sorted(self.stops) if stop < self._vocab_size], np.int64)
        if allowed is not None and allowed.sum() == allowed[stops].sum():
            return _NONE
        return stops


def texts(request: Request, vocab_size: int, compiler: Compiler, entropy: Callable[[], int], limit: int) -> list[Text]:
    """One for each sample. Compiles the grammar: for the thread of a job. Raises InvalidParameterError."""
    sampling, answered = request.sampling, request.answered
    emitted = request.token_ids[len(request.token_ids) - answered :]
    again = request.again or ((),) * sampling.n
    return [
        Text(
            request.token_ids,
            sampling,
            vocab_size,
            limit=limit,
            seed=entropy() if sampling.seed is None else sampling.seed + sample,
            matcher=compiler.matcher(sampling.grammar, emitted) if sampling.grammar is not None else None,
            answered=answered,
            again=again[sample],
        )
        for sample in range(sampling.n)
    ]
