"""Log: one line a record, as text or JSON, with the handoff it is about.

The handoff comes from the context of the thread or task that works on one (`about`), else from the message's own words.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

Style = Literal["text", "json"]
_NAMED = re.compile(r"\b(?:handoff|prefill|decode) ([0-9a-f]{32})\b")
_current: ContextVar[str] = ContextVar("handoff", default="")


@contextlib.contextmanager
def about(handoff_id: str) -> Iterator[None]:
    """What this thread or task logs inside is about this handoff."""
    token = _current.set(handoff_id)
    try:
        yield
    finally:
        _current.reset(token)


def now_about(handoff_id: str) -> None:
    """The same for the rest of a task that works on nothing else."""
    _current.set(handoff_id)


def setup(style: Style, process: str) -> None:
    """Send every record of this process to stderr. `process` is who it is: a replica's name, or `api`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def handoff_of(record: logging.LogRecord) -> str:
    """The id of the handoff that a record is about, empty when it is about none."""
    named = _NAMED.search(record.getMessage())
    return named[1] if named else _current.get()


class TextFormatter(logging.Formatter):
    """For people. A handoff that the message does not name is put behind it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s")

    def format(self, record: logging.LogRecord) -> str:
        handoff_id = handoff_of(record)
        record.about = f" [handoff {handoff_id}]" if handoff_id and handoff_id not in record.getMessage() else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """For machines: one object a line, `time` in UTC; `handoff` and `exception` only where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if handoff_id := handoff_of(record):
            line["handoff"] = handoff_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
