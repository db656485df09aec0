"""Draws: tokens that SGLang cannot draw by our definitions, and logprobs of the model's own distribution.

Sits around the one call in which SGLang's model runner turns logits into tokens. A row with an order is drawn here and
put in place of what SGLang drew, so that SGLang's own penalties, biases and grammars, which differ from ours in order
and want a tokenizer in its scheduler, are never used. What fails is that request's alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from pipeline import logprob
from pipeline.checkpoint import eos_token_ids, read_config
from pipeline.engines.draw import draw_for, report, report_rows
from pipeline.engines.sglang import order
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.order import First
from pipeline.engines.sglang.plugin.station import Station
from pipeline.engines.text import Text, texts
from pipeline.errors import CrossfillError
from pipeline.grammar import Compiler
from pipeline.request import Request

_FAULT_BYTES = 2000


class Order:
    """One request's. `texts`: of all its samples where the first tokens are drawn here, of the one that D decodes."""

    def __init__(self, room: int, request: Request, made: Future[list[Text]]) -> None:
        self.room = room
        self.request = request
        self.failed = False
        self._made = made

    @property
    def texts(self) -> list[Text]:
        """Waits where a grammar is still being compiled. Raises CrossfillError."""
        return self._made.result()


class Row(NamedTuple):
    """A row of the batch that has an order; `said` are the tokens behind its prompt."""

    at: int
    order: Order
    said: Sequence[int]


class Draws:
    """One per scheduler. Its three methods are hooks, on the scheduler's thread; `attend` comes first."""

    def __init__(self) -> None:
        # As long as SGLang has a request: it tells nobody when that ends.
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._orders: WeakKeyDictionary[Any, Order] = WeakKeyDictionary()
        self._compiling = ThreadPoolExecutor(1, "crossfill-grammar")

    def attend(self, station: Station, checkpoint: Path, *, prefills: bool) -> None:
        self._prefills = prefills
        self._station = station
        self._vocab_size = read_config(checkpoint).vocab_size
        self._compiler = Compiler(checkpoint, self._vocab_size, eos_token_ids(checkpoint))

    def take(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """Before `Scheduler._add_request_to_queue(request)`: a grammar is compiled while pages are on their way."""
        found = order.read(request.sampling_params.custom_params, request.origin_input_ids)
        if found is not None and request not in self._orders:
            made = self._compiling.submit(
                texts, found, self._vocab_size, self._compiler, lambda: secrets.randbits(64), found.sampling.max_tokens
            )
            self._requests[request.rid] = request
            self._orders[request] = Order(request.bootstrap_room, found, made)

    def sample(self, original: Callable[..., Any], runner: Any, output: Any, batch: Any) -> Any:
        """Around `ModelRunner.sample(output, batch)`, which may change the logits in place."""
        rows = list(self._rows(batch))
        if not rows:
            return original(runner, output, batch)
        logits = output.next_token_logits
        drawn = {row.at: token for row in rows if (token := self._draw(row, logits[row.at])) is not None}
        told = [row for row in rows if row.order.request.sampling.logprobs is not None and not self._prefills]
        raw = logits[[row.at for row in told]] if told else None  # a copy
        token_ids = original(runner, output, batch)
        for at, token in drawn.items():
            token_ids[at] = token
        if raw is not None:
            self._tell(told, raw, token_ids[[row.at for row in told]])
        return token_ids

    def _rows(self, batch: Any) -> Iterator[Row]:
        for at, rid in enumerate(batch.rids or ()):
            request = self._requests.get(rid)
            if request is None or self._orders[request].failed:
                continue
            # SGLang draws behind every chunk of a prompt; only the last one counts. Not every version tells lengths.
            seen = None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu[at])
            if seen is None or seen >= len(request.origin_input_ids):
                yield Row(at, self._orders[request], request.output_ids)

    def _draw(self, row: Row, logits: Any) -> Any:
        """The row's next token; None: SGLang draws it."""
        try:
            if self._prefills:
                return self._draw_first(row.order, logits)
            if not order.drawn_by_us(row.order.request):
                return None
            (text,) = row.order.texts
            for token in row.said[len(text.tokens) :]:
                text.push(int(token))
            return draw_for(text, logits).argmax()
        except CrossfillError as error:
            row.order.failed = True
            fault = str(error).encode()[:_FAULT_BYTES]
            self._station.say(Message(Kind.FAILED, row.order.room, data=fault))
            return None

    def _draw_first(self, found: Order, logits: Any) -> int:
        """Every sample's first token from the one row."""
        token_ids = tuple(int(draw_for(text, logits).argmax()) for text in found.texts)
        count = found.request.sampling.logprobs
        self._station.draw(found.room, First(token_ids, () if count is None else report(logits, token_ids, count)))
        return token_ids[0]

    def _tell(self, rows: Sequence[Row], raw: Any, token_ids: Any) -> None:
        counts = [row.order.request.sampling.logprobs or 0 for row in rows]
        for row, found in zip(rows, report_rows(raw, token_ids, counts), strict=True):
            self._station.say(Message(Kind.LOGPROB, row.order.room, value=found.token_id, data=logprob.pack([found])))
