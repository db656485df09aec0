"""Tally: how many jobs lie where, by what RQ itself keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from redis import Redis
from rq import Queue
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from pipeline.broker.connect import translate
from pipeline.broker.job import open_queue, text


class Tally(NamedTuple):
    """Jobs of one queue by where they are; `finished` to `cancelled` only as long as RQ keeps them."""

    queued: int
    started: int
    finished: int
    failed: int
    cancelled: int


def known(client: Redis) -> list[str]:
    """Every queue that ever had a job, sorted. Raises BrokerError."""
    with translate():
        found: Any = client.smembers(Queue.redis_queues_keys)
    return sorted(text(name).removeprefix(Queue.redis_queue_namespace_prefix) for name in found)


_REGISTRIES = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)


def tallies(client: Redis, names: Iterable[str]) -> dict[str, Tally]:
    """What lies in each queue and in RQ's registries of it. Raises BrokerError."""
    wanted = list(names)
    with translate(), client.pipeline(transaction=False) as pipe:
        for name in wanted:
            pipe.llen(open_queue(client, name).key)
            for registry in _REGISTRIES:
                pipe.zcard(registry(name, connection=client, serializer=JSONSerializer).key)
        found = pipe.execute()
    width = 1 + len(_REGISTRIES)
    return {name: Tally(*found[at * width : (at + 1) * width]) for at, name in enumerate(wanted)}
