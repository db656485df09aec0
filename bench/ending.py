"""Ending: a bench that is stopped puts away what it has started: processes, namespaces, directories.

Python ends at SIGTERM without leaving its `with` blocks. Here SIGTERM, SIGINT and SIGHUP leave them, as an error would.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def orderly() -> Iterator[None]:
    """The block ends by SystemExit with 128 and the signal's number; what comes while it ends is ignored, so that it
    does end. In the main thread only."""
    before = {number: signal.signal(number, _end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _again(*_: object) -> None:
    """It is ending already."""


def _end(number: int, _: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, _again)  # not SIG_IGN, which what is started while it ends would inherit
    raise SystemExit(128 + number)
