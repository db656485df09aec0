"""Queue: jobs handed out through RQ. It is for hand-out, inspection and history; who is alive, our own leases say."""

from __future__ import annotations

from collections.abc import Iterable

from redis import Redis
from redis.client import Pipeline

from pipeline.broker.connect import translate
from pipeline.broker.job import DECODE_JOB, JOBS, PREFILL_JOB, JobSpec, open_queue
from pipeline.broker.retention import known, requeue_front, retire, tidy
from pipeline.settings import BrokerSettings

__all__ = [
    "DECODE_JOB",
    "PREFILL_JOB",
    "JobSpec",
    "enqueue",
    "known",
    "queue_lengths",
    "requeue_front",
    "retire",
    "tidy",
]


def enqueue(pipe: Pipeline, client: Redis, spec: JobSpec, settings: BrokerSettings, *, at_front: bool = False) -> str:
    """Add a job to the transaction that `pipe` collects, and return its id; nothing is sent before `pipe.execute()`.

    `client` is asked once for the server's version. The job waits for `handoff_ttl_s` at most. Raises BrokerError.
    """
    if spec.function not in JOBS:
        raise ValueError(f"{spec.function} is not a job of ours: {', '.join(JOBS)}")
    queue = open_queue(client, spec.queue)
    with translate():
        job = queue.create_job(
            spec.function,
            args=(spec.handoff_id,),
            meta={"state": "live", **spec.meta},
            description=f"{JOBS[spec.function]} {spec.handoff_id}",
            timeout=-1,  # RQ's timeouts interrupt native code at random; a handoff has its own deadlines
            ttl=max(1, int(settings.handoff_ttl_s)),
            result_ttl=settings.result_ttl_s,
            failure_ttl=settings.failure_ttl_s,
        )
        queue.enqueue_job(job, pipeline=pipe, at_front=at_front)
    return str(job.id)


def queue_lengths(client: Redis, names: Iterable[str]) -> dict[str, int]:
    """Jobs waiting in each queue. Raises BrokerError."""
    wanted = list(names)
    with translate(), client.pipeline(transaction=False) as pipe:
        for name in wanted:
            pipe.llen(open_queue(client, name).key)
        return dict(zip(wanted, pipe.execute(), strict=True))
