"""Body: from the bytes of a POST to what was asked, refusing what would hurt further in.

Raises ProblemError or InvalidParameterError; nothing here knows what the fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from anyio import to_thread
from fastapi import Request

from pipeline.api.errors import ProblemError, refuse
from pipeline.errors import InvalidParameterError

_MAX_DEPTH = 64
_THREAD_BYTES = 1 << 16  # a larger body is read beside the event loop, not on it

T = TypeVar("T")


async def read(request: Request, max_bytes: int, understand: Callable[[dict[str, Any]], T]) -> T:
    """What `understand` makes of the JSON object of the body; checking a large one takes as long as parsing it."""
    _require_json(request.headers.get("content-type"))
    raw = await _read(request, max_bytes)
    if len(raw) > _THREAD_BYTES:
        return await to_thread.run_sync(lambda: understand(parse(raw)))
    return understand(parse(raw))


def parse(raw: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, no NaN or Infinity, no lone surrogates, bounded nesting, an object."""
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_not_finite)
        if b"\\u" in raw:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except UnicodeError:
        raise _invalid("it is not valid UTF-8 (or holds half of a surrogate pair)") from None
    except ValueError as error:
        raise _invalid(str(error)) from None
    if not isinstance(found, dict):
        raise _invalid("it must be a JSON object")
    if _depth(found) > _MAX_DEPTH:
        raise _invalid("it is nested too deeply")
    return found


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(raw)


def _require_json(content_type: str | None) -> None:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise refuse(415, "unsupported_media_type", "The content type must be application/json.")


def _depth(found: object) -> int:
    """Levels of nesting, counted without recursion."""
    depth, level = 0, [found]
    while level:
        depth += 1
        level = [item for node in level for item in _children(node) if isinstance(item, dict | list)]
    return depth


def _children(node: object) -> Any:
    return node.values() if isinstance(node, dict) else node


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _invalid(why: str) -> InvalidParameterError:
    return InvalidParameterError(None, f"The request body could not be read: {why}.", code="invalid_json")


def _too_large(max_bytes: int) -> ProblemError:
    return refuse(413, "request_too_large", f"The request body exceeds {max_bytes} bytes.")
