"""The model list, and the tokeniser of each model for clients that count tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from pipeline.api import body, chat, plan, schemas
from pipeline.api.edge import Edge
from pipeline.api.schemas import Ask, ChatAsk, TokenId
from pipeline.api.served import Served


class TextAsk(Ask):
    """What `/tokenize` is asked for a plain text."""

    prompt: str


class TokensAsk(Ask):
    """What `/detokenize` is asked."""

    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]


def routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models")
    @router.head("/models", include_in_schema=False)
    @router.get("/models", include_in_schema=False)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model.card for model in edge.models.all]})

    @router.head("/v1/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}")
    @router.head("/models/{name:path}", include_in_schema=False)
    @router.get("/models/{name:path}", include_in_schema=False)
    async def model(name: str) -> JSONResponse:
        return JSONResponse(edge.models.find(name).card)

    @router.post("/tokenize")
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(request: Request) -> JSONResponse:
        return JSONResponse(await _tokenize(edge, await body.read(request, edge.settings.max_body_bytes, _ask)))

    @router.post("/detokenize")
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(request: Request) -> JSONResponse:
        ask = await body.read(request, edge.settings.max_body_bytes, partial(schemas.read, TokensAsk))
        served = edge.models.find(ask.model)
        plan.require_vocabulary(ask.tokens, served, "tokens")
        text = await to_thread.run_sync(lambda: served.text.decode(ask.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})

    return router


def _ask(raw: dict[str, Any]) -> ChatAsk | TextAsk:
    return schemas.read(ChatAsk, raw) if "messages" in raw else schemas.read(TextAsk, raw)


async def _tokenize(edge: Edge, ask: ChatAsk | TextAsk) -> dict[str, Any]:
    """Of a text, or of a chat as it would be rendered."""
    served = edge.models.find(ask.model)
    tokens = await to_thread.run_sync(_tokens, ask, served)
    limit = served.contract.context_length
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}


def _tokens(ask: ChatAsk | TextAsk, served: Served) -> list[int]:
    if isinstance(ask, ChatAsk):
        return chat.prompt(ask, served)
    return served.text.encode(ask.prompt, add_special_tokens=ask.add_special_tokens is not False)
