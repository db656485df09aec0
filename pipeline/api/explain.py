"""What each way would cost a prompt of a given length now: why the router chooses what it chooses."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from pipeline.api.edge import Edge
from pipeline.errors import InvalidParameterError


def routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.get("/explain")
    async def explain(tokens: str = "1024", model: str | None = None) -> JSONResponse:
        """`ways`, the best known one first; empty where no replica could serve the prompt."""
        served = edge.models.find(model)
        ways = await edge.backend.explain(served, count := _count(tokens))
        return JSONResponse({"model": served.name, "tokens": count, "ways": ways})

    return router


def _count(tokens: str) -> int:
    if not (tokens.isascii() and tokens.isdigit() and 0 < len(tokens) < 9 and int(tokens)):
        raise InvalidParameterError("tokens", "`tokens` must be the length of a prompt: a whole number from 1 on.")
    return int(tokens)
