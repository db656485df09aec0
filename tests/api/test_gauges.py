"""What a scrape reads of the broker, and what it says when there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from pipeline.api import gauges
from pipeline.broker import keys, queue
from pipeline.broker.address import Address
from pipeline.broker.connect import connect
from pipeline.broker.operator import Operator
from pipeline.broker.queue import DECODE_JOB, JobSpec
from pipeline.broker.registry import Registry
from pipeline.metrics import Metrics, Reading
from pipeline.settings import Settings
from tests.cli.rig import CONTRACT, D, P

SETTINGS = Settings()


def test_every_gauge(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    for replica in (P, D, replace(D, name="mlx-1", load={"draining": 1}), replace(D, name="mlx-2")):
        registry.register(replica, 60)
    with redis_client.pipeline() as pipe:
        for name in ("decode.mlx-0", "decode.mlx-0", "decode.gone"):
            queue.enqueue(pipe, redis_client, JobSpec(name, DECODE_JOB, "h", {}), SETTINGS.broker)
        pipe.execute()
    redis_client.set(keys.BUDGET_TOTAL, 77)
    redis_client.sadd("rq:queues", "rq:queue:decode.forgotten")
    found = gauges.source(Operator(redis_client, SETTINGS), 1000)()
    prefill = [keys.prefill_queue(engine, CONTRACT.digest) for engine in ("mlx", "vllm")]
    queued = {
        "decode.gone": 1,
        "decode.mlx-0": 2,
        **dict.fromkeys(["decode.mlx-1", "decode.mlx-2", "decode.vllm-0", *prefill], 0),
    }
    assert sorted(found) == sorted(
        [
            Reading("crossfill_broker_up", 1),
            Reading("crossfill_budget_bytes", 1000),
            Reading("crossfill_in_flight_bytes", 77),
            Reading("crossfill_budget_waiters", 0),
            Reading("crossfill_live_handoffs", 0),
            Reading("crossfill_replicas", 1, ("vllm", "both", "serving")),
            Reading("crossfill_replicas", 2, ("mlx", "both", "serving")),
            Reading("crossfill_replicas", 1, ("mlx", "both", "draining")),
            *(Reading("crossfill_queued_jobs", count, (name,)) for name, count in queued.items()),
        ]
    )


def test_page_servers_that_answer_and_that_do_not(redis_client: Redis, server_url: str) -> None:
    registry, gone = Registry(redis_client), "redis://127.0.0.1:9/0"
    registry.register(replace(D, pages=Address(server_url, 1000)), 60)
    registry.register(replace(D, name="mlx-1", pages=Address(gone, 2000)), 60)
    redis_client.set(keys.BUDGET_TOTAL, 77)
    found = gauges.source(Operator(redis_client, SETTINGS), 1)()
    assert sorted(reading for reading in found if "page_server" in reading.name) == sorted(
        [
            Reading("crossfill_page_server_up", 0, (gone,)),
            Reading("crossfill_page_server_budget_bytes", 2000, (gone,)),
            Reading("crossfill_page_server_up", 1, (server_url,)),
            Reading("crossfill_page_server_budget_bytes", 1000, (server_url,)),
            Reading("crossfill_page_server_in_flight_bytes", 77, (server_url,)),
            Reading("crossfill_page_server_waiters", 0, (server_url,)),
        ]
    )


def test_of_a_broker_that_is_away_nothing_stale_is_told() -> None:
    metrics = Metrics("api")
    with connect("redis://127.0.0.1:9/0") as client:
        metrics.add_source(gauges.source(Operator(client, SETTINGS), 1000))
        text = metrics.exposition()[0].decode()
    assert "crossfill_broker_up 0.0" in text
    assert "crossfill_budget_bytes 1000.0" in text
    assert "crossfill_in_flight_bytes" not in text


@pytest.mark.parametrize("load", [{}, {"draining": 0}])
def test_a_replica_that_does_not_drain_serves(redis_client: Redis, load: dict[str, int]) -> None:
    Registry(redis_client).register(replace(P, load=load), 60)
    found = gauges.source(Operator(redis_client, SETTINGS), 1)()
    assert Reading("crossfill_replicas", 1, ("vllm", "both", "serving")) in found
