"""One replica from warm-up to withdrawal: what it publishes, what breaks it, and that its heart goes on beating."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis
from rq.command import send_shutdown_command, send_stop_job_command
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from pipeline import engines, heap
from pipeline.broker import keys, queue, stream
from pipeline.broker.clock import BrokerClock
from pipeline.broker.janitor import Janitor
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.worker import ConcurrentWorker
from pipeline.checkpoint import read_contract
from pipeline.engines.base import Capabilities, Engine
from pipeline.engines.reference import ReferenceEngine
from pipeline.errors import BudgetTooSmallError, ConfigError, EngineError
from pipeline.handoff import State
from pipeline.request import Request, Sampling
from pipeline.sample import tiny
from pipeline.settings import BrokerSettings, EngineSettings, Role, Settings, WorkerSettings
from pipeline.workers import runtime
from pipeline.workers.runtime import warm_up
from tests.begun import begin
from tests.ports import free_port
from tests.proxy import Proxy
from tests.stages.fake import CONTRACT, PAGE_BYTES, FakeAdmission, FakeEngine, FakePrefill, text
from tests.stages.stand import eventually, settings
from tests.workers.scene import DECODE, NAME, PREFILL, Scene

BROKER = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
IDLE = {"prefill_running": 0, "decode_running": 0}

Build = Callable[..., Scene]


@pytest.fixture
def build(server_url: str, redis_client: Redis) -> Iterator[Build]:
    """Scenes that are closed in the end, unless a test did."""
    made: list[Scene] = []

    def make(url: str = server_url, **options: object) -> Scene:
        made.append(Scene(url, redis_client, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for scene in made:
        scene.close()


# -- warming up


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_warm_up_leaves_no_cached_prefix(checkpoint: Path, role: str) -> None:
    engine = ReferenceEngine(checkpoint, EngineSettings(chunk_tokens=64))
    try:
        before = engine.stats()
        warm_up(engine, role)
        after = engine.stats()
        assert (after.cached_pages, after.running, after.held_pages) == (0, 0, 0)
        assert after.free_pages == before.free_pages
        assert after.prompt_tokens_computed >= 79
        assert (after.tokens_sampled > 0) is (role != "prefill")
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("role", "capabilities", "kinds"),
    [
        ("prefill", Capabilities(), [FakePrefill]),
        ("decode", Capabilities(), [FakePrefill, FakeAdmission]),
        ("both", Capabilities(), [FakePrefill, FakeAdmission]),
        ("prefill", Capabilities(needs_first_token=True), [FakePrefill]),
        ("decode", Capabilities(can_prefill=False, needs_first_token=True), [FakeAdmission]),
    ],
)
def test_warm_up_runs_what_the_role_will_be_asked_for(
    role: str, capabilities: Capabilities, kinds: list[type[object]]
) -> None:
    engine = FakeEngine(capabilities=capabilities)
    warm_up(engine, role)
    assert [type(work) for work in engine.works] == kinds
    assert engine.live == []
    assert {work.request.first_token for work in engine.works} == {capabilities.needs_first_token}
    if role != "prefill":
        rows = 80 if capabilities.needs_first_token else 79
        assert [(page.index, page.tokens) for page in engine.imported] == [(0, 64), (1, rows - 64)]
        assert len({work.request.handoff_id for work in engine.works}) == len(engine.works)


def test_a_warm_up_that_fails_closes_what_it_opened() -> None:
    engine = FakeEngine()
    engine.set(decode_error=EngineError("no kernel"), tokens=1)
    with pytest.raises(EngineError, match="no kernel"):
        warm_up(engine, "both")
    assert engine.live == []


# -- serving


@BROKER
def test_what_it_says_of_itself(build: Build) -> None:
    scene = build()
    assert scene.replica() is None
    scene.start()
    said = scene.replica()
    assert said is not None
    assert said == Replica(
        name=NAME,
        engine="fake",
        role="both",
        model="small",
        contract=CONTRACT,
        slots=2,
        started_ms=said.started_ms,
        can_prefill=True,
        needs_first_token=False,
        max_running=4,
        stats=said.stats,
        load=IDLE,
    )
    assert (said.stats["running"], said.stats["tokens_sampled"]) == (0, 0)
    assert 0 < int(scene.client.pttl(keys.replica(NAME))) <= 5000
    assert scene.runtime.broken is False


@BROKER
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_role_has_one_queue(build: Build, role: Role) -> None:
    scene = build(role=role).start()
    said = scene.replica()
    assert said is not None
    assert (said.role, said.load) == (role, {f"{role}_running": 0})
    assert scene.take() == [f"{NAME}.{role}"]


@BROKER
def test_a_handoff_from_one_queue_to_the_other(build: Build) -> None:
    scene = build().start()
    requests = [scene.ask() for _ in range(5)]  # more than the slots of a role
    for request in requests:
        scene.finish(request)
        assert scene.said(request) == text(request)
    eventually(lambda: scene.ledger.live() == [], "both workers out")
    assert scene.engine.live == []
    assert stream.gauges(scene.client) == (0, 0, 0)


@BROKER
def test_gauges_are_published_while_it_works(build: Build) -> None:
    scene = build().start()
    scene.engine.set(tokens=1)
    request = scene.ask()
    eventually(lambda: scene.said(request) == text(request)[:1], "the first token")

    def load() -> dict[str, int]:
        said = scene.replica()
        return said.load | said.stats if said else {}

    eventually(lambda: (load()["decode_running"], load()["running"]) == (1, 1), "its gauges")
    scene.engine.set(tokens=3)
    eventually(lambda: (load()["decode_running"], load()["running"]) == (0, 0), "its rest")


@BROKER
def test_a_stopped_job_is_a_cancelled_handoff(build: Build) -> None:
    scene = build(role="decode").start()
    scene.engine.set(tokens=1)
    request = scene.ask(local=True)
    eventually(lambda: scene.said(request) == text(request)[:1], "the first token")
    jobs = StartedJobRegistry(DECODE, connection=scene.client, serializer=JSONSerializer)
    (job,) = jobs.get_job_ids(cleanup=False)
    send_stop_job_command(scene.client, job, JSONSerializer)
    eventually(lambda: scene.state(request) is State.CANCELLED, "the cancel")
    assert scene.client.hget(keys.HandoffKeys(request.handoff_id).record, "reason") == b"stop-job"


# -- what ends it


@BROKER
def test_an_engine_that_ended_breaks_it(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    scene = build().start()
    eventually(lambda: not scene.runtime.broken, "its start")
    scene.engine.set(failure=EngineError("the device is gone"))
    assert scene.runtime.broken
    assert "the engine has ended: the device is gone" in caplog.text


@BROKER
def test_when_its_engine_ends_others_take_over_what_it_had(build: Build) -> None:
    """Its process lives and renews nothing: the lease ends at once, the death counts, nobody is told of an error."""
    scene = build()
    scene.engine.set(tokens=1)
    scene.start()
    request = scene.ask(local=True)
    eventually(lambda: len(scene.said(request)) == 1, "a token")
    names = keys.HandoffKeys(request.handoff_id)
    other = Replica("w-1", "fake", "both", "small", CONTRACT, 2, 1)
    Registry(scene.client).register(other, 60)
    scene.engine.set(failure=EngineError("the device is gone"))
    eventually(lambda: Registry(scene.client).holder(NAME) is None, "the end of its lease")
    eventually(lambda: scene.client.hget(names.record, "decode_attempt") == b"2", "the takeover")  # its own janitor's
    assert scene.client.hmget(names.record, "state", "lost_workers", "resumed") == [b"created", b"1", b"1"]
    assert scene.client.llen("rq:queue:decode.w-1") == 1
    assert scene.client.llen(names.tokens) == 1
    scene.close()
    assert Registry(scene.client).holder(NAME) is None


@BROKER
def test_what_its_dead_engine_never_took_up_is_nobodys_death(build: Build) -> None:
    scene = build()
    scene.engine.set(failure=EngineError("the device is gone"))
    Registry(scene.client).register(Replica("w-1", "fake", "both", "small", CONTRACT, 2, 1), 60)
    scene.start()
    request = scene.ask(local=True)
    names = keys.HandoffKeys(request.handoff_id)
    eventually(lambda: scene.client.hget(names.record, "decode_attempt") == b"2", "the takeover")
    assert scene.client.hmget(names.record, "state", "lost_workers") == [b"created", b"0"]


@BROKER
def test_a_name_that_another_process_has_taken_breaks_it(build: Build) -> None:
    scene = build().start()
    scene.client.hset(keys.replica(NAME), "incarnation", "another")
    eventually(lambda: scene.runtime.broken, "the loss")
    scene.close()
    assert Registry(scene.client).holder(NAME) == "another"
    assert scene.client.sismember(keys.REPLICAS, NAME) == 1


@BROKER
def test_a_taker_that_ended_breaks_it(build: Build) -> None:
    scene = build(role="decode").start()
    scene.take()
    (name,) = scene.takers()

    def told() -> bool:
        send_shutdown_command(scene.client, name)
        return scene.runtime.broken

    eventually(told, "the end of its taker")


# -- draining


@BROKER
def test_draining_is_published_before_taking_stops(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, seen = build().start(), []
    stop = ConcurrentWorker.request_stop

    def watched(worker: ConcurrentWorker) -> None:
        seen.append(scene.replica())
        stop(worker)

    monkeypatch.setattr(ConcurrentWorker, "request_stop", watched)
    scene.close()
    assert [said and said.load for said in seen] == [IDLE | {"draining": 1, "stopping": 1}] * 2
    assert Registry(scene.client).list() == []
    assert scene.client.smembers(keys.REPLICAS) == set()


@BROKER
def test_what_runs_is_finished_and_what_waits_stays(build: Build) -> None:
    scene = build().start()
    scene.engine.set(tokens=1)
    running = scene.ask()
    eventually(lambda: scene.said(running) == text(running)[:1], "the first token")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(scene.runtime.close)

        def load() -> dict[str, int]:
            said = scene.replica()
            return said.load if said else {}

        eventually(lambda: load().get("draining") == 1, "the draining")
        eventually(lambda: all(taker._stopping.is_set() for taker in scene.runtime._takers.values()), "its takers told")
        waiting = scene.ask()  # a look for a job that had begun before gives it back
        eventually(
            lambda: load() == {"prefill_running": 0, "decode_running": 1, "draining": 1, "stopping": 1},
            "a further heartbeat",
        )
        assert not closing.done()
        scene.engine.set(tokens=3)
        closing.result(60)
    assert (scene.state(running), scene.said(running)) == (State.FINISHED, text(running))
    assert scene.state(waiting) is State.CREATED
    assert queue.queue_lengths(scene.client, [PREFILL, DECODE]) == {PREFILL: 1, DECODE: 1}


# -- the heart


@BROKER
def test_no_exception_stops_the_heart(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    scene = build(lease_s=2.0).start()
    scene.engine.set(gauges_error="odd gauges")
    eventually(lambda: caplog.text.count("ValueError: odd gauges") >= 2, "two beats that failed")
    scene.engine.set(gauges_error=None)
    eventually(lambda: int(scene.client.pttl(keys.replica(NAME))) > 1500, "a renewed lease")
    assert scene.runtime.broken is False


@BROKER
def test_it_comes_back_after_the_broker_was_away(build: Build, server_url: str) -> None:
    with Proxy(urlsplit(server_url).port or 0) as hop:
        scene = build(hop.url, lease_s=3.0).start()
        scene.take()
        hop.cut()
        eventually(lambda: scene.replica() is None, "the end of its lease")
        assert scene.runtime.broken is False
        hop.mend()
        eventually(lambda: scene.replica() is not None, "its return")
        request = scene.ask()
        scene.finish(request)
        assert scene.said(request) == text(request)
        assert scene.runtime.broken is False
        scene.close()


@BROKER
def test_what_does_not_end_within_the_grace_is_left_to_others(build: Build) -> None:
    scene = build(grace_s=0.2).start()
    scene.engine.set(tokens=1)
    request = scene.ask()
    eventually(lambda: scene.said(request) == text(request)[:1], "the first token")
    said = scene.replica()
    assert said is not None
    registry = Registry(scene.client)
    registry.register(replace(said, name="other", load={}), 60)
    scene.runtime.close()
    assert scene.engine.live == []
    clock = BrokerClock(scene.client)
    Janitor(scene.client, scene.client, scene.ledger, Registry(scene.client), clock, scene.settings).sweep()
    record = scene.ledger.load(request.handoff_id)
    assert record is not None
    assert (record.state, record.route["decode_replica"], record.worker("decode")) == (State.CREATED, "other", None)
    assert (record.resumed, record.number("lost_workers")) == (1, 0)


@BROKER
def test_it_sweeps(build: Build) -> None:
    scene = build(lease_s=1.0).start()
    scene.client.delete(keys.owner("api"))
    request = Request(secrets.token_hex(16), (1, 2), Sampling(max_tokens=1))
    begin(scene.ledger, request, CONTRACT, {"decode_replica": NAME}, "api")
    eventually(lambda: scene.state(request) is State.CANCELLED, "the janitor")
    eventually(lambda: scene.ledger.live() == [], "the release")


@BROKER
def test_a_sweep_that_takes_longer_than_the_lease_is_not_death(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link of 150 ms each way a worker lost its lease to its own sweeps."""
    swept, go_on = threading.Event(), threading.Event()

    def long_sweep(janitor: Janitor) -> int:
        swept.set()
        go_on.wait(120)
        return 0

    monkeypatch.setattr(Janitor, "sweep", long_sweep)
    scene = build(lease_s=3.0).start()
    assert swept.wait(60)
    seen = [int(scene.client.pttl(keys.replica(NAME)))]
    begun = time.monotonic()
    while time.monotonic() < begun + 3.5:  # longer than the lease
        time.sleep(0.02)
        seen.append(int(scene.client.pttl(keys.replica(NAME))))
    go_on.set()
    assert all(left_ms > 0 for left_ms in seen)
    assert sum(after > before for before, after in itertools.pairwise(seen)) >= 2


