"""Link: the worker's end of the connection to the plug-in. Copies pages through the ring and routes what is said.

One thread receives. When the other end is gone (its process was killed) `on_lost` is called once and every copy raises
EngineError: SGLang itself notices some seconds later.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.sglang import message as messages
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.ring import RUNS, create, run_pages
from pipeline.errors import EngineError
from pipeline.page import PageShape

SHAPE = struct.Struct("<III")  # the first packet, with the ring's descriptor: layers, KV heads, head dim
_CREDENTIALS = struct.Struct("iII")  # Linux: struct ucred
_ANSWERS = (Kind.COPIED, Kind.REFUSED)
_MEASURE_S = 5.0


class Link:
    """Listens at `address` (an abstract socket) from the start. `on_message` gets what names a room, in order."""

    def __init__(self, shape: PageShape, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self.address = f"crossfill-sglang-{secrets.token_hex(16)}"
        self.shape = shape
        self._on_message = on_message
        self._on_lost = on_lost
        self.batch = run_pages(shape)  # pages of one copy at most
        self._ring, self._fd = create(shape)
        self._free: SimpleQueue[int] = SimpleQueue()
        for run in range(RUNS):
            self._free.put(run)
        self._lock = threading.Lock()  # of what follows, and of sending
        self._copies: dict[int, Future[bool]] = {}  # by run
        self._measures: list[Future[Message]] = []
        self._peer: socket.socket | None = None
        self._lost = False
        self._attached = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run, name="sglang-link", daemon=True)
        self._thread.start()

    def wait_attached(self, timeout_s: float) -> bool:
        """True once the plug-in has said that its pool fits."""
        return self._attached.wait(timeout_s)

    def say(self, message: Message) -> None:
        """Raises EngineError when the other end is gone."""
        with self._lock:
            if self._lost or self._peer is None:
                raise EngineError("SGLang's scheduler is gone")
            with suppress(OSError):  # the receiving thread sees the same end and calls `on_lost`
                self._peer.sendall(messages.encode(message))

    def copy_out(self, room: int, page: int, count: int = 1) -> NDArray[np.float16] | None:
        """Fresh `(count, layers, 2, kv_heads, 64, head_dim)`, all 64 rows whatever they hold; at most `batch` pages.

        None when the request has ended. Raises EngineError.
        """
        with self._run_of_pages() as run:
            return np.array(self._ring.runs[run][:count]) if self._copy(Kind.READ, room, page, count, run) else None

    def copy_in(self, room: int, page: int, pages: NDArray[np.float16]) -> bool:
        """At most `batch` pages from `page` on. False when the request has ended. Raises EngineError."""
        with self._run_of_pages() as run:
            np.copyto(self._ring.runs[run][: len(pages)], pages)
            return self._copy(Kind.WRITE, room, page, len(pages), run)

    def measure(self) -> tuple[int, int]:
        """Pages that are free or could be evicted, and cached pages. Raises EngineError."""
        answer: Future[Message] = Future()
        with self._lock:
            self._measures.append(answer)
        try:
            self.say(Message(Kind.MEASURE))
            gauges = answer.result(_MEASURE_S)
        except FutureTimeoutError:
            raise EngineError(f"SGLang's scheduler did not answer within {_MEASURE_S:g} s") from None
        finally:
            with self._lock, suppress(ValueError):
                self._measures.remove(answer)
        return gauges.page, gauges.value

    def close(self) -> None:
        """Idempotent. Not for the link's own thread."""
        for end in (self._peer, self._listener):
            if end is not None:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    @contextmanager
    def _run_of_pages(self) -> Iterator[int]:
        """A run of the ring, in order of asking. It never takes long: the plug-in answers every copy at once."""
        run = self._free.get()
        try:
            yield run
        finally:
            self._free.put(run)

    def _copy(self, kind: Kind, room: int, page: int, count: int, run: int) -> bool:
        answer: Future[bool] = Future()
        with self._lock:
            self._copies[run] = answer
        try:
            self.say(Message(kind, room, page, value=count, run=run))
            return answer.result()
        finally:
            with self._lock:
                self._copies.pop(run, None)

    # The link's thread.

    def _run(self) -> None:
        try:
            peer = self._accept()
            while packet := peer.recv(messages.MAX_SIZE):
                self._take(messages.decode(packet))
        except OSError:
            pass  # the end, as below
        finally:
            self._end()

    def _accept(self) -> socket.socket:
        """The plug-in's connection. Anybody on this host can find an abstract socket: only our own user may stay."""
        while True:
            peer, _ = self._listener.accept()
            _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user == os.getuid():
                break
            peer.close()
        shape = SHAPE.pack(self.shape.layers, self.shape.kv_heads, self.shape.head_dim)
        socket.send_fds(peer, [shape], [self._fd])
        with self._lock:
            self._peer = peer
        return peer

    def _take(self, message: Message) -> None:
        if message.kind in _ANSWERS:
            with self._lock:
                answer = self._copies.get(message.run)
            if answer is not None:
                answer.set_result(message.kind is Kind.COPIED)
        elif message.kind is Kind.GAUGES:
            with self._lock:
                waiting, self._measures = self._measures, []
            for measure in waiting:
                measure.set_result(message)
        elif message.kind is Kind.HELLO:
            self._attached.set()
        else:
            self._on_message(message)

    def _end(self) -> None:
        with self._lock:
            self._lost = True
            copies, measures = list(self._copies.values()), list(self._measures)
        gone = EngineError("SGLang's scheduler is gone")
        for copy in copies:
            if not copy.done():
                copy.set_exception(gone)
        for measure in measures:
            if not measure.done():
                measure.set_exception(gone)
        for end in (self._peer, self._listener):
            if end is not None:
                end.close()
        os.close(self._fd)
        self._on_lost()
