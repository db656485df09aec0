"""Shape: what answers look like, for the document at `/openapi.json`. Nothing is made with these.

Answers are built as plain dictionaries where they are told; that they keep to these shapes is tested from outside.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """No field that is not named here. A field with a default may be left out."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(Shape):
    cached_tokens: int = Field(ge=0)


class Usage(Shape):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: CachedTokens


class Scored(Shape):
    token: str
    logprob: float = Field(le=0)
    bytes: list[int]


class ScoredToken(Scored):
    top_logprobs: list[Scored]


class ChatLogprobs(Shape):
    content: list[ScoredToken]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class CalledTool(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Shape):
    """`content` is null only beside `tool_calls`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[CalledTool] = []


class ChatChoice(Shape):
    index: int = Field(ge=0)
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class Completed(Shape):
    """What both kinds of completion have in common; `crossfill` is there on request: what was done for it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    crossfill: dict[str, Any] = {}


class ChatCompletion(Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Shape):
    index: int = Field(ge=0)
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Completed):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Response(BaseModel):
    """The fields that an answer always has; those of the request are repeated beside them."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int = Field(ge=1)


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Shape):
    count: int = Field(ge=0)
    max_model_len: int = Field(ge=1)
    tokens: list[int]


class TokensText(Shape):
    prompt: str


class Version(Shape):
    version: str


class Ready(Shape):
    """Of each model `ready`, or the code of what keeps it from being served."""

    status: Literal["ready"]
    models: dict[str, str]


class Status(BaseModel):
    version: str
    model: str
    models: list[dict[str, Any]]
    replicas: list[dict[str, Any]]
    budget: dict[str, int]
    live: list[str]
    queues: dict[str, int]


class Handoffs(Shape):
    handoffs: list[dict[str, Any]]


class Handoff(BaseModel):
    handoff_id: str
    state: str


class Explained(Shape):
    model: str
    tokens: int = Field(ge=1)
    ways: list[dict[str, Any]]
