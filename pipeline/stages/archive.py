"""Archive: the folder of captures and the one thread that writes into it.

Rules: (1) nobody waits for the disk: what the buffer cannot take is dropped, and said so in the log; (2) a file is
there whole or not at all (written aside, then renamed), readable by its owner only; (3) what the disk refuses ends
capturing in this process, never a request. Several processes may share a folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pipeline import capture as captures
from pipeline.capture import Capture
from pipeline.errors import CrossfillError
from pipeline.page import Page
from pipeline.settings import CaptureSettings

_log = logging.getLogger(__name__)
_STALE_S = 3600.0  # a half-written file that old belongs to a process that died


class Draft(NamedTuple):
    """A capture on its way. `finish` is called on the archive's thread: the capture as the handoff ended, None to drop.

    `room_bytes` is what `Archive.reserve` granted for it.
    """

    handoff_id: str
    pages: tuple[Page, ...]
    room_bytes: int
    finish: Callable[[], Capture | None]


class Archive:
    """Bounded: `reserve` room for pages before copying them, then `put` the draft, or `release` the room."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._drafts: deque[Draft] = deque()
        self._reserved_bytes = 0
        self._disabled = ""
        self._closing = False
        self._busy = False
        self._thread: threading.Thread | None = None

    @property
    def disabled(self) -> str:
        """Why nothing is written any more; empty while it works."""
        return self._disabled

    def reserve(self, handoff_id: str, room_bytes: int) -> bool:
        """False when the capture must be dropped: too large, no room, or the archive is disabled or closing."""
        limits = self._settings
        with self._changed:
            if self._disabled or self._closing:
                return False
            left = limits.buffer_bytes - self._reserved_bytes
            granted = room_bytes <= min(left, limits.max_file_bytes)
            self._reserved_bytes += room_bytes if granted else 0
        if not granted:
            setting = "max_file_bytes" if room_bytes > limits.max_file_bytes else "buffer_bytes"
            _log.warning("handoff %s is not captured: %d bytes exceed capture.%s", handoff_id, room_bytes, setting)
        return granted

    def release(self, room_bytes: int) -> None:
        with self._changed:
            self._reserved_bytes -= room_bytes
            self._changed.notify_all()

    def put(self, draft: Draft) -> None:
        with self._changed:
            self._drafts.append(draft)
            if self._thread is None:  # most processes never capture anything
                self._thread = threading.Thread(target=self._work, name="capture", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every draft was written or dropped; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._drafts and not self._busy, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Take nothing new, write what is there."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- the archive's thread

    def _work(self) -> None:
        while (draft := self._next()) is not None:
            try:
                self._store(draft)
            except CrossfillError as error:
                _log.warning("handoff %s is not captured: %s", draft.handoff_id, error)
            except OSError as error:
                self._disable(error)
            except Exception:  # a bug of ours must not end capturing, nor anything else
                _log.exception("handoff %s is not captured", draft.handoff_id)
            finally:
                self._done(draft)

    def _next(self) -> Draft | None:
        with self._changed:
            self._changed.wait_for(lambda: self._drafts or self._closing)
            self._busy = bool(self._drafts)
            return self._drafts.popleft() if self._drafts else None

    def _done(self, draft: Draft) -> None:
        with self._changed:
            self._busy = False
            self._reserved_bytes -= draft.room_bytes
            self._changed.notify_all()

    def _disable(self, error: OSError) -> None:
        """Disk full, no permission: nothing that the next capture would not meet too."""
        self._disabled = f"{error.strerror or error}: {error.filename or self._settings.folder}"
        _log.error("capturing ends until this process is started again: %s", self._disabled)

    def _store(self, draft: Draft) -> None:
        if self._disabled or (found := draft.finish()) is None:
            return
        if self._settings.redact:
            path = write(self._settings.folder, captures.redact(found, draft.pages))
        else:
            path = write(self._settings.folder, found, draft.pages)
        _log.info("handoff %s is captured in %s", draft.handoff_id, path)
        prune(self._settings.folder, self._settings.max_files)


def file_name(capture: Capture) -> str:
    """Sorts by the time of creation (broker's clock), names the handoff."""
    created_ms = int(capture.trace.get("created_ms", 0))
    return f"{created_ms:013d}-{capture.request.handoff_id}{captures.SUFFIX}"


def write(folder: Path, capture: Capture, pages: Iterable[Page] = (), name: str | None = None) -> Path:
    """One file of mode 0600, there whole or not at all; the folder is made with mode 0700. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / (name or file_name(capture))
    aside = folder / f".{path.name}.{os.getpid()}.part"
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            for piece in captures.encode(capture, pages):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    return path


def prune(folder: Path, max_files: int) -> None:
    """Let the oldest captures go, and what a dead process left half-written. Others may prune at the same time."""
    for path in sorted(folder.glob(f"*{captures.SUFFIX}"))[:-max_files]:
        path.unlink(missing_ok=True)
    for part in folder.glob(".*.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()
