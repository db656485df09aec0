"""Counts of jobs by where RQ keeps them, against jobs put there one by one."""

from __future__ import annotations

from redis import Redis
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from pipeline.broker import queue, tally
from pipeline.broker.queue import DECODE_JOB, JobSpec
from pipeline.settings import BrokerSettings

KINDS = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)


def test_each_place_is_counted_by_itself(redis_client: Redis) -> None:
    with redis_client.pipeline() as pipe:
        for name in ("decode.a", "decode.a", "prefill.x.00"):
            queue.enqueue(pipe, redis_client, JobSpec(name, DECODE_JOB, "h", {}), BrokerSettings())
        pipe.execute()
    for count, kind in enumerate(KINDS, start=1):
        key = kind("decode.a", connection=redis_client, serializer=JSONSerializer).key
        redis_client.zadd(key, {f"job-{n}": 1 for n in range(count)})
    assert tally.known(redis_client) == ["decode.a", "prefill.x.00"]
    assert tally.tallies(redis_client, ["decode.a", "nothing"]) == {
        "decode.a": (2, 1, 2, 3, 4),
        "nothing": (0, 0, 0, 0, 0),
    }
    assert tally.tallies(redis_client, []) == {}
