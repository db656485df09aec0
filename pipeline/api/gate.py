"""Gate: the API key of a request, checked before anything of it is read.

Open to all: whether the process lives and what it counts, for probes and scrapers. Pages for operators are open to
the same machine, where `crossfill up` and `crossfill status` ask; everything else, and everybody else, needs a key.
"""

from __future__ import annotations

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.api import errors
from pipeline.api.errors import ProblemError
from pipeline.api.keyring import Keyring

OPEN = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", "/openapi.json"})
_INFERENCE = ("/v1", "/chat", "/completions", "/models", "/tokenize", "/detokenize")


class Gate:
    """Middleware inside CORS, which answers preflights (they carry no key) and puts its headers on a refusal."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admits(scope):
            await self._app(scope, receive, send)
        else:
            await errors.response(_stranger(bool(bearer(Headers(scope=scope)))))(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if scope["path"] in OPEN:
            return True
        if not scope["path"].startswith(_INFERENCE) and _same_machine(scope):
            return True
        return self._keyring.admits(bearer(Headers(scope=scope))) is not None


def bearer(headers: Headers) -> str:
    """The key of `Authorization: Bearer KEY`, empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _same_machine(scope: Scope) -> bool:
    """A proxy's clients do not count: uvicorn puts the address a local proxy forwards into `client`."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        return ip_address(client[0]).is_loopback or bool(server and client[0] == server[0])
    except ValueError:
        return False


def _stranger(given: bool) -> ProblemError:
    if given:
        return errors.refuse(401, "invalid_api_key", "Incorrect API key provided.")
    message = "No API key provided: send it as `Authorization: Bearer KEY`."
    return errors.refuse(401, "invalid_api_key", message)
