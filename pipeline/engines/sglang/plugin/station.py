"""Station: the plug-in's end of the connection to the worker. One thread does what the worker asks, in order.

It shares the interpreter with SGLang's scheduler, whose loop spins while transfers are under way: see `breathe`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.sglang import message as messages
from pipeline.engines.sglang.link import SHAPE
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.order import First
from pipeline.engines.sglang.ring import Ring
from pipeline.page import PageShape

_log = logging.getLogger(__name__)
_BREATH_S = 0.0002
_IDLE_S = 0.001  # what a page waits at most while nothing is computed


class Transfer(Protocol):
    """One request's pages, as SGLang sees them. Called on the station's thread, but for `draw`."""

    def read(self, page: int, pages: NDArray[np.float16]) -> bool:
        """As many as there is room for in `pages`, from `page` on. False when the request has ended: nothing was
        touched."""
        ...

    def write(self, page: int, pages: NDArray[np.float16]) -> bool: ...

    def obey(self, message: Message) -> None:
        """RELEASE or COMMIT."""
        ...

    def draw(self, first: First) -> None:
        """P, on the scheduler's thread: what was drawn behind the tokens computed so far."""
        ...

    def lose(self) -> None:
        """The worker is gone."""
        ...


class Station:
    """Connects to the worker's abstract socket, which sends the ring and the page shape. `measure` answers MEASURE."""

    def __init__(self, address: str, measure: Callable[[], tuple[int, int]]) -> None:
        self._measure = measure
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._peer.connect(f"\0{address}")
        packet, fds, _, _ = socket.recv_fds(self._peer, SHAPE.size, 1)
        self.shape = PageShape(*SHAPE.unpack(packet))
        self.ring = Ring(fds[0], self.shape)
        self._transfers: dict[int, Transfer] = {}
        self._lock = threading.Lock()
        self._busy = False
        self._breathed = 0.0

    def start(self) -> None:
        """Say hello and begin to serve."""
        threading.Thread(target=self._serve, name="crossfill-station", daemon=True).start()
        self.say(Message(Kind.HELLO))

    def add(self, room: int, transfer: Transfer) -> None:
        with self._lock:
            self._transfers[room] = transfer

    def remove(self, room: int) -> None:
        with self._lock:
            self._transfers.pop(room, None)

    def draw(self, room: int, first: First) -> None:
        with self._lock:
            transfer = self._transfers.get(room)
        if transfer is not None:
            transfer.draw(first)

    def say(self, message: Message) -> None:
        with suppress(OSError):  # the worker is gone: the serving thread sees it too, and this process ends with it
            self._peer.sendall(messages.encode(message))

    def breathe(self, *, idle: bool) -> None:
        """Called from the scheduler's loop, for every transfer that it polls: let our thread have the interpreter.

        Python takes it from a spinning thread every 5 ms only, and a page is dozens of small copies.
        """
        now = time.monotonic()
        if (self._busy or idle) and now - self._breathed > _IDLE_S:
            time.sleep(_IDLE_S if idle else _BREATH_S)
            self._breathed = time.monotonic()

    def _serve(self) -> None:
        try:
            while packet := self._peer.recv(messages.MAX_SIZE):
                self._busy = True
                self._take(messages.decode(packet))
                self._busy = False
        except OSError:
            pass  # the worker is gone
        except Exception:  # of ours: the worker must not wait for answers of a thread that has ended
            _log.exception("the plug-in cannot serve any more")
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left = list(self._transfers.values())
        for transfer in left:
            transfer.lose()

    def _take(self, message: Message) -> None:
        with self._lock:
            transfer = self._transfers.get(message.room)
        if message.kind is Kind.MEASURE:
            free, cached = self._measure()
            self.say(Message(Kind.GAUGES, page=free, value=cached))
        elif message.kind in (Kind.READ, Kind.WRITE):
            done = transfer is not None and self._copy(transfer, message)
            self.say(message._replace(kind=Kind.COPIED if done else Kind.REFUSED))
        elif transfer is not None:
            transfer.obey(message)

    def _copy(self, transfer: Transfer, message: Message) -> bool:
        try:
            move = transfer.read if message.kind is Kind.READ else transfer.write
            return move(message.page, self.ring.runs[message.run][: message.value])
        except Exception:  # the worker must get an answer: it waits for one
            _log.exception("page %d of room %d, and %d behind it", message.page, message.room, message.value - 1)
            return False