@BROKER
def test_credits_of_a_slow_handoff_keep_their_lease(build: Build) -> None:
    scene = build(payload_ttl_s=3.0)
    scene.engine.set(imports=0)
    scene.start()
    request = scene.ask()
    eventually(lambda: stream.gauges(scene.client).waiters == 1, "two pages in flight")
    first = scene.client.zscore(keys.BUDGET_LEASES, request.handoff_id)
    assert first is not None

    def outlived() -> bool:
        assert stream.reap(scene.client) == []
        return float(scene.client.zscore(keys.BUDGET_LEASES, request.handoff_id) or 0) > float(first) + 3500

    eventually(outlived, "a lease that was renewed beyond its first end")
    scene.engine.set(imports=4)
    scene.finish(request)
    assert scene.client.hget(keys.HandoffKeys(request.handoff_id).record, "recomputed") is None


@BROKER
@pytest.mark.parametrize("trouble", ["gauges", "broker"])
def test_it_closes_whatever_the_trouble(build: Build, server_url: str, trouble: str) -> None:
    with Proxy(urlsplit(server_url).port or 0) as hop:
        scene = build(hop.url, lease_s=600.0).start()  # it does not end by itself
        scene.take()
        if trouble == "gauges":
            scene.engine.set(gauges_error="odd gauges")
        else:
            hop.cut()
        scene.close()
        assert not any(thread.is_alive() for thread in scene.runtime._threads)
        assert (Registry(scene.client).list() == []) is (trouble == "gauges")
        hop.mend()


