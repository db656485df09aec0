"""What is not inference: version, liveness, readiness and status."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from pipeline import __version__
from pipeline.api.edge import Edge
from pipeline.api.served import Served
from pipeline.errors import CapacityError, CrossfillError, PeerError


def routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    @router.head("/ping", include_in_schema=False)
    @router.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """This process answers. Whether a prompt can be served is `/ready`'s question."""
        return Response()

    @router.head("/version", include_in_schema=False)
    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> JSONResponse:
        """At least one model can be served now; which ones is in the answer."""
        found = {model.name: await _missing(edge, model) for model in edge.models.all}
        if all(found.values()):
            raise next(error for error in found.values() if error)
        told = {name: error.code if error else "ready" for name, error in found.items()}
        return JSONResponse({"status": "ready", "models": told})

    @router.get("/status")
    async def status() -> JSONResponse:
        models = [_shown(model) for model in edge.models.all]
        head = {"version": __version__, "model": edge.models.default.name, "models": models}
        return JSONResponse({**head, **await edge.backend.status()})

    return router


async def _missing(edge: Edge, model: Served) -> CrossfillError | None:
    try:
        await edge.backend.require_ready(model)
    except (CapacityError, PeerError) as error:
        return error
    return None


def _shown(model: Served) -> dict[str, object]:
    contract = {"digest": model.contract.digest, "context_length": model.contract.context_length}
    return {"name": model.name, "aliases": list(model.aliases), "contract": contract}
