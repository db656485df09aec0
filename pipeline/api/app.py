"""App: the edge's routes and middleware, and the server around them."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.api import admin, chat, completions, errors, served
from pipeline.api.answer import Pace
from pipeline.api.backend import BrokerBackend
from pipeline.api.edge import Edge, unix_time
from pipeline.api.relay import Backend
from pipeline.api.served import Served
from pipeline.errors import ConfigError
from pipeline.settings import ApiSettings, Settings

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_DRAIN_S = 30  # what a stopping server grants its running answers; then they are cancelled
_log = logging.getLogger(__name__)


def create_app(settings: ApiSettings, model: Served, backend: Backend, *, pace: Pace | None = None) -> FastAPI:
    """The ASGI application over any backend. Its lifespan starts and closes the backend."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        try:
            yield
        finally:
            await backend.close()

    app = FastAPI(title="Crossfill", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    edge = Edge(model, backend, settings.max_body_bytes, settings.default_max_tokens, pace or Pace())
    errors.install(app)
    app.include_router(admin.routes(edge))
    _add_inference(app, edge)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        allow_headers=["*"],  # answered with the names that were asked for, Authorization included
        expose_headers=["X-Request-Id"],
    )
    app.add_middleware(Frame)
    return app


def _add_inference(app: FastAPI, edge: Edge) -> None:
    @app.post("/v1/chat/completions")
    @app.post("/chat/completions")
    async def create_chat(request: Request) -> Response:
        return await chat.create(edge, request)

    @app.post("/v1/completions")
    @app.post("/completions")
    async def create_completion(request: Request) -> Response:
        return await completions.create(edge, request)


class Frame:
    """The outermost layer: names every answer (`X-Request-Id`, the client's if it is sane) and turns a bug of ours
    into the error object; what happened is in the log under that id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started = _request_id(Headers(scope=scope)), False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            _log.exception("request %s broke", request_id)
            if started:
                raise
            await errors.response(error)(scope, receive, named)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def serve(settings: Settings) -> None:
    """Run until SIGINT or SIGTERM, then stop accepting and let running answers finish.

    Raises ConfigError, BrokerError: what can be found wrong before a port is opened is.
    """
    if settings.api is None:
        raise ConfigError("api.model is not set: which model is to be served?")
    model = served.load(settings.api, created=unix_time())
    backend = BrokerBackend(settings, model.contract, model.name)
    backend.require_broker()
    app = create_app(settings.api, model, backend)
    uvicorn.run(
        app, host=settings.api.host, port=settings.api.port, timeout_graceful_shutdown=_DRAIN_S, log_level="info"
    )
