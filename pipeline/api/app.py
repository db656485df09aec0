"""App: the edge's routes and middleware, and the server around them."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from pipeline import __version__, heap, log, tracing
from pipeline.api import admin, chat, completions, errors, explain, gauges, models, openapi, responses, served
from pipeline.api.answer import Pace
from pipeline.api.backend import BrokerBackend
from pipeline.api.edge import Edge, unix_time
from pipeline.api.gate import Gate
from pipeline.api.keyring import Keyring
from pipeline.api.meter import MeteredBackend
from pipeline.api.relay import Backend
from pipeline.api.served import Catalogue
from pipeline.errors import BrokerError, ConfigError, CrossfillError
from pipeline.metrics import Metrics
from pipeline.settings import ApiSettings, Settings
from pipeline.tracing import Tracer

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_NOT_STARTED = 3  # uvicorn's own exit status for it
_DRAIN_S = 30  # what a stopping server grants its running answers; then they are cancelled
_log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    settings: ApiSettings,
    catalogue: Catalogue,
    backend: Backend,
    metrics: Metrics | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The ASGI application over any backend. Its lifespan starts and closes the backend. Raises ConfigError."""
    metrics = metrics or Metrics("api")
    backend = MeteredBackend(backend, metrics, tracer)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        try:
            yield
        finally:
            await backend.close()

    app = openapi.Documented(title="Crossfill", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    edge = Edge(settings, catalogue, backend, Pace(settings.hold_s, settings.keep_alive_s))
    errors.install(app)
    prompts = _add_inference(app, edge)  # first: routes are tried in order
    app.include_router(admin.routes(edge, metrics))
    app.include_router(models.routes(edge))
    app.include_router(explain.routes(edge))
    _add_middleware(app, settings, prompts)
    return app


def _add_middleware(app: FastAPI, settings: ApiSettings, prompts: Mapping[str, Handler]) -> None:
    """From the inside out: a refusal by the gate has the headers of CORS, and every answer has an id."""
    app.add_middleware(Express, handlers=prompts)
    if settings.keys_file:
        app.add_middleware(Gate, keyring=Keyring(settings.keys_file))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],  # answered with the names that were asked for, Authorization included
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Frame)


def _add_inference(app: FastAPI, edge: Edge) -> dict[str, Handler]:
    """The handler of each path. As routes they are for the document, and for other methods."""

    async def create_chat(request: Request) -> Response:
        return await chat.create(edge, request)

    async def create_response(request: Request) -> Response:
        return await responses.create(edge, request)

    async def create_completion(request: Request) -> Response:
        return await completions.create(edge, request)

    handlers: dict[str, Handler] = {
        "/v1/chat/completions": create_chat,
        "/chat/completions": create_chat,
        "/v1/responses": create_response,
        "/v1/completions": create_completion,
        "/completions": create_completion,
    }
    for path, handler in handlers.items():
        app.post(path, include_in_schema=path.startswith("/v1/"))(handler)
    return handlers


class Express:
    """The innermost layer: prompts go straight to their handlers. The framework's way to them (two stacks of exits, a
    search through all routes, dependencies that nobody has) costs more than reading and checking the request does."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await handler(Request(scope, receive))
            await answer(scope, receive, send)
        except CrossfillError as error:  # before anything was sent: an answer that has begun tells its own failures
            await errors.response(error)(scope, receive, send)


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
            with tracing.under(Headers(scope=scope).get("traceparent", "")):
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

    Without a broker it starts all the same, refuses what is asked (503) and looks for it. Raises ConfigError: what can
    be found wrong before a port is opened is.
    """
    if settings.api is None:
        raise ConfigError("api.model is not set: which model is to be served?")
    log.setup(settings.observe.log_format, "api")
    catalogue = served.load(settings.api, created=unix_time())
    backend = BrokerBackend(settings, catalogue.all)
    try:
        backend.require_broker(catalogue.all)
        backend.operator.now_ms()  # asks for the broker's clock: later readings cost no round trip
    except BrokerError as error:
        _log.warning("%s; requests are refused until it answers", error)
        backend.await_broker(catalogue.all)
    metrics = Metrics("api")
    metrics.add_source(gauges.source(backend.operator, settings.broker.budget_bytes))
    tracer = tracing.connect(settings.observe, "api", backend.operator.now_ms)
    app = create_app(settings.api, catalogue, backend, metrics, tracer)
    config = uvicorn.Config(
        app,
        host=settings.api.host,
        port=settings.api.port,
        timeout_graceful_shutdown=_DRAIN_S,
        log_level="info",
        log_config=LOGGING_CONFIG if settings.observe.log_format == "text" else None,  # None: as all our own lines
    )
    server = uvicorn.Server(config)
    listeners = [shared_socket(settings.api.host, settings.api.port)] if settings.api.share_port else None
    heap.settle()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(listeners)
    if not server.started:
        sys.exit(_NOT_STARTED)


def shared_socket(host: str, port: int) -> socket.socket:
    """Bound, and not the only one at that address: whoever else binds it so gets a share of the connections.

    Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(f"api.host, api.port: cannot share {host} port {port}: {error}") from error
    return listener
