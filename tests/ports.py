"""Ports: one on the loopback that nobody has, and nobody gets before the caller has bound it.

The kernel hands out the ports of outgoing connections and of binds to 0 at any time, so that one it named a moment ago
may be gone. Ours lie below those, and callers on one machine take turns.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PORTS = range(21_000, 31_000)


def free_port() -> int:
    while True:
        port = _PORTS[_turn() % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _turn() -> int:
    """How often anybody on this machine was here before."""
    with _locked(Path(tempfile.gettempdir()) / f"crossfill-test-ports-{os.getuid()}") as file:
        turn = int(os.pread(file, 20, 0) or b"0")
        os.pwrite(file, b"%020d" % (turn + 1), 0)
        return turn


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)
