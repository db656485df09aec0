"""Job: what RQ keeps of one piece of work.

The rules here: jobs are JSON and carry a handoff id only; a job names a function and never brings one. RQ's default
serializer is pickle, by which whoever may write to the broker runs code in every worker: it is used nowhere.
"""

from __future__ import annotations

import logging
import zlib
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty

from pipeline.errors import PeerError

_log = logging.getLogger(__name__)
PREFILL_JOB = "pipeline.workers.prefill.run"
DECODE_JOB = "pipeline.workers.decode.run"
DATA_BYTES = 4096  # of a job's payload, unpacked
_EXECUTABLE = ("success_callback", "failure_callback", "stopped_callback", "webhooks")
JOBS = {PREFILL_JOB: "prefill", DECODE_JOB: "decode"}


class JobSpec(NamedTuple):
    """A job to be: `function` is one of JOBS; `meta` is shown by dashboards and holds no prompt text.

    At its end the job's meta also has `state` and what the handler returned: pages, bytes, tokens.
    """

    queue: str
    function: str
    handoff_id: str
    meta: dict[str, str]


class HandoffJob(Job):
    """A job that brings nothing to execute.

    RQ would import and call the callbacks named in a job's hash, and post to its webhooks: whoever may write to the
    broker could then run code here. All of that is dropped on reading, as are retries, repeats and rate limits.
    """

    def restore(self, raw_data: dict[bytes, bytes]) -> None:
        """Raises whatever RQ's parser falls over, ValueError for a payload that is too large."""
        kept = {name: value for name, value in raw_data.items() if not text(name).startswith(_EXECUTABLE)}
        _require_small(kept.get(b"data", b""))
        super().restore(kept)
        self.retries_left = self.repeats_left = self.rate_limit_key = None
        self._dependency_ids = []

    @property
    def handoff_id(self) -> str:
        """The one argument. Raises PeerError for any other shape (RQ's DeserializationError for what is not JSON)."""
        if self.instance is None and not self.kwargs and len(self.args) == 1 and isinstance(self.args[0], str):
            return self.args[0]
        raise PeerError("a job must carry a handoff id and nothing else")


def open_queue(client: Redis, name: str) -> Queue:
    """RQ's queue `name` with JSON jobs. Every use of RQ in this package goes through it: the default unpickles."""
    return Queue(name, connection=client, serializer=JSONSerializer, job_class=HandoffJob)


def fetch(client: Redis, queue: Queue, job_id: str) -> HandoffJob | None:
    """A job that was moved out of `queue`. None for one that has expired, and for one whose record RQ cannot read:
    both are removed, the latter because a dashboard could not show it either. Raises redis's connection errors.
    """
    try:
        job: HandoffJob = HandoffJob.fetch(job_id, connection=client, serializer=JSONSerializer)  # type: ignore[assignment]
    except NoSuchJobError:
        client.lrem(queue.intermediate_queue_key, 1, job_id)
        return None
    except Exception as error:  # an assertion, an overflow: RQ's parser trusts what it reads
        if isinstance(error, RedisError) and not str(error).startswith("WRONGTYPE"):
            raise
        remove(client, queue, job_id, error)
        return None
    job.origin = queue.name  # where it really came from: all further bookkeeping goes by it
    return job


def remove(client: Redis, queue: Queue, job_id: str, why: Exception) -> None:
    """Away with a job that was handed out and that nobody can run: put back, it would be the next one for ever."""
    _log.error("job %s cannot be run and is removed: %s: %s", job_id, type(why).__name__, why)
    client.unlink(Job.key_for(job_id))
    client.lrem(queue.intermediate_queue_key, 1, job_id)


def _require_small(data: bytes) -> None:
    """RQ inflates a payload whatever its size: 1 MB of zlib can be 1 GB. Raises ValueError above DATA_BYTES."""
    unpacker = zlib.decompressobj()
    try:
        size = len(unpacker.decompress(data, DATA_BYTES + 1))
    except zlib.error:  # not packed
        size = len(data)
    if size > DATA_BYTES:
        raise ValueError(f"a payload of more than {DATA_BYTES} bytes; ours is a function's name and a handoff id")


def text(value: object) -> str:
    """A key or member as redis-py's types promise it: bytes or str."""
    return value.decode() if isinstance(value, bytes) else str(value)


class NoPenalty(BaseDeathPenalty):
    """RQ's own interrupts the main thread by SIGALRM, in the midst of whatever an engine does there."""

    def setup_death_penalty(self) -> None: ...

    def cancel_death_penalty(self) -> None: ...