# -- the whole process


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _served(
    engine: FakeEngine, client: Redis, url: str, monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]
) -> EngineSettings:
    """Run a worker process's main function in this thread until `end`; returns what the engine was started with."""
    given: list[EngineSettings] = []

    def load(name: str, checkpoint: Path, chosen: EngineSettings) -> FakeEngine:
        assert (name, checkpoint) == ("fake", Path("models/small"))
        given.append(chosen)
        return engine

    def watch() -> None:
        eventually(lambda: Registry(client).list(), "the replica")
        end()

    settled: list[bool] = []
    monkeypatch.setattr(heap, "settle", lambda: settled.append(not Registry(client).list()))
    monkeypatch.setattr(engines, "load", load)
    worker = WorkerSettings(name=NAME, engine="fake", model=Path("models/small"), role="decode")
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        runtime.run(settings(url), worker)
    finally:
        watcher.join()
    assert settled == [True]  # once, before it registered; the real one would freeze what the tests leave behind
    return given[0]


@BROKER
@pytest.mark.parametrize("end", ["signal", "engine"])
def test_a_process_serves_until_it_is_told_or_broken(
    redis_client: Redis, server_url: str, monkeypatch: pytest.MonkeyPatch, handlers: None, end: str
) -> None:
    engine = FakeEngine()
    ends: dict[str, Callable[[], object]] = {
        "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "engine": lambda: engine.set(failure=EngineError("the device is gone")),
    }
    expected = pytest.raises(EngineError, match="the device is gone") if end == "engine" else nullcontext()
    with expected:
        assert _served(engine, redis_client, server_url, monkeypatch, ends[end]) == EngineSettings(role="decode")
    assert [type(work) for work in engine.works] == [FakePrefill, FakeAdmission]  # it was warm before it registered
    assert isinstance(engine.failure, EngineError)  # closed
    assert Registry(redis_client).list() == []


