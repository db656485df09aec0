"""Queue: jobs handed out through RQ, and the worker that runs many of them beside one engine.

RQ is for hand-out, inspection and history; who is alive is decided by our own leases. The rule here: one queue per
worker, because only then does RQ move a job (BLMOVE) instead of popping it, and a crash in between loses nothing.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError
from rq import Queue
from rq.command import parse_payload
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry

from pipeline.broker.connect import translate
from pipeline.broker.job import DECODE_JOB, JOBS, PREFILL_JOB, HandoffJob, JobSpec, NoPenalty, open_queue
from pipeline.broker.scripts import Scripts
from pipeline.errors import BrokerError, HandoffCancelledError, PeerError
from pipeline.settings import BrokerSettings

__all__ = [
    "DECODE_JOB",
    "PREFILL_JOB",
    "ConcurrentWorker",
    "JobSpec",
    "enqueue",
    "queue_lengths",
    "requeue_front",
    "tidy",
]

JSON = Mapping[str, object]
Handler = Callable[[str], JSON]

STUCK_MS = 30_000  # a job handed out for this long and not begun: its worker died in between
POLL_S = 1  # how long one look for a job, or for a free slot, blocks
RESULT_BYTES = 4096
_DAY_MS = 86_400_000
_TTL_S = 90  # a silent worker's record, and its jobs' claim to be running, end after this


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
            meta=dict(spec.meta),
            description=f"{JOBS[spec.function]} {spec.handoff_id}",
            timeout=-1,  # RQ's timeouts interrupt native code at random; a handoff has its own deadlines
            ttl=max(1, int(settings.handoff_ttl_s)),
            result_ttl=settings.result_ttl_s,
            failure_ttl=settings.failure_ttl_s,
        )
        queue.enqueue_job(job, pipeline=pipe, at_front=at_front)
    return str(job.id)


def requeue_front(client: Redis, queue_name: str, job_id: str) -> bool:
    """Put back a job that was handed out but not begun, as the next one; True for the one caller that did it.

    Raises BrokerError.
    """
    queue = open_queue(client, queue_name)
    with translate():
        return bool(Scripts(client).run("queue_return", [queue.intermediate_queue_key, queue.key], [job_id]))


def queue_lengths(client: Redis, names: Iterable[str]) -> dict[str, int]:
    """Jobs waiting in each queue. Raises BrokerError."""
    wanted = list(names)
    with translate(), client.pipeline(transaction=False) as pipe:
        for name in wanted:
            pipe.llen(open_queue(client, name).key)
        return dict(zip(wanted, pipe.execute(), strict=True))


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


def _forget_cancelled(client: Redis, name: str, ttl_s: float) -> None:
    registry = CanceledJobRegistry(name, connection=client)
    now_s = client.time()[0]
    for job_id in map(_text, client.zrangebyscore(registry.key, "-inf", now_s - ttl_s)):
        # RQ's own cancel leaves the job without a TTL. A requeued one is no longer cancelled, and stays.
        if client.hget(Job.key_for(job_id), "status") == JobStatus.CANCELED.value.encode():
            client.unlink(Job.key_for(job_id), Result.get_key(job_id))
        client.zrem(registry.key, job_id)


def _drop_expired(client: Redis, queue: Queue) -> None:
    for key in (queue.key, queue.intermediate_queue_key):
        ids = [_text(job_id) for job_id in client.lrange(key, 0, -1)]
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


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class ConcurrentWorker(BaseWorker):  # type: ignore[misc, unused-ignore]
    """Runs up to `slots` jobs of one queue at once, each on a thread of its own, in this process.

    `handlers` is the allow-list: a job naming anything else fails, and nothing is imported for it. A handler takes the
    handoff id and returns a small JSON object, RQ's result; HandoffCancelledError makes the job cancelled, any other
    exception failed. `on_stop(handoff_id)` is called (from RQ's command thread) when an operator stops a job.
    No signal handlers: the process's owner calls `request_stop`, which fits `signal.signal` too.
    """

    death_penalty_class = NoPenalty
    job_class = HandoffJob

    def __init__(
        self,
        queue: str,
        client: Redis,
        handlers: Mapping[str, Handler],
        *,
        slots: int,
        name: str,
        settings: BrokerSettings,
        on_stop: Callable[[str], object] | None = None,
        heartbeat_s: float = 15.0,
    ) -> None:
        """`client` may time out on replies, but not within POLL_S. Raises BrokerError."""
        with translate():
            super().__init__(
                [open_queue(client, queue)],
                # A crashed worker's record lives on for a while, and RQ refuses a second one of its name.
                name=f"{name}.{secrets.token_hex(3)}",
                connection=client,
                default_result_ttl=settings.result_ttl_s,
                job_class=HandoffJob,
                serializer=JSONSerializer,
                worker_ttl=_TTL_S,
                job_monitoring_interval=_TTL_S - 60,  # RQ adds a minute
            )
        self._handlers = dict(handlers)
        self._settings = settings
        self._on_stop = on_stop
        self._heartbeat_s = heartbeat_s
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix=f"job-{queue}")
        self._free = threading.BoundedSemaphore(slots)
        self._running: dict[str, tuple[Job, Execution]] = {}
        self._lock = threading.RLock()  # RQ's bookkeeping is written for one job at a time
        self._stopping = threading.Event()
        self._ended = threading.Event()

    @property
    def running(self) -> int:
        """Jobs in a handler right now."""
        return len(self._running)

    def run(self) -> None:
        """Take and run jobs until `request_stop`, and return when those running have ended. Raises BrokerError."""
        with translate():
            self.register_birth()
            self.subscribe()
            self.set_state(WorkerStatus.IDLE)
        keeper = threading.Thread(target=self._keep_alive, name=f"rq-heartbeat-{self.name}", daemon=True)
        keeper.start()
        try:
            while not self._stopping.is_set():
                self._take_one()
        finally:
            self._pool.shutdown(wait=True)
            self._ended.set()
            keeper.join()
            for leave in (self.register_death, self.unsubscribe):
                with suppress(RedisError):
                    leave()

    def request_stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Take nothing new; `run` returns within POLL_S of the last running job's end. Waiting jobs stay queued."""
        self._stopping.set()

    # -- one job

    def _take_one(self) -> None:
        if not self._free.acquire(timeout=POLL_S):
            return
        begun = False
        try:
            begun = self._begin_one()
        except Exception as error:  # the broker is away or full, or RQ has a bug: either way the worker lives on
            self.log.error("worker %s: cannot take a job: %s: %s", self.name, type(error).__name__, error)
            self._stopping.wait(POLL_S)
        finally:
            if not begun:
                self._free.release()

    def _begin_one(self) -> bool:
        queue: Queue = self.queues[0]
        job_id = self.connection.blmove(queue.key, queue.intermediate_queue_key, POLL_S)
        if job_id is None:
            return False
        if self._stopping.is_set():
            requeue_front(self.connection, queue.name, _text(job_id))
            return False
        job = self._fetch(queue, _text(job_id))
        if job is None:
            return False
        with self._lock:
            execution: Execution = self.prepare_execution(job)
            self._running[execution.id] = job, execution
        self._pool.submit(self._perform, job, execution)
        return True

    def _fetch(self, queue: Queue, job_id: str) -> Job | None:
        """The job, or None for one that has expired or whose record RQ cannot read: that one is removed."""
        try:
            job = HandoffJob.fetch(job_id, connection=self.connection, serializer=JSONSerializer)
        except NoSuchJobError:
            self.connection.lrem(queue.intermediate_queue_key, 1, job_id)
            return None
        except (TypeError, ValueError, AttributeError, LookupError, ResponseError) as error:
            self.log.error("worker %s: job %s is not readable and removed: %s", self.name, job_id, error)
            self.connection.unlink(Job.key_for(job_id))
            self.connection.lrem(queue.intermediate_queue_key, 1, job_id)
            return None
        job.origin = queue.name  # where it really came from: all further bookkeeping goes by it
        return job

    def _perform(self, job: Job, execution: Execution) -> None:
        try:
            settle = self._call(job, execution)
            with self._lock:
                settle()
        except Exception:
            self.log.exception("worker %s: job %s has ended, but RQ could not be told", self.name, job.id)
        finally:
            with self._lock:
                del self._running[execution.id]
                self.executions.pop(execution.id, None)
            self._free.release()
            with suppress(RedisError), self._lock:
                self.set_state(WorkerStatus.IDLE)

    def _call(self, job: Job, execution: Execution) -> Callable[[], None]:
        """Run the handler; returns how to tell RQ what came of it."""
        queue: Queue = self.queues[0]
        try:
            self.prepare_job_execution(job, remove_from_intermediate_queue=True)
            result = _small(self._handler(job)(_handoff_id(job)))
        except HandoffCancelledError as error:
            return partial(self._finalize_cancelled, job, execution, str(error))
        except BaseException:
            return partial(self._finalize_failure, job, queue, execution, sys.exc_info())
        return partial(self._finalize_success, job, queue, execution, result)

    def _handler(self, job: Job) -> Handler:
        if (handler := self._handlers.get(str(job.func_name))) is None:
            raise PeerError(f"job function {job.func_name!r} is not one this worker runs")
        return handler

    def _finalize_cancelled(self, job: Job, execution: Execution, reason: str) -> None:
        """RQ has no way to end a running job as cancelled: the same steps as its own for other ends."""
        ttl_s = max(1, self._settings.result_ttl_s)
        self.handle_execution_ended(job, self.queues[0], ttl_s)
        registry = CanceledJobRegistry(job.origin, connection=self.connection, serializer=JSONSerializer)
        with self.connection.pipeline() as pipe:
            job.set_status(JobStatus.CANCELED, pipeline=pipe)
            job.save(pipeline=pipe, include_meta=False, include_result=False)
            Result.create(
                job,
                Result.Type.STOPPED,
                ttl_s,
                exc_string=reason,
                worker_name=self.name,
                pipeline=pipe,
                execution_id=execution.id,
                execution_started_at=execution.created_at,
                execution_ended_at=job.ended_at,
            )
            registry.add(job, pipeline=pipe)
            job.cleanup(ttl=ttl_s, pipeline=pipe)
            self.cleanup_execution(job, pipeline=pipe, execution=execution)
            pipe.execute()

    # -- RQ's view of this worker

    def set_state(self, state: str, pipeline: Pipeline | None = None) -> None:
        """Busy while anything runs, whatever RQ's one-job code believes."""
        if state == WorkerStatus.IDLE and self.executions:
            state = WorkerStatus.BUSY
        super().set_state(state, pipeline)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        return _TTL_S

    def procline(self, message: str) -> None:
        """The process title is not this worker's to change."""

    def _set_connection(self, connection: Redis) -> Redis:
        """RQ would change the reply timeout of the caller's client."""
        return connection

    def _keep_alive(self) -> None:
        """Heartbeats of worker and jobs: the taking thread may wait for a slot for minutes. Also tidies."""
        while not self._ended.wait(self._heartbeat_s):
            with self._lock:
                running = list(self._running.values())
            try:
                self._stay_registered()
                for job, execution in running:
                    self.maintain_heartbeats(job, execution)
                clean_worker_registry(self.queues[0])
                tidy(self.connection, self.queue_names(), cancelled_ttl_s=self._settings.result_ttl_s)
            except (RedisError, BrokerError) as error:
                self.log.warning("worker %s: heartbeat: %s", self.name, error)

    def _stay_registered(self) -> None:
        """Also after the broker came back empty."""
        if self.connection.hexists(self.key, "birth"):
            self.heartbeat()
            return
        self.connection.unlink(self.key)
        self.register_birth()
        self.set_state(WorkerStatus.IDLE)

    # -- commands

    def handle_payload(self, message: dict[str, Any]) -> None:
        """RQ's commands: stop-job and stop-execution become `on_stop`, shutdown `request_stop`; others do nothing."""
        try:
            payload = parse_payload(message)
            command, job_id, execution_id = (payload.get(key) for key in ("command", "job_id", "execution_id"))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            self.log.warning("worker %s: a command is not readable: %s", self.name, error)
            return
        if command == "shutdown":
            self.request_stop()
        elif command in ("stop-job", "stop-execution"):
            self._stop(str(job_id), str(execution_id) if command == "stop-execution" else None)

    def _stop(self, job_id: str, execution_id: str | None) -> None:
        with self._lock:
            found = [job for job, run in self._running.values() if job.id == job_id and execution_id in (None, run.id)]
        for job in found:
            try:
                if self._on_stop:
                    self._on_stop(_handoff_id(job))
            except Exception:
                self.log.exception("worker %s: cannot stop job %s", self.name, job.id)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Keep listening: the next read connects and subscribes again. RQ's own ends the thread on a timeout."""
        if self._ended.wait(POLL_S):
            pubsub_thread.stop()
        else:
            self.log.warning("worker %s: commands: %s: %s", self.name, type(exc).__name__, exc)


def _handoff_id(job: Job) -> str:
    """The one argument. Raises PeerError for any other shape (RQ's DeserializationError for what is not JSON)."""
    if job.instance is None and not job.kwargs and len(job.args) == 1 and isinstance(job.args[0], str):
        return job.args[0]
    raise PeerError("a job must carry a handoff id and nothing else")


def _small(result: JSON) -> JSON:
    if (size := len(json.dumps(result))) > RESULT_BYTES:
        raise ValueError(f"a handler returned {size} bytes of JSON; {RESULT_BYTES} are the most that RQ is to keep")
    return result
