"""BrokerClock: the broker's time without a round trip for each reading.

One clock for all hosts: never compare the wall clocks of two of them. Between refreshes the local monotonic clock
carries the time on; two quartz clocks part by about 50 microseconds per second at worst.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis import Redis

from pipeline.broker.connect import translate

PROBES = 5


class BrokerClock:
    """Milliseconds of Redis TIME, from a local monotonic clock and the offset seen by the quickest of a few probes.

    The quickest round trip bounds the error best: it is at most half of it (Cristian, 1989).
    """

    def __init__(self, client: Redis, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._monotonic = monotonic
        self._offset_ms: float | None = None
        self.error_ms = float("inf")  # bound of the last refresh

    def now_ms(self) -> float:
        """Raises BrokerError, and that only before the first refresh succeeded."""
        if self._offset_ms is None:
            self.refresh()
        assert self._offset_ms is not None
        return self._local_ms() + self._offset_ms

    def refresh(self) -> None:
        """Measure the offset anew. Raises BrokerError; the old offset then stays."""
        round_trip_ms, offset_ms = min(self._probe() for _ in range(PROBES))
        self._offset_ms = offset_ms
        self.error_ms = round_trip_ms / 2

    def _probe(self) -> tuple[float, float]:
        before_ms = self._local_ms()
        with translate():
            seconds, microseconds = self._client.time()
        round_trip_ms = self._local_ms() - before_ms
        return round_trip_ms, seconds * 1000 + microseconds / 1000 - (before_ms + round_trip_ms / 2)

    def _local_ms(self) -> float:
        return self._monotonic() * 1000
