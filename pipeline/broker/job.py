"""Job: what RQ keeps of one piece of work.

The rules here: jobs are JSON and carry a handoff id only; a job names a function and never brings one. RQ's default
serializer is pickle, by which whoever may write to the broker runs code in every worker: it is used nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty

PREFILL_JOB = "pipeline.workers.prefill.run"
DECODE_JOB = "pipeline.workers.decode.run"
JOBS = {PREFILL_JOB: "prefill", DECODE_JOB: "decode"}


class JobSpec(NamedTuple):
    """A job to be: `function` is one of JOBS; `meta` is shown by dashboards and holds no prompt text."""

    queue: str
    function: str
    handoff_id: str
    meta: dict[str, str]


class HandoffJob(Job):  # type: ignore[misc, unused-ignore]
    """A job that brings nothing to execute.

    RQ would import and call the callbacks named in a job's hash, and post to its webhooks: whoever may write to the
    broker could then run code here. All of that is dropped on reading, as are retries, repeats and rate limits.
    """

    def restore(self, raw_data: dict[bytes, bytes]) -> None:
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []
        self.retries_left = self.repeats_left = self.rate_limit_key = None
        self._dependency_ids = []


def open_queue(client: Redis, name: str) -> Queue:
    """RQ's queue `name` with JSON jobs. Every use of RQ in this package goes through it: the default unpickles."""
    return Queue(name, connection=client, serializer=JSONSerializer, job_class=HandoffJob)


class _NoPenalty(BaseDeathPenalty):  # type: ignore[misc, unused-ignore]
    """RQ's own interrupts the main thread by SIGALRM, in the midst of whatever an engine does there."""

    def setup_death_penalty(self) -> None: ...

    def cancel_death_penalty(self) -> None: ...
