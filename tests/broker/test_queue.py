"""Jobs through RQ on real servers: many at once, shown rightly, nothing executed that the broker brings."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq.command import send_command, send_shutdown_command, send_stop_job_command
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker import Worker

from pipeline.broker import queue
from pipeline.broker.connect import connect
from pipeline.broker.job import JOBS, HandoffJob, open_queue, text
from pipeline.broker.queue import DECODE_JOB, PREFILL_JOB, JobSpec
from pipeline.broker.retention import STUCK_MS
from pipeline.broker.worker import ConcurrentWorker
from pipeline.errors import BrokerError, HandoffCancelledError
from pipeline.settings import BrokerSettings

NAME = "decode.d-0"
SETTINGS = BrokerSettings(result_ttl_s=50, failure_ttl_s=500, handoff_ttl_s=800.0)
PATIENCE_S = 60.0


def _wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never saw {what}"
        time.sleep(0.01)


def _put(client: Redis, *handoffs: str, at_front: bool = False, function: str = DECODE_JOB) -> list[str]:
    with client.pipeline() as pipe:
        specs = [JobSpec(NAME, function, handoff, {"model": "m", "route": "a->b"}) for handoff in handoffs]
        ids = [queue.enqueue(pipe, client, spec, SETTINGS, at_front=at_front) for spec in specs]
        pipe.execute()
    return ids


def _job(client: Redis, job_id: str) -> Job:
    return HandoffJob.fetch(job_id, connection=client, serializer=JSONSerializer)


def _status(client: Redis, job_id: str) -> JobStatus:
    return _job(client, job_id).get_status()


def _started(client: Redis) -> list[str]:
    return StartedJobRegistry(NAME, connection=client, serializer=JSONSerializer).get_job_ids(cleanup=False)


class Desk:
    """Handlers that tell what they were given and wait until they may go on."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = threading.Event()
        self.stops: list[str] = []
        self.cancelled: set[str] = set()

    def handle(self, handoff_id: str) -> Mapping[str, object]:
        self.seen.append(handoff_id)
        while not self.gate.wait(0.01):
            if handoff_id in self.cancelled:
                raise HandoffCancelledError(f"{handoff_id} is over")
        if handoff_id.startswith("bad"):
            raise BrokerError("it broke")
        return {"echo": handoff_id}

    def stop(self, handoff_id: str) -> None:
        self.stops.append(handoff_id)
        self.cancelled.add(handoff_id)


@contextmanager
def _working(worker: ConcurrentWorker, desk: Desk | None = None) -> Iterator[threading.Thread]:
    """Runs it on a thread; on leaving, opens the desk's gate and waits for the graceful end."""
    thread = threading.Thread(target=worker.run, name="worker-under-test")
    thread.start()
    try:
        yield thread
    finally:
        worker.request_stop()
        if desk:
            desk.gate.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.gate.set()


@pytest.fixture
def client(server_url: str, redis_client: Redis) -> Iterator[Redis]:
    with connect(server_url) as client:
        yield client


@pytest.fixture
def worker(client: Redis, desk: Desk) -> ConcurrentWorker:
    return _worker(client, desk)


def _worker(client: Redis, desk: Desk, *, slots: int = 4, heartbeat_s: float = 15.0) -> ConcurrentWorker:
    return ConcurrentWorker(
        NAME,
        client,
        {DECODE_JOB: desk.handle},
        slots=slots,
        name="d-0",
        settings=SETTINGS,
        on_stop=desk.stop,
        heartbeat_s=heartbeat_s,
        poll_s=0.05,
    )


def test_the_job_names_are_importable_and_refuse_a_stock_worker() -> None:
    assert JOBS == {PREFILL_JOB: "prefill", DECODE_JOB: "decode"}


def test_enqueue_sends_nothing_before_the_transaction_runs(client: Redis) -> None:
    with client.pipeline() as pipe:
        first = queue.enqueue(pipe, client, JobSpec("prefill.x.1", PREFILL_JOB, "h1", {"model": "m"}), SETTINGS)
        second = queue.enqueue(pipe, client, JobSpec(NAME, DECODE_JOB, "h1", {"model": "m"}), SETTINGS)
        assert client.dbsize() == 0
        pipe.execute()
    assert queue.queue_lengths(client, ["prefill.x.1", NAME, "none"]) == {"prefill.x.1": 1, NAME: 1, "none": 0}
    assert open_queue(client, "prefill.x.1").job_ids == [first]
    assert open_queue(client, NAME).job_ids == [second]


