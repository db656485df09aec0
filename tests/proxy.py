"""Proxy: a TCP hop before the broker that a test can cut and mend, as a network does."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Passes bytes on to `port`. While cut, every connection is closed, and each new one right after it was made."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._cut = False
        self._refused = 0
        threading.Thread(target=self._serve, name="proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    @property
    def refused(self) -> int:
        """Connections turned away since the last cut."""
        return self._refused

    def cut(self) -> None:
        with self._lock:
            self._cut, self._refused = True, 0
            for end in self._sockets:
                _shut(end)

    def mend(self) -> None:
        self._cut = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        _shut(self._listener)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._take(self._listener.accept()[0])

    def _take(self, near: socket.socket) -> None:
        with self._lock:
            if self._cut:
                self._refused += 1
                near.close()
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets |= {near, far}
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with self._lock:
            _shut(target)
            source.close()
            self._sockets.discard(source)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
