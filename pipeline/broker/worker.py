"""Worker: RQ's view of one replica in one role: many jobs at once beside one engine, each on a thread of its own.

One queue per worker, because only then does RQ move a job (BLMOVE) instead of popping it, and a crash in between loses
nothing. Who is alive is decided by our own leases, not here.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError
from rq import Queue
from rq.command import parse_payload
from rq.exceptions import DeserializationError
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry, register

from pipeline.broker.connect import translate
from pipeline.broker.job import HandoffJob, NoPenalty, fetch, open_queue, remove, text
from pipeline.broker.retention import requeue_front, tidy
from pipeline.errors import HandoffCancelledError, PeerError
from pipeline.settings import BrokerSettings

JSON = Mapping[str, object]
Handler = Callable[[str], JSON]

RESULT_BYTES = 4096
_PAUSE_S = 1.0  # after trouble with the broker, before the next attempt
_TELLS = 6  # attempts to tell RQ how a job ended; its claim to be running ends by itself later
_TTL_S = 90  # a silent worker's record, and its jobs' claim to be running, end after this


class ConcurrentWorker(BaseWorker):
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
        poll_s: float = 1.0,
    ) -> None:
        """One look for a job blocks for `poll_s`: less than the reply timeout of `client`. Raises BrokerError."""
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
        self._poll_s = poll_s
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix=f"job-{queue}")
        self._free = threading.BoundedSemaphore(slots)
        self._running: dict[str, tuple[HandoffJob, Execution]] = {}
        self._owed: dict[str, HandoffJob] = {}  # taken and not begun, perhaps out of the queue: to be given back
        self._lock = threading.RLock()  # RQ's bookkeeping is written for one job at a time
        self._stopping = threading.Event()
        self._paused = threading.Event()
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
            for leave in (self._give_back, self.register_death, self.unsubscribe):
                with suppress(RedisError):
                    leave()

    def request_stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Take nothing new; `run` returns within `poll_s` of the last running job's end. Waiting jobs stay queued."""
        self._stopping.set()

    def pause(self, wanted: bool) -> None:
        """Take nothing new for now (or go on taking); what runs goes on."""
        if wanted:
            self._paused.set()
        else:
            self._paused.clear()

    @property
    def _reluctant(self) -> bool:
        """A job that comes while the worker is told to take none goes back."""
        return self._stopping.is_set() or self._paused.is_set()

    # -- one job

    def _take_one(self) -> None:
        if self._paused.is_set():
            self._stopping.wait(self._poll_s)
            return
        if not self._free.acquire(timeout=self._poll_s):
            return
        begun = False
        try:
            self._give_back()
            begun = self._begin_one()
        except Exception as error:  # the broker is away or full, or RQ has a bug: either way the worker lives on
            self.log.error("worker %s: cannot take a job: %s: %s", self.name, type(error).__name__, error)
            self._stopping.wait(_PAUSE_S)
        finally:
            if not begun:
                self._free.release()

    def _begin_one(self) -> bool:
        queue: Queue = self.queues[0]
        job_id = self.connection.blmove(queue.key, queue.intermediate_queue_key, self._poll_s)  # type: ignore[arg-type]
        if job_id is None:
            return False
        begun = False
        try:
            if not self._reluctant and (job := fetch(self.connection, queue, text(job_id))):
                begun = self._begin_or_remove(job)
            return begun
        finally:
            # Stopping, paused, or the broker is full; a job that `fetch` removed is not there to return.
            if not begun and requeue_front(self.connection, queue.name, text(job_id)):
                self._owed.pop(text(job_id), None)

    def _begin_or_remove(self, job: HandoffJob) -> bool:
        """RQ's bookkeeping trusts a job's fields: what it falls over would be put back and taken for ever."""
        try:
            self._begin(job)
        except RedisError:
            raise
        except Exception as error:
            remove(self.connection, self.queues[0], job.id, error)
            return False
        return True

    def _begin(self, job: HandoffJob) -> None:
        """Mark the job as started and give it to a thread. What cannot be marked is not begun."""
        with self._lock:
            before = dict(self.executions)
            try:
                execution: Execution = self.prepare_execution(job)
                with suppress(DeserializationError):  # comes up again, and is told, when the job is performed
                    self.prepare_job_execution(job, remove_from_intermediate_queue=True)
            except RedisError:
                self._owed[job.id] = job
                self._disown(job, [run for key, run in self.executions.items() if key not in before])
                raise
            self._running[execution.id] = job, execution
        self._pool.submit(self._perform, job, execution)

    def _give_back(self) -> None:
        """Jobs that the broker counts as begun by us, though its reply was lost: the next ones again, with a TTL as
        before. Should one be begun twice, the ledger lets one in."""
        for job_id, job in list(self._owed.items()):
            with self.connection.pipeline() as pipe:
                pipe.lpush(self.queues[0].key, job_id)
                job.set_status(JobStatus.QUEUED, pipeline=pipe)
                pipe.expire(job.key, job.ttl or 0)
                pipe.execute()
            del self._owed[job_id]

    def _disown(self, job: HandoffJob, executions: list[Execution]) -> None:
        for execution in executions:
            self.executions.pop(execution.id)
            with suppress(RedisError), self.connection.pipeline(transaction=False) as pipe:
                self.cleanup_execution(job, pipeline=pipe, execution=execution)
                pipe.execute()

    def _perform(self, job: HandoffJob, execution: Execution) -> None:
        try:
            self._tell(self._call(job, execution))
        except Exception:
            self.log.exception("worker %s: job %s has ended, but RQ could not be told", self.name, job.id)
        finally:
            with self._lock:
                del self._running[execution.id]
                self.executions.pop(execution.id, None)
            self._free.release()
            with suppress(RedisError), self._lock:
                self.set_state(WorkerStatus.IDLE)

    def _tell(self, settle: Callable[[], None]) -> None:
        """The broker may be full or away just now. Telling RQ twice changes nothing: it overwrites the same end."""
        for left in reversed(range(_TELLS)):
            try:
                with self._lock:
                    settle()
                return
            except RedisError as error:
                if not left:
                    raise
                self.log.warning("worker %s: an end is not told yet: %s: %s", self.name, type(error).__name__, error)
                self._ended.wait(_PAUSE_S)

    def _call(self, job: HandoffJob, execution: Execution) -> Callable[[], None]:
        """Run the handler; returns how to tell RQ what came of it."""
        queue: Queue = self.queues[0]
        try:
            result = _small(self._handler(job)(job.handoff_id))
        except HandoffCancelledError as error:
            return self._noted(job, {"state": "cancelled"}, self._finalize_cancelled, execution, str(error))
        except BaseException as error:
            state = {"state": "failed", "error": getattr(error, "code", type(error).__name__)}
            return self._noted(job, state, self._finalize_failure, queue, execution, sys.exc_info())
        shown = {"state" if name == "outcome" else name: value for name, value in result.items()}
        return self._noted(job, shown, self._finalize_success, queue, execution, result)

    def _noted(self, job: HandoffJob, shown: JSON, settle: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """How to tell RQ the end, with `shown` in the job's meta before: it is what dashboards show of a job."""

        def tell() -> None:
            known = {name: value for name, value in job.meta.items() if isinstance(value, str)}  # ours is all text
            job.meta = known | dict(shown)
            job.save_meta()  # first: `settle` decides how long the job stays, or removes it
            settle(job, *arguments)

        return tell

    def _handler(self, job: HandoffJob) -> Handler:
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
            except Exception as error:  # this thread must outlive whatever happens to the broker
                self.log.warning("worker %s: heartbeat: %s: %s", self.name, type(error).__name__, error)

    def _stay_registered(self) -> None:
        """Also after the broker came back empty, where RQ's own heartbeats revive parts of the record at best."""
        self.heartbeat()
        complete = all(self.connection.hmget(self.key, "birth", "state"))
        if complete and self.connection.sismember(self.redis_workers_keys, self.key):
            return
        self.log.warning("worker %s: the broker had forgotten this worker: registering it again", self.name)
        with self.connection.pipeline() as pipe:
            pipe.hset(self.key, mapping=self.serialize() | {"state": self.get_state()})
            register(self, pipe)
            pipe.execute()

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
                    self._on_stop(job.handoff_id)
            except Exception:
                self.log.exception("worker %s: cannot stop job %s", self.name, job.id)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Keep listening: the next read connects and subscribes again. RQ's own ends the thread on a timeout."""
        if self._ended.wait(_PAUSE_S):
            pubsub_thread.stop()
        else:
            self.log.warning("worker %s: commands: %s: %s", self.name, type(exc).__name__, exc)


def _small(result: JSON) -> JSON:
    if (size := len(json.dumps(result))) > RESULT_BYTES:
        raise ValueError(f"a handler returned {size} bytes of JSON; {RESULT_BYTES} are the most that RQ is to keep")
    return result