@BROKER
def test_a_budget_that_holds_no_page_is_refused_at_start(
    redis_client: Redis, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engines, "load", lambda *_: engine)
    worker = WorkerSettings(name=NAME, engine="fake", model=Path("models/small"), role="decode")
    small = Settings(broker=BrokerSettings(url=server_url, budget_bytes=PAGE_BYTES - 1))
    with pytest.raises(BudgetTooSmallError):
        runtime.run(small, worker)
    assert engine.works == []
    assert engine.failure is not None
    assert Registry(redis_client).list() == []


def test_beside_decoding_prompts_that_wait_for_export_keep_to_their_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.write("llama", tmp_path / "tiny")
    page_bytes = read_contract(model).page_shape.page_bytes
    given = []

    def load(name: str, directory: Path, chosen: EngineSettings) -> Engine:
        given.append((chosen.role, chosen.held_pages))
        raise ConfigError("far enough")

    monkeypatch.setattr(engines, "load", load)
    pool = EngineSettings(kv_cache_bytes=40 * page_bytes, held_pages=64)
    roles: tuple[Role, ...] = ("both", "prefill")
    for role in roles:
        worker = WorkerSettings(name=NAME, engine="fake", model=model, role=role, engine_settings=pool)
        with pytest.raises(ConfigError, match="far enough"):
            runtime.run(settings("redis://127.0.0.1:9/0"), worker)
    assert given == [("both", 10), ("prefill", 64)]


