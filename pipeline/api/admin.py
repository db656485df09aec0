"""What is not inference: version, liveness, readiness and status."""

from __future__ import annotations

import re

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from pipeline import __version__
from pipeline.api import page
from pipeline.api.edge import Edge
from pipeline.api.served import Served
from pipeline.errors import CapacityError, CrossfillError, HandoffUnknownError, InvalidParameterError, PeerError
from pipeline.metrics import Metrics

_MOST = 256  # ended handoffs that the broker keeps
_ID = re.compile("[0-9a-f]{32}")


def routes(edge: Edge, metrics: Metrics) -> APIRouter:
    router = APIRouter()
    _add_probes(router, edge)
    _add_views(router, edge)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def scrape(request: Request) -> Response:
        """For Prometheus. Reading the broker blocks: that happens in a thread."""
        accept = request.headers.get("accept", "")
        body, content_type = await to_thread.run_sync(metrics.exposition, accept)
        return Response(body, media_type=content_type)

    return router


def _add_probes(router: APIRouter, edge: Edge) -> None:

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


def _add_views(router: APIRouter, edge: Edge) -> None:
    """What operators and `/dashboard` look at. No prompt text."""

    @router.get("/status")
    async def status() -> JSONResponse:
        models = [_shown(model) for model in edge.models.all]
        head = {"version": __version__, "model": edge.models.default.name, "models": models}
        return JSONResponse({**head, **await edge.backend.status()})

    static = page.load()

    @router.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> Response:
        """The same, as a page."""
        return Response(static.html, headers=static.headers, media_type="text/html; charset=utf-8")

    @router.get("/handoffs")
    async def handoffs(request: Request) -> JSONResponse:
        """Live handoffs and the last `recent` that ended, newest first."""
        return JSONResponse({"handoffs": await edge.backend.handoffs(_recent(request))})

    @router.get("/handoffs/{handoff_id}")
    async def handoff(handoff_id: str) -> JSONResponse:
        found = await edge.backend.handoff(handoff_id) if _ID.fullmatch(handoff_id) else None
        if found is None:
            raise HandoffUnknownError(handoff_id)
        return JSONResponse(found)


def _recent(request: Request) -> int:
    """Raises InvalidParameterError."""
    given = request.query_params.get("recent", "50")
    if not re.fullmatch("[0-9]{1,3}", given, re.ASCII) or int(given) > _MOST:
        raise InvalidParameterError("recent", f"`recent` must be a whole number from 0 to {_MOST}.")
    return int(given)


async def _missing(edge: Edge, model: Served) -> CrossfillError | None:
    try:
        await edge.backend.require_ready(model)
    except (CapacityError, PeerError) as error:
        return error
    return None


def _shown(model: Served) -> dict[str, object]:
    contract = {"digest": model.contract.digest, "context_length": model.contract.context_length}
    return {"name": model.name, "aliases": list(model.aliases), "contract": contract}
