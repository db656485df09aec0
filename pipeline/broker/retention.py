"""Retention: what RQ keeps of jobs that are over or were lost, and for how long. Nothing grows for ever.

RQ's own upkeep runs every ten minutes and only where a worker of that queue is alive.
"""

from __future__ import annotations

from collections.abc import Iterable

from redis import Redis
from rq import Queue
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.worker_registration import WORKERS_BY_QUEUE_KEY, clean_worker_registry

from pipeline.broker.connect import translate
from pipeline.broker.job import HandoffJob, open_queue, text
from pipeline.broker.scripts import Scripts

STUCK_MS = 30_000  # a job handed out for this long and not begun: its worker died in between
_DAY_MS = 86_400_000
_ENDS = (FinishedJobRegistry, FailedJobRegistry, StartedJobRegistry, CanceledJobRegistry)


def requeue_front(client: Redis, queue_name: str, job_id: str) -> bool:
    """Put back a job that was handed out but not begun, as the next one; True for the one caller that did it.

    Raises BrokerError.
    """
    queue = open_queue(client, queue_name)
    with translate():
        return bool(Scripts(client).run("queue_return", [queue.intermediate_queue_key, queue.key], [job_id]))


def tidy(client: Redis, queue_names: Iterable[str], *, cancelled_ttl_s: float = 60.0) -> None:
    """Keep RQ's registries of these queues from growing. Safe anywhere, any number of times. Raises BrokerError.

    Ended jobs past their TTL leave; RQ never does that for cancelled ones. A job whose worker died while it ran is
    failed. One that was handed out and never begun is queued again. Ids whose job has expired are dropped.
    """
    with translate():
        for name in queue_names:
            queue = open_queue(client, name)
            for kind in (FinishedJobRegistry, FailedJobRegistry, StartedJobRegistry):
                kind(name, connection=client, job_class=HandoffJob, serializer=JSONSerializer).cleanup()
            _forget_cancelled(client, name, cancelled_ttl_s)
            _drop_expired(client, queue)
            _rescue(client, queue)


def known(client: Redis) -> set[str]:
    """Names of all queues that RQ knows of; other programs may have theirs on this server. Raises BrokerError."""
    with translate():
        keys = client.smembers(Queue.redis_queues_keys)
    return {text(key).removeprefix(Queue.redis_queue_namespace_prefix) for key in keys}


def retire(client: Redis, queue_names: Iterable[str]) -> None:
    """Of queues that nobody serves: `tidy`, and forget those of which nothing is left. Names of replicas that never
    come back must not add up. A job that is queued all the same brings its queue back. Raises BrokerError."""
    for name in queue_names:
        tidy(client, [name])
        queue = open_queue(client, name)
        with translate():
            clean_worker_registry(queue)  # those that were killed
            parts = [queue.intermediate_queue_key, WORKERS_BY_QUEUE_KEY % name]
            parts += [kind(name, connection=client).key for kind in _ENDS]
            Scripts(client).run("queue_retire", [Queue.redis_queues_keys, queue.key, *parts], [])


def _forget_cancelled(client: Redis, name: str, ttl_s: float) -> None:
    registry = CanceledJobRegistry(name, connection=client)
    now_s = client.time()[0]
    for job_id in map(text, client.zrangebyscore(registry.key, "-inf", now_s - ttl_s)):
        # RQ's own cancel leaves the job without a TTL. A requeued one is no longer cancelled, and stays.
        if client.hget(Job.key_for(job_id), "status") == JobStatus.CANCELED.value.encode():
            client.unlink(Job.key_for(job_id), Result.get_key(job_id))
        client.zrem(registry.key, job_id)


def _drop_expired(client: Redis, queue: Queue) -> None:
    for key in (queue.key, queue.intermediate_queue_key):
        ids = [text(job_id) for job_id in client.lrange(key, 0, -1)]
        with client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.exists(Job.key_for(job_id))
            there = pipe.execute()
        for job_id in (job_id for job_id, exists in zip(ids, there, strict=True) if not exists):
            client.lrem(key, 1, job_id)


def _rescue(client: Redis, queue: Queue) -> None:
    """The age of a mark counts how long a job has been seen between the queue and a worker: one server's clock."""
    handed_out = IntermediateQueue(queue.key, client)
    for job_id in handed_out.get_job_ids():
        mark = handed_out.get_first_seen_key(job_id)
        client.set(mark, 1, nx=True, px=_DAY_MS)
        if _DAY_MS - client.pttl(mark) >= STUCK_MS:
            client.unlink(mark)
            requeue_front(client, queue.name, job_id)