# -- draining by an operator's wish


@BROKER
def test_a_drained_replica_finishes_its_own_jobs_and_leaves_prefill_to_others(build: Build) -> None:
    scene = build().start()
    other = Registry(scene.client)
    said = scene.replica()
    assert said is not None
    other.register(replace(said, name="other", load={}), 60)
    Registry(scene.client).drain(NAME)
    eventually(lambda: _load(scene).get("draining") == 1, "the wish heard")
    request = scene.ask()
    eventually(lambda: scene.client.llen(f"rq:queue:{DECODE}") == 0, "its decode job taken")
    eventually(lambda: scene.client.llen(f"rq:queue:{PREFILL}") == 1, "its prefill job, handed out or not, put back")
    Registry(scene.client).drain(NAME, undo=True)
    scene.finish(request)
    eventually(lambda: _load(scene) == IDLE, "at rest, and no longer draining")


@BROKER
def test_a_drained_replica_prefills_what_nobody_else_would(build: Build) -> None:
    scene = build().start()
    Registry(scene.client).drain(NAME)
    eventually(lambda: _load(scene).get("draining") == 1, "the wish heard")
    request = scene.ask()
    scene.finish(request)


def _load(scene: Scene) -> dict[str, int]:
    said = next((one for one in Registry(scene.client).list() if one.name == NAME), None)
    return said.load if said else {}


# -- metrics


@BROKER
def test_a_scrape_tells_what_runs_and_what_the_engine_says(build: Build) -> None:
    scene = build(metrics_port=(port := free_port())).start()
    request = scene.ask()
    scene.finish(request)
    at_rest = {f'crossfill_running_jobs{{role="{role}"}} 0.0' for role in ("prefill", "decode")}
    eventually(lambda: at_rest <= set(_scrape(port).splitlines()), "both jobs told")
    text = _scrape(port)
    assert f'crossfill_replica_info{{engine="fake",model="small",replica="{NAME}",role="both"}} 1.0' in text
    assert 'crossfill_parts_total{outcome="done",role="prefill"} 1.0' in text
    assert 'crossfill_parts_total{outcome="done",role="decode"} 1.0' in text
    assert "crossfill_draining 0.0" in text
    for gauge in ("running_requests", "held_pages", "cached_pages", "free_pages", "tokens_sampled_total"):
        assert f"crossfill_engine_{gauge} 0.0" in text
    scene.engine.gauges_error = "no such device"
    text = _scrape(port)
    assert "crossfill_draining 0.0" in text
    assert "crossfill_engine_held_pages" not in text
    scene.engine.gauges_error = None
    scene.close()
    with pytest.raises(OSError, match="refused"):
        _scrape(port)


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
