"""Proxy: a TCP hop before the broker that does to connections what networks do, after toxiproxy's list of faults.

What is not TCP's to do: after `lose` the server executes a command and the client never hears of it, and `hold` stops
everything right before a command, for as long as a test wants to look.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

_PIECE = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST
_LOOK_S = 0.05
HOLD_S = 120.0  # after so long nobody comes any more
Way = Literal["up", "down"]  # towards the server, towards the client


@dataclass(frozen=True, slots=True)
class Faults:
    """What a piece of data meets on its way, in either direction. All off: a plain hop.

    `black_hole`: nothing passes and nothing is refused; what was sent arrives late, when the fault ends.
    `limit_bytes`: a connection is reset after that many bytes in the direction `limit`.
    `stall_bytes`: one that has passed so many stalls instead: it passes no more, nor does any that is made after that,
    until the fault ends. The others go on: a link is clogged, and whoever is behind it lives.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    piece_bytes: int = _PIECE  # slicer: nothing larger arrives at once
    slow_close_s: float = 0.0
    black_hole: bool = False
    limit_bytes: int | None = None
    stall_bytes: int | None = None
    limit: Way = "up"


@dataclass(slots=True)
class _Pair:
    """One client's connection and ours to the server."""

    near: socket.socket
    far: socket.socket
    doomed: bool = False  # a command of it went through whose reply must not
    passed: dict[Way, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    seen: bytes = b""  # the last bytes sent, where a marker may begin
    stalled: bool = False
    rst: set[socket.socket] = field(default_factory=set)  # ends that close by RST instead of FIN

    def shut(self) -> None:
        for end in (self.near, self.far):
            _shut(end)

    def reset(self, *ends: socket.socket) -> None:
        """Each peer sees `connection reset by peer`: the thread that reads an end wakes and closes it by RST."""
        self.rst |= set(ends)
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD)


