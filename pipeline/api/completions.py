"""`POST /v1/completions`: text or token ids to one handoff per prompt, and the objects of the answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

from fastapi import Request

from pipeline import routing
from pipeline.api import body, logprobs, plan, schemas
from pipeline.api.answer import JSON, Answer
from pipeline.api.chunk import Chunks, Counting, Head
from pipeline.api.edge import Edge
from pipeline.api.output import Told
from pipeline.api.relay import Event, Prompt, Relay
from pipeline.api.schemas import CompletionAsk
from pipeline.api.served import Served
from pipeline.errors import InvalidParameterError

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def create(edge: Edge, http: Request) -> Answer:
    """Everything that can be refused is refused here, before a job exists."""
    ask = await body.read(http, edge.settings.max_body_bytes, partial(schemas.read, CompletionAsk))
    served = edge.models.find(ask.model)
    wish = routing.parse(http.headers.get(routing.HEADER))
    prompts = await plan.beside(http, ask, partial(_prompts, served, ask, plan.salt(http, ask)))
    head = Head(f"cmpl-{uuid.uuid4().hex}", edge.now(), served)
    echoed = [len(prompt.echo) for prompt in prompts for _ in prompt.outputs]
    teller = CompletionTeller(head, plan.counting(ask), echoed, scored=ask.alternatives is not None)
    telling = plan.telling(http, ask, teller, edge.pace)
    return Answer(Relay(edge.backend, served, prompts, wish, traced=telling.traced), telling)


def _prompts(served: Served, ask: CompletionAsk, salt: str) -> list[Prompt]:
    """Tokenising a long prompt takes a while: this runs beside the event loop."""
    max_tokens = _DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    if max_tokens == 0 and not ask.echo:
        raise InvalidParameterError("max_tokens", "`max_tokens` must be at least 1 unless `echo` is true.")
    return [_prompt(served, ask, prompt, max_tokens, salt) for prompt in ask.prompts]


def _prompt(served: Served, ask: CompletionAsk, given: str | list[int], max_tokens: int, salt: str) -> Prompt:
    text = served.text
    if isinstance(given, str):
        token_ids = text.encode(given, add_special_tokens=ask.add_special_tokens is not False)
    else:
        token_ids = given
    prompt = plan.prompt(ask, served, token_ids, max_tokens, salt=salt, param="prompt")
    if ask.echo:
        prompt.echo = given if isinstance(given, str) else text.decode(given)
    if max_tokens == 0:
        prompt.request = None
    return prompt


class CompletionTeller(Chunks):
    """`text_completion`, the same object in a stream and without. `echoed`: characters of the prompt in each choice."""

    kind = chunk_kind = "text_completion"

    def __init__(self, head: Head, counting: Counting, echoed: Sequence[int], *, scored: bool) -> None:
        super().__init__(head, counting)
        self._echoed = echoed
        self._scored = scored

    def choices(self, event: Event) -> list[JSON]:
        told = []
        if event.text or event.tokens:
            told.append(self._choice(event.at, event.text, event.tokens))
        if event.finish:
            told.append(self._choice(event.at, "", (), event.finish))
        return told

    def whole_choice(self, event: Event) -> JSON:
        return self._choice(event.at, event.text, event.tokens, event.finish)

    def _choice(self, index: int, text: str, tokens: Sequence[Told], finish: str | None = None) -> JSON:
        scores = logprobs.completion(tokens, self.text, self._echoed[index]) if self._scored else None
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}
