"""The broker's clock: exact against a scripted server, and beside TIME of a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.broker.clock import BrokerClock
from pipeline.errors import BrokerError


class Lab:
    """Local clock and server in one: each TIME takes (there, back) seconds of local time."""

    def __init__(self, ahead_s: float, trips: list[tuple[float, float]]) -> None:
        self.local_s = 100.0
        self.ahead_s = ahead_s
        self.trips: Iterator[tuple[float, float]] = iter(trips)

    def monotonic(self) -> float:
        return self.local_s

    def time(self) -> tuple[int, int]:
        trip = next(self.trips, None)
        if trip is None:
            raise RedisConnectionError("cut")
        there, back = trip
        self.local_s += there
        micros = round((self.local_s + self.ahead_s) * 1_000_000)
        self.local_s += back
        return micros // 1_000_000, micros % 1_000_000


def _clock(lab: Lab) -> BrokerClock:
    return BrokerClock(cast(Redis, lab), lab.monotonic)


def test_the_quickest_probe_wins_and_bounds_the_error() -> None:
    lab = Lab(5000.0, [(0.5, 0.0), (0.0, 0.8), (0.001, 0.003), (0.2, 0.2), (0.9, 0.0)])
    clock = _clock(lab)
    now_ms = clock.now_ms()
    # 1 ms there and 3 ms back are taken as 2 and 2: the clock runs 1 ms behind the truth
    assert now_ms == pytest.approx((lab.local_s + 5000) * 1000 - 1, abs=1e-6)
    assert clock.error_ms == pytest.approx(2)


def test_it_moves_with_the_local_clock_and_asks_nobody() -> None:
    lab = Lab(-50.0, [(0.0, 0.0)] * 5)
    clock = _clock(lab)
    first = clock.now_ms()
    lab.local_s += 12.5
    assert clock.now_ms() - first == pytest.approx(12_500)  # a sixth TIME would have raised


def test_a_failed_refresh_keeps_the_old_offset() -> None:
    lab = Lab(7.0, [(0.0, 0.0)] * 5)
    clock = _clock(lab)
    clock.refresh()
    with pytest.raises(BrokerError):
        clock.refresh()
    assert clock.now_ms() == pytest.approx(107_000)


def test_no_time_before_the_first_answer() -> None:
    with pytest.raises(BrokerError):
        _clock(Lab(0.0, [])).now_ms()


def test_beside_a_real_server(redis_client: Redis) -> None:
    clock = BrokerClock(redis_client)
    clock.refresh()
    before, now, after = _time_ms(redis_client), clock.now_ms(), _time_ms(redis_client)
    assert before - clock.error_ms - 1 <= now <= after + clock.error_ms + 1


def _time_ms(client: Redis) -> float:
    seconds, micros = client.time()
    return float(seconds * 1000 + micros / 1000)