def test_what_a_job_holds(client: Redis) -> None:
    (job_id,) = _put(client, "h1")
    job = _job(client, job_id)
    assert (job.func_name, job.args, job.kwargs, job.instance) == (DECODE_JOB, ["h1"], {}, None)
    assert job.description == "decode h1"
    assert job.meta == {"state": "live", "model": "m", "route": "a->b"}
    assert (job.timeout, job.result_ttl, job.failure_ttl) == (-1, 50, 500)
    assert 0 < client.ttl(job.key) <= 800
    assert json.loads(job.data) == [DECODE_JOB, None, ["h1"], {}]


def test_at_front_goes_before_what_waits(client: Redis) -> None:
    waiting = _put(client, "h1", "h2")
    first = _put(client, "h3", at_front=True)
    assert open_queue(client, NAME).job_ids == [*first, *waiting]


def test_enqueue_refuses_a_function_that_is_not_ours(client: Redis) -> None:
    with client.pipeline() as pipe, pytest.raises(ValueError, match=r"os\.system is not a job of ours"):
        queue.enqueue(pipe, client, JobSpec(NAME, "os.system", "h1", {}), SETTINGS)


def test_as_many_jobs_at_once_as_there_are_slots(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    ids = _put(client, *(f"h{n}" for n in range(7)))
    with _working(worker, desk):
        _wait(lambda: sorted(desk.seen) == ["h0", "h1", "h2", "h3"], "four running")
        assert worker.running == 4
        assert sorted(_started(client)) == sorted(ids[:4])
        assert queue.queue_lengths(client, [NAME]) == {NAME: 3}
        shown = Worker.all(connection=client, serializer=JSONSerializer)
        assert [w.get_state() for w in shown] == ["busy"]
        assert {e.job_id for e in shown[0].get_current_executions()} == set(ids[:4])
        desk.gate.set()
        _wait(lambda: all(_status(client, i) == JobStatus.FINISHED for i in ids), "all finished")
        _wait(lambda: client.hget(worker.key, "state") == b"idle", "the worker idle")
    assert [_job(client, i).return_value() for i in ids] == [{"echo": f"h{n}"} for n in range(7)]
    assert _started(client) == []
    assert client.exists(open_queue(client, NAME).intermediate_queue_key) == 0
    assert all(0 < client.ttl(Job.key_for(i)) <= 50 for i in ids)
    assert Worker.all(connection=client, serializer=JSONSerializer) == []


def test_the_three_ends_of_a_job(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    desk.cancelled.add("gone")
    good, bad, gone = _put(client, "good", "bad", "gone")
    with _working(worker, desk):
        _wait(lambda: _status(client, gone) == JobStatus.CANCELED, "cancelled")
        desk.gate.set()
        _wait(lambda: _status(client, good) == JobStatus.FINISHED, "finished")
        _wait(lambda: _status(client, bad) == JobStatus.FAILED, "failed")
    assert FinishedJobRegistry(NAME, connection=client).get_job_ids() == [good]
    assert FailedJobRegistry(NAME, connection=client).get_job_ids() == [bad]
    assert CanceledJobRegistry(NAME, connection=client).get_job_ids() == [gone]
    results = [_job(client, i).latest_result() for i in (bad, gone)]
    assert [r.exc_string.splitlines()[-1] for r in results if r and r.exc_string] == [
        "pipeline.errors.BrokerError: it broke",
        "gone is over",
    ]
    assert 50 < client.ttl(Job.key_for(bad)) <= 500
    assert 0 < client.ttl(Job.key_for(gone)) <= 50
    assert _started(client) == []


def test_stopping_a_job_by_command_reaches_every_slot(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    ids = _put(client, "h0", "h1", "h2")
    with _working(worker, desk):
        _wait(lambda: worker.running == 3, "three running")
        for job_id in (ids[2], ids[0]):
            send_stop_job_command(client, job_id, serializer=JSONSerializer)
        _wait(lambda: worker.running == 1, "two stopped")
        assert sorted(desk.stops) == ["h0", "h2"]
        _wait(lambda: _status(client, ids[0]) == _status(client, ids[2]) == JobStatus.CANCELED, "cancelled in RQ")
        assert _status(client, ids[1]) == JobStatus.STARTED


def test_stop_execution_and_unreadable_commands(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    (job_id,) = _put(client, "h0")
    with _working(worker, desk):
        _wait(lambda: worker.running == 1, "one running")
        channel = f"rq:pubsub:{worker.name}"
        for junk in (b"\xff", b"[]", b"{}", b'{"command": "kill-horse"}', b'{"command": "stop-job"}'):
            assert client.publish(channel, junk) == 1
        send_command(client, worker.name, "stop-execution", job_id=job_id, execution_id="another")
        (execution,) = _job(client, job_id).get_executions()
        send_command(client, worker.name, "stop-execution", job_id=job_id, execution_id=execution.id)
        _wait(lambda: _status(client, job_id) == JobStatus.CANCELED, "cancelled")
    assert desk.stops == ["h0"]


def test_commands_still_arrive_after_the_connection_was_cut(
    client: Redis, desk: Desk, worker: ConcurrentWorker
) -> None:
    (job_id,) = _put(client, "h0")
    channel = f"rq:pubsub:{worker.name}"
    with _working(worker, desk):
        _wait(lambda: worker.running == 1, "one running")
        client.client_kill_filter(_type="pubsub")
        _wait(lambda: client.pubsub_numsub(channel) == [(channel.encode(), 1)], "subscribed again")
        send_stop_job_command(client, job_id, serializer=JSONSerializer)
        _wait(lambda: _status(client, job_id) == JobStatus.CANCELED, "cancelled")


def test_request_stop_finishes_what_runs_and_leaves_the_rest_queued(client: Redis, desk: Desk) -> None:
    worker = _worker(client, desk, slots=2)
    ids = _put(client, "h0", "h1", "h2", "h3")
    with _working(worker, desk) as thread:
        _wait(lambda: worker.running == 2, "two running")
        worker.request_stop()
        thread.join(0.2)
        assert thread.is_alive()
        desk.gate.set()
    assert [_status(client, i) for i in ids[:2]] == [JobStatus.FINISHED] * 2
    assert open_queue(client, NAME).job_ids == ids[2:]
    assert client.exists(open_queue(client, NAME).intermediate_queue_key) == 0


def test_a_job_taken_while_stopping_goes_back(client: Redis, worker: ConcurrentWorker) -> None:
    ids = _put(client, "h0", "h1")
    worker.request_stop()
    worker._take_one()
    assert open_queue(client, NAME).job_ids == ids
    assert client.exists(open_queue(client, NAME).intermediate_queue_key) == 0


def test_the_shutdown_command_is_a_graceful_stop(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    thread = threading.Thread(target=worker.run)
    thread.start()
    channel = f"rq:pubsub:{worker.name}"
    _wait(lambda: client.pubsub_numsub(channel) == [(channel.encode(), 1)], "subscribed")
    send_shutdown_command(client, worker.name)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Bomb:
    """Unpickling it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def _plant(client: Redis, **fields: str | bytes) -> str:
    """A job as an intruder with access to the broker would write it."""
    job_id = secrets.token_hex(8)
    base: dict[str, str | bytes] = {"created_at": "2026-01-01T00:00:00.000000Z", "status": "queued", "origin": NAME}
    base |= {"data": json.dumps([DECODE_JOB, None, ["h"], {}]), "result_ttl": "50", "failure_ttl": "50"}
    client.hset(Job.key_for(job_id), mapping=base | fields)  # type: ignore[arg-type]
    client.rpush(open_queue(client, NAME).key, job_id)
    return job_id


def test_a_pickle_is_never_loaded_and_fails_its_job(
    client: Redis, desk: Desk, worker: ConcurrentWorker, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    planted = [_plant(client, data=bomb), _plant(client, data=bomb, meta=bomb, result=bomb)]
    (after,) = _put(client, "after")
    desk.gate.set()
    with _working(worker, desk):
        _wait(lambda: _status(client, after) == JobStatus.FINISHED, "the next job finished")
        _wait(lambda: all(_status(client, i) == JobStatus.FAILED for i in planted), "the pickles failed")
    assert list(tmp_path.iterdir()) == []
    assert desk.seen == ["after"]
    pickle.loads(bomb)  # the bomb was live
    assert [p.name for p in tmp_path.iterdir()] == ["boom"]


@pytest.mark.parametrize(
    "data",
    [
        ["os.system", None, ["true"], {}],
        ["pipeline.workers.prefill.run", None, ["h"], {}],  # ours, but not of this worker
        [DECODE_JOB, "instance", ["h"], {}],
        [DECODE_JOB, None, ["h", "i"], {}],
        [DECODE_JOB, None, [7], {}],
        [DECODE_JOB, None, ["h"], {"x": 1}],
        [[DECODE_JOB], None, ["h"], {}],
        "not a job",
    ],
)
def test_anything_but_an_allowed_function_and_a_handoff_id_is_refused(
    client: Redis, desk: Desk, worker: ConcurrentWorker, data: object
) -> None:
    job_id = _plant(client, data=json.dumps(data))
    desk.gate.set()
    with _working(worker, desk):
        _wait(lambda: _status(client, job_id) == JobStatus.FAILED, "refused")
    assert desk.seen == []


def test_callbacks_and_retries_of_a_planted_job_are_ignored(
    client: Redis, desk: Desk, worker: ConcurrentWorker, tmp_path: Path
) -> None:
    hooks = {"success_callback_name": "os.abort", "failure_callback_name": "os.abort", "retries_left": "3"}
    webhooks = json.dumps([{"url": "http://127.0.0.1:1/", "job_status": "finished"}])
    good = _plant(client, webhooks=webhooks, rate_limit_key="k", rate_limit_concurrency="1", **hooks)
    bad = _plant(client, data=json.dumps([DECODE_JOB, None, ["bad"], {}]), **hooks)
    desk.gate.set()
    with _working(worker, desk):
        _wait(lambda: _status(client, good) == JobStatus.FINISHED, "finished")
        _wait(lambda: _status(client, bad) == JobStatus.FAILED, "failed")
    assert sorted(desk.seen) == ["bad", "h"]


def test_a_record_that_rq_cannot_read_is_removed(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)  # 64 KB that RQ would inflate to 64 MB
    broken = [_plant(client, status="???"), _plant(client, result_ttl="x"), _plant(client, timeout="{}")]
    broken += [_plant(client, failure_ttl="1" * 5000), _plant(client, data=bomb), _plant(client, timeout="1e999")]
    client.set(Job.key_for("text"), "not a hash")
    client.rpush(open_queue(client, NAME).key, "text", "never-existed")
    (after,) = _put(client, "after")
    desk.gate.set()
    with _working(worker, desk):
        _wait(lambda: _status(client, after) == JobStatus.FINISHED, "the next job finished")
    assert [client.exists(Job.key_for(i)) for i in (*broken, "text")] == [0] * 7
    assert client.exists(open_queue(client, NAME).intermediate_queue_key) == 0


def test_a_result_that_is_not_small_json_fails_the_job(client: Redis) -> None:
    answers: dict[str, Mapping[str, object]] = {"big": {"x": "y" * 5000}, "odd": {"x": object()}}
    worker = ConcurrentWorker(
        NAME, client, {DECODE_JOB: answers.__getitem__}, slots=1, name="d", settings=SETTINGS, poll_s=0.05
    )
    big, odd = _put(client, "big", "odd")
    with _working(worker):
        _wait(lambda: _status(client, big) == _status(client, odd) == JobStatus.FAILED, "both failed")
    result = _job(client, big).latest_result()
    assert result is not None
    assert result.exc_string is not None
    assert "returned 5009 bytes" in result.exc_string


def test_the_worker_lives_through_a_broker_that_is_full_or_cuts_it_off(
    client: Redis, redis_client: Redis, desk: Desk, worker: ConcurrentWorker
) -> None:
    desk.gate.set()
    with _working(worker, desk):
        _wait(lambda: client.hget(worker.key, "state") == b"idle", "idle")
        first = _put(client, "h0")
        redis_client.config_set("maxmemory", 1)
        time.sleep(0.2)
        redis_client.config_set("maxmemory", 0)
        client.client_kill_filter(_type="normal", skipme=True)
        _wait(lambda: _status(client, first[0]) == JobStatus.FINISHED, "finished after the trouble")
        second = _put(client, "h1")
        _wait(lambda: _status(client, second[0]) == JobStatus.FINISHED, "finished later")


def test_an_end_that_a_full_broker_refused_is_told_later(
    client: Redis, redis_client: Redis, desk: Desk, worker: ConcurrentWorker
) -> None:
    with _working(worker, desk):
        (job_id,) = _put(client, "h0")
        _wait(lambda: desk.seen == ["h0"], "begun")
        redis_client.config_set("maxmemory", 1)
        desk.gate.set()
        time.sleep(0.2)
        redis_client.config_set("maxmemory", 0)
        _wait(lambda: _status(client, job_id) == JobStatus.FINISHED, "finished")
    assert _job(client, job_id).return_value() == {"echo": "h0"}


def test_heartbeats_keep_jobs_and_worker_and_bring_back_a_lost_registration(client: Redis, desk: Desk) -> None:
    worker = _worker(client, desk, slots=1, heartbeat_s=0.05)
    (job_id,) = _put(client, "h0")
    started = StartedJobRegistry(NAME, connection=client)
    with _working(worker, desk):
        _wait(lambda: worker.running == 1, "running")
        (entry,) = [text(member) for member in client.zrange(started.key, 0, -1)]
        client.zadd(started.key, {entry: time.time() + 1})
        _wait(lambda: (client.zscore(started.key, entry) or 0) > time.time() + 60, "the job's claim renewed")
        client.expire(worker.key, 1000)
        _wait(lambda: client.ttl(worker.key) <= 150, "the worker's record renewed")
        client.delete(worker.key, "rq:workers", f"rq:workers:{NAME}")
        _wait(lambda: client.smembers("rq:workers") == {worker.key.encode()}, "registered again")
        _wait(lambda: client.hget(worker.key, "state") == b"busy", "busy again")
        assert _status(client, job_id) == JobStatus.STARTED
        desk.gate.set()
        _wait(lambda: _status(client, job_id) == JobStatus.FINISHED, "finished")


def test_a_broker_that_is_away_at_the_start_is_named() -> None:
    with pytest.raises(BrokerError, match="unreachable"):
        _worker(connect("redis://127.0.0.1:1/0"), Desk())


# -- tidy


def test_tidy_expires_cancelled_jobs_by_age_and_not_requeued_ones(client: Redis) -> None:
    old, requeued, fresh = _put(client, "h0", "h1", "h2")
    for job_id in (old, requeued, fresh):
        _job(client, job_id).cancel()
    registry = CanceledJobRegistry(NAME, connection=client)
    client.zincrby(registry.key, -100, old)
    client.zincrby(registry.key, -100, requeued)
    _job(client, requeued).set_status(JobStatus.QUEUED)
    queue.tidy(client, [NAME], cancelled_ttl_s=60)
    assert registry.get_job_ids() == [fresh]
    assert [client.exists(Job.key_for(i)) for i in (old, requeued, fresh)] == [0, 1, 1]


def test_tidy_drops_ended_and_vanished_jobs(client: Redis) -> None:
    kept, expired, finished, failed = _put(client, "h0", "h1", "h2", "h3")
    client.delete(*(Job.key_for(i) for i in (expired, finished, failed)))
    client.lrem(open_queue(client, NAME).key, 0, finished)
    client.lrem(open_queue(client, NAME).key, 0, failed)
    client.zadd(FinishedJobRegistry(NAME, connection=client).key, {finished: 1})
    client.zadd(FailedJobRegistry(NAME, connection=client).key, {failed: 1})
    queue.tidy(client, [NAME])
    assert open_queue(client, NAME).job_ids == [kept]
    assert client.exists(FinishedJobRegistry(NAME, connection=client).key) == 0
    assert client.exists(FailedJobRegistry(NAME, connection=client).key) == 0


def test_tidy_fails_a_job_whose_worker_died_in_it(client: Redis, desk: Desk, worker: ConcurrentWorker) -> None:
    (job_id,) = _put(client, "h0")
    worker._take_one()
    _wait(lambda: _status(client, job_id) == JobStatus.STARTED, "started")
    started = StartedJobRegistry(NAME, connection=client)
    queue.tidy(client, [NAME])
    assert _status(client, job_id) == JobStatus.STARTED
    (entry,) = client.zrange(started.key, 0, -1)
    client.zadd(started.key, {text(entry): 1})
    queue.tidy(client, [NAME])
    assert _status(client, job_id) == JobStatus.FAILED
    assert 0 < client.ttl(Job.key_for(job_id)) <= 500
    desk.gate.set()
    worker._pool.shutdown()


def test_a_queue_is_retired_when_nothing_of_it_is_left(client: Redis) -> None:
    (job_id,) = _put(client, "h0")
    rq, cancelled = open_queue(client, NAME), CanceledJobRegistry(NAME, connection=client)
    queue.retire(client, [NAME])
    assert queue.known(client) == {NAME}
    _job(client, job_id).cancel()
    queue.retire(client, [NAME])
    assert queue.known(client) == {NAME}
    client.zincrby(cancelled.key, -100, job_id)
    queue.retire(client, [NAME])
    assert list(client.scan_iter("rq:*")) == []
    _put(client, "h1")
    assert queue.known(client) == {NAME}
    assert len(rq.job_ids) == 1


def test_tidy_requeues_a_job_that_was_handed_out_and_never_begun(client: Redis) -> None:
    lost, waiting = _put(client, "h0", "h1")
    rq = open_queue(client, NAME)
    client.lmove(rq.key, rq.intermediate_queue_key)
    queue.tidy(client, [NAME])
    assert rq.job_ids == [waiting]
    mark = rq.intermediate_queue.get_first_seen_key(lost)
    client.pexpire(mark, client.pttl(mark) - STUCK_MS)
    queue.tidy(client, [NAME])
    assert rq.job_ids == [lost, waiting]
    assert client.exists(rq.intermediate_queue_key, mark) == 0
    assert queue.requeue_front(client, NAME, lost) is False


def test_a_job_whose_begin_was_told_and_not_heard_is_begun_again(
    worker: ConcurrentWorker, desk: Desk, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has it as started, out of every list and without a TTL; the worker only saw its connection break."""
    prepare, waits = worker.prepare_job_execution, []

    def deaf(job: Job, **options: Any) -> None:
        prepare(job, **options)
        waits.append((client.llen(open_queue(client, NAME).key), client.ttl(job.key)))
        monkeypatch.undo()
        raise RedisConnectionError("the reply is lost")

    monkeypatch.setattr(worker, "prepare_job_execution", deaf)
    (job_id,) = _put(client, "h0")
    worker._take_one()
    assert (waits, desk.seen) == ([(0, -1)], [])
    worker._give_back()
    assert open_queue(client, NAME).job_ids == [job_id]
    assert _status(client, job_id) == JobStatus.QUEUED
    assert 700 < client.ttl(Job.key_for(job_id)) <= 800
    worker._take_one()
    _wait(lambda: desk.seen == ["h0"], "the job begun again")
    desk.gate.set()
    worker._pool.shutdown()
    assert _status(client, job_id) == JobStatus.FINISHED
    assert _started(client) == []


def test_a_paused_worker_takes_nothing_and_goes_on_later(worker: ConcurrentWorker, desk: Desk, client: Redis) -> None:
    worker.pause(True)
    with _working(worker, desk):
        (held,) = _put(client, "later")
        _wait(lambda: client.hget(worker.key, "state") == b"idle", "the worker at work")
        worker.pause(False)
        _wait(lambda: desk.seen == ["later"], "the job")
        worker.pause(True)  # what runs goes on
        desk.gate.set()
        _wait(lambda: _status(client, held) is JobStatus.FINISHED, "its end")


def test_the_jobs_meta_tells_what_came_of_it(worker: ConcurrentWorker, desk: Desk, client: Redis) -> None:
    good, bad, gone = _put(client, "good", "bad", "gone")
    begun = {"model": "m", "route": "a->b", "state": "live"}
    assert _job(client, good).meta == begun
    with _working(worker, desk):
        _wait(lambda: len(desk.seen) == 3, "all three")
        desk.stop("gone")
        _wait(lambda: _status(client, gone) is JobStatus.CANCELED, "the cancelled one")
        desk.gate.set()
        _wait(lambda: _status(client, good) is JobStatus.FINISHED, "the good one")
        _wait(lambda: _status(client, bad) is JobStatus.FAILED, "the bad one")
    assert _job(client, good).meta == begun | {"echo": "good"}
    assert _job(client, bad).meta == begun | {"state": "failed", "error": "broker_unavailable"}
    assert _job(client, gone).meta == begun | {"state": "cancelled"}


def test_an_outcome_is_the_state_of_the_job(client: Redis) -> None:
    handlers = {DECODE_JOB: lambda _: {"outcome": "sent", "pages": 3, "bytes": 9}}
    worker = ConcurrentWorker(NAME, client, handlers, slots=1, name="w", settings=SETTINGS, poll_s=0.1)
    (job,) = _put(client, "one")
    with _working(worker):
        _wait(lambda: _status(client, job) is JobStatus.FINISHED, "its end")
    assert _job(client, job).meta == {"model": "m", "route": "a->b", "state": "sent", "pages": 3, "bytes": 9}
