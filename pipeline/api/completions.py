"""`POST /v1/completions`: text or token ids to one handoff per prompt, and the objects of the answer."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from anyio import to_thread
from fastapi import Request

from pipeline import routing
from pipeline.api import body, plan, schemas
from pipeline.api.answer import JSON, Answer, Head
from pipeline.api.edge import Edge
from pipeline.api.relay import Choice, Relay
from pipeline.api.schemas import CompletionAsk
from pipeline.api.served import Served
from pipeline.errors import InvalidParameterError

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def create(edge: Edge, http: Request) -> Answer:
    """Everything that can be refused is refused here, before a job exists."""
    ask = schemas.read(CompletionAsk, await body.read_object(http, edge.settings.max_body_bytes))
    served = edge.models.find(ask.model)
    wish = routing.parse(http.headers.get(routing.HEADER))
    choices = await to_thread.run_sync(_choices, served, ask, plan.salt(http, ask))
    shape = CompletionShape(f"cmpl-{uuid.uuid4().hex}", edge.now(), served)
    telling = plan.telling(http, ask, shape, edge.pace)
    return Answer(Relay(edge.backend, served, choices, wish, traced=telling.traced), telling)


def _choices(served: Served, ask: CompletionAsk, salt: str) -> list[Choice]:
    """Tokenising a long prompt takes a while: this runs beside the event loop."""
    max_tokens = _DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    if max_tokens == 0 and not ask.echo:
        raise InvalidParameterError("max_tokens", "`max_tokens` must be at least 1 unless `echo` is true.")
    return [_choice(served, ask, prompt, max_tokens, salt) for prompt in ask.prompts]


def _choice(served: Served, ask: CompletionAsk, prompt: str | list[int], max_tokens: int, salt: str) -> Choice:
    text = served.text
    if isinstance(prompt, str):
        token_ids = text.encode(prompt, add_special_tokens=ask.add_special_tokens is not False)
    else:
        token_ids = prompt
    choice = plan.choice(ask, served, token_ids, max_tokens, salt=salt, param="prompt")
    if ask.echo:
        choice.prefix = prompt if isinstance(prompt, str) else text.decode(prompt)
    if max_tokens == 0:
        choice.request = None
    return choice


@dataclass(frozen=True, slots=True)
class CompletionShape(Head):
    """`text_completion`, the same object in a stream and without."""

    def head(self, *, stream: bool) -> JSON:
        return self.of("text_completion")

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, text: str) -> JSON:
        return _text(index, text)

    def closing(self, index: int, finish: str) -> JSON:
        return _text(index, "", finish)

    def whole(self, index: int, text: str, finish: str) -> JSON:
        return _text(index, text, finish)


def _text(index: int, text: str, finish: str | None = None) -> JSON:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
