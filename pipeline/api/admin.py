"""What is not inference: the model list, liveness, readiness and status."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from pipeline import __version__
from pipeline.api.edge import Edge


def routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    @router.get("/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [edge.served.card]})

    @router.get("/v1/models/{name:path}")
    @router.get("/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        edge.served.require(name)
        return JSONResponse(edge.served.card)

    @router.get("/health")
    async def health() -> Response:
        """This process answers. Whether a prompt can be served is `/ready`'s question."""
        return Response()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        await edge.backend.require_ready()
        return JSONResponse({"status": "ready", "model": edge.served.name})

    @router.get("/status")
    async def status() -> JSONResponse:
        contract = {"digest": edge.served.contract.digest, "context_length": edge.served.contract.context_length}
        head = {"version": __version__, "model": edge.served.name, "contract": contract}
        return JSONResponse({**head, **await edge.backend.status()})

    return router
