"""SglangSample: one text that SGLang decodes, from P's first token to its end.

That token is handed out here, at once; what SGLang sends begins with it and is cut. Stop ids are ours to see: SGLang
was told to ignore them, as it would add its own. Logprobs come from the plug-in, apart from the tokens, and a step is
handed out when it has both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline import logprob
from pipeline.engines.base import FinishReason, TokenStep
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.ticket import Host, SglangTicket
from pipeline.logprob import TokenLogprob
from pipeline.request import Request


class End(NamedTuple):
    """When a text is over: a stop id, or `limit` tokens (max_tokens, or less where the context window ends before)."""

    stops: frozenset[int]
    limit: int


class SglangSample(SglangTicket):
    """The `index`-th text of a request. `request` has the seed and the order of this one alone: its `n` is 1."""

    def __init__(self, room: int, request: Request, host: Host, end: End, index: int = 0) -> None:
        super().__init__(room, request, host)
        self.end_at = end
        self.index = index
        self.first_token = 0
        self.tokens_sampled = 0  # by this engine: all but the first
        self.begun = False  # SGLang decodes it: the prompt's whole pages are in its prefix cache
        self.finish: FinishReason | None = None
        self.steps: deque[TokenStep] = deque()
        self._emitted = 0
        self._waiting: deque[TokenStep] = deque()  # whose logprobs have not come yet
        self._logprobs: deque[TokenLogprob] = deque()

    def begin(self, first_token: int, first_logprob: TokenLogprob | None) -> None:
        """Under `changed`. P's token is the first step."""
        self.first_token = first_token
        if first_logprob is not None:
            self._logprobs.append(first_logprob)
        self._emit([first_token])

    @property
    def kept_pages(self) -> int:
        return 0

    @property
    def over(self) -> bool:
        """Logprobs come another way than SGLang's last output, and may be behind it."""
        return self._ended and (not self._waiting or self._closed or self._error is not None)

    # The link's thread.

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if message.kind is Kind.LOGPROB:
            with self.changed:
                count = self.request.sampling.logprobs or 0
                self._logprobs += logprob.unpack(message.data, [message.value], count)
                self._hand_out()

    # SGLang's event loop.

    def on_output(self, token_ids: list[int], finished: str | None, meta: dict[str, Any]) -> None:
        with self.changed:
            fresh = token_ids if self.begun else token_ids[1:]
            self.begun = self.begun or bool(token_ids)
            self.tokens_sampled += len(fresh)
            if fresh and self.finish is None:
                self._emit(fresh)
            done = finished is None and self._runs_on and self._may_end
            self.changed.notify_all()
        if done:
            self._host.abort(self)

    @property
    def _runs_on(self) -> bool:
        """SGLang does not know that the text is over."""
        return self.finish == "stop"

    @property
    def _may_end(self) -> bool:
        """Whether SGLang may let go of it."""
        return True

    def _emit(self, token_ids: Sequence[int]) -> None:
        """Under `changed`."""
        ends = next((at for at, token in enumerate(token_ids, 1) if token in self.end_at.stops), None)
        kept = tuple(token_ids[:ends])
        self._emitted += len(kept)
        if ends is not None:
            self.finish = "stop"
        elif self._emitted >= self.end_at.limit:
            self.finish = "length"
        self._waiting.append(TokenStep(kept, self.finish, self.index))
        self._hand_out()

    def _hand_out(self) -> None:
        """Under `changed`."""
        asked = self.request.sampling.logprobs is not None
        while self._waiting and (not asked or len(self._logprobs) >= len(self._waiting[0].token_ids)):
            step = self._waiting.popleft()
            if asked:
                found = tuple(self._logprobs.popleft() for _ in step.token_ids)
                step = TokenStep(step.token_ids, step.finish, step.sample, found)
            self.steps.append(step)
        self.changed.notify_all()

    @property
    def whole(self) -> bool:
        return self.finish is not None or self._closed
