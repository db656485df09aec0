"""The scale bench on a small case: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

from redis import Redis

from bench import scale
from bench.scale import Case, Use


def test_use_is_a_difference_per_request() -> None:
    used = Use(3.0, 1.5, 5000.0).per(Use(1.0, 1.0, 1000.0), 4)
    assert used == {"api_cpu_ms": 500.0, "server_cpu_ms": 125.0, "network_kb": 1.0}


def test_a_small_case(server_url: str, redis_client: Redis) -> None:
    measured = scale.run(server_url, Case(replicas=3, prompt_tokens=200, live=4), requests=3)
    assert measured["live_kb"] > 0.8  # at least the 200 token ids, 4 digits each
    assert measured["network_kb"] > 1
    assert redis_client.keys("*handoff*") == []