class Proxy:
    """Passes bytes on to `port`. While cut, every connection is closed, and each new one right after it was made."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._faults = Faults()
        self._cut = False
        self._marker = b""
        self._to_lose = 0
        self._to_hold = False
        self._to_pass = 0
        self._held = threading.Event()
        self.refused = 0  # connections turned away since the last cut
        self.lost = 0  # replies swallowed since the last `lose`
        self.resets = 0
        self.stalled = threading.Event()  # a connection has passed `stall_bytes`; until the next `apply` or `mend`
        threading.Thread(target=self._serve, name="proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def cut(self) -> None:
        with self._lock:
            self._cut, self.refused = True, 0
            for pair in self._pairs:
                pair.shut()

    def reset(self) -> None:
        """Every connection ends by RST; new ones are served."""
        with self._lock:
            for pair in self._pairs:
                pair.reset(pair.near, pair.far)
            self.resets += len(self._pairs)

    def apply(self, faults: Faults) -> None:
        """From now on, for connections old and new, until the next `apply` or `mend`."""
        with self._lock:
            self._faults = faults
            self.stalled.clear()
            for pair in self._pairs:
                pair.passed, pair.stalled = {"up": 0, "down": 0}, False

    def aim(self, port: int) -> None:
        """From now on towards another server: a failover. Every connection is reset."""
        self._port = port
        self.reset()

    def lose(self, marker: bytes, times: int = 1) -> None:
        """The next `times` commands with `marker` in them are executed; instead of each reply the connection ends."""
        with self._lock:
            self._marker, self._to_lose, self.lost = marker, times, 0

    @contextlib.contextmanager
    def hold(self, marker: bytes, after: int = 0) -> Iterator[threading.Event]:
        """From right before the next command with `marker` on nothing passes, until the end; then the event is set.

        `after` of them pass before, and any fault is over until then. Whatever the command would have ended can be
        looked at meanwhile, on however fast or slow a machine.
        """
        self.mend()
        with self._lock:
            self._marker, self._to_hold, self._to_pass = marker, True, after
            self._held.clear()
        try:
            yield self._held
        finally:
            self.mend()

    def mend(self) -> None:
        """A plain hop again."""
        self.apply(Faults())
        with self._lock:
            self._cut, self._to_lose, self._to_hold = False, 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mend()
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
                self.refused += 1
                near.close()
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # the server is down: so is what the client sees
                near.close()
                return
            pair = _Pair(near, far, stalled=self.stalled.is_set())
            self._pairs.append(pair)
        threading.Thread(target=self._pass, args=(pair, "up"), daemon=True).start()
        threading.Thread(target=self._pass, args=(pair, "down"), daemon=True).start()

    def _pass(self, pair: _Pair, way: Way) -> None:
        source, target = (pair.near, pair.far) if way == "up" else (pair.far, pair.near)
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                self._forward(pair, way, data, target)
        time.sleep(self._faults.slow_close_s)
        with self._lock:
            if target not in pair.rst:
                _shut(target)
            source.close()
            if pair in self._pairs and pair.near.fileno() < 0 and pair.far.fileno() < 0:
                self._pairs.remove(pair)

    def _forward(self, pair: _Pair, way: Way, data: bytes, target: socket.socket) -> None:
        """Raises OSError where the connection is to end."""
        while data:
            faults = self._await_passage(pair)
            size = min(faults.piece_bytes, self._before_stall(pair, way, len(data), faults))
            piece, data = data[:size], data[size:]
            piece = self._within_limit(pair, way, piece, faults)
            time.sleep(faults.latency_s + (len(piece) / faults.bytes_per_s if faults.bytes_per_s else 0.0))
            doomed = way == "up" and self._marks(pair, piece) and self._dooms(pair)
            self._deliver(pair, way, piece, target, doomed)

    def _await_passage(self, pair: _Pair) -> Faults:
        while (self._faults.black_hole or pair.stalled) and not self._cut:
            time.sleep(_LOOK_S)
        return self._faults

    def _before_stall(self, pair: _Pair, way: Way, size: int, faults: Faults) -> int:
        """How many of `size` bytes pass; where those are not all, the connection stalls behind them."""
        if faults.stall_bytes is None or faults.limit != way:
            return size
        with self._lock:
            passing = min(size, faults.stall_bytes - pair.passed[way])
            pair.passed[way] += passing
            if passing < size and faults is self._faults:
                pair.stalled = True
                self.stalled.set()
            return passing

    def _within_limit(self, pair: _Pair, way: Way, piece: bytes, faults: Faults) -> bytes:
        if faults.limit_bytes is None or faults.limit != way:
            return piece
        left = faults.limit_bytes - pair.passed[way]
        pair.passed[way] += len(piece)
        if len(piece) <= left:
            return piece
        with self._lock, contextlib.suppress(OSError):
            (pair.far if way == "up" else pair.near).sendall(piece[: max(0, left)])
            pair.reset(pair.near, pair.far)
            self.resets += 1
        raise ConnectionResetError

    def _deliver(self, pair: _Pair, way: Way, piece: bytes, target: socket.socket, doomed: bool) -> None:
        if way == "down":
            with self._lock:
                if pair.doomed:  # the server's end closes in order, so that it executes all it was sent
                    self.lost += not pair.rst
                    pair.reset(pair.near)
                    return
        elif doomed:
            with self._lock:  # no reply may pass before this is sent
                pair.doomed = True
                target.sendall(piece)
                return
        target.sendall(piece)

    def _marks(self, pair: _Pair, piece: bytes) -> bool:
        """Whether `piece` completes the marker of a command to lose or to hold."""
        if not (self._to_lose or self._to_hold):
            return False
        seen, pair.seen = pair.seen + piece, (pair.seen + piece)[1 - len(self._marker) :]
        return self._marker in seen

    def _dooms(self, pair: _Pair) -> bool:
        """Whether the reply of the marked command is to be lost. One to hold waits here until it may go on."""
        with self._lock:
            if self._to_hold and self._to_pass:
                self._to_pass -= 1
            elif self._to_hold:
                self._faults, self._to_hold = Faults(black_hole=True), False
                self._held.set()
            loses, self._to_lose = self._to_lose > 0, max(0, self._to_lose - 1)
        self._await_passage(pair)
        return loses


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def first_held(hops: Mapping[str, Proxy], marker: bytes, after: int = 0) -> Iterator[Callable[[], str]]:
    """Each of `hops` holds as in `Proxy.hold`; what is yielded waits for the first that does, and says its name."""

    def wait() -> str:
        deadline = time.monotonic() + HOLD_S
        while time.monotonic() < deadline:
            for name, event in held.items():
                if event.wait(_LOOK_S / len(held)):
                    return name
        raise AssertionError(f"nobody sent {marker!r} {after + 1} times")

    with contextlib.ExitStack() as stack:
        held = {name: stack.enter_context(hop.hold(marker, after)) for name, hop in hops.items()}
        yield wait
