"""Pacer: a TCP relay that lets bytes through at a given rate, each way: a slow link where the kernel cannot shape one.

Both ways have a budget of their own, shared by all connections, as on a full-duplex wire. Bytes wait in the relay
until their time has come, in pieces of 16 KiB, and TCP's own flow control reaches the sender behind it. It adds a
copy and the scheduling of one thread; the rate is that of payload bytes, so `bench.links` measures it by plain TCP.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Self

PIECE_BYTES = 16 << 10
EARLY_S = 0.001  # not worth a timer
BURST_S = 0.005  # what a timer may be late: made up for, so that the mean rate is right


class Pacer(threading.Thread):
    """Listens on `port` for the time of a `with` block and relays to 127.0.0.1:`target`, which may be set later."""

    def __init__(self, target: int = 0) -> None:
        super().__init__(daemon=True)
        self.target = target
        self.rate = float("inf")  # bytes/s
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._free_at = {"up": 0.0, "down": 0.0}

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    def __enter__(self) -> Self:
        self.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._pump("up", reader, far_writer), self._pump("down", far_reader, writer))

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(PIECE_BYTES):
                await self._wait(way, len(piece))
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _wait(self, way: str, size: int) -> None:
        """Until the wire has carried what is ahead, and this."""
        self._free_at[way] = max(self._free_at[way], time.monotonic() - BURST_S) + size / self.rate
        if (left := self._free_at[way] - time.monotonic()) > EARLY_S:
            await asyncio.sleep(left)
