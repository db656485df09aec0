"""The janitor against real servers: it ends what the dead have left, and nothing of the living."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from redis import Redis

from pipeline.broker import channel, keys, queue, stream
from pipeline.broker.clock import BrokerClock
from pipeline.broker.credit import Credit
from pipeline.broker.janitor import TURN_MS, Janitor
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Accept, Role, Snapshot
from pipeline.broker.registry import Registry, Replica
from pipeline.contract import Contract
from pipeline.errors import DeadlineError, NoReplicaError, WorkerLostError
from pipeline.handoff import Attempts, Event, State
from pipeline.request import Request, Sampling
from pipeline.routing import Route
from pipeline.settings import BrokerSettings, HandoffSettings, Settings
from tests.begun import begin

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
SETTINGS = Settings(handoff=HandoffSettings(queue_s=60, total_s=600))
PREFILL = f"prefill.fake.{CONTRACT.digest[:8]}"
LEASE_S = 60.0


class Scene:
    """A broker with an owner, a janitor, and the replicas `p-0` and `d-0`, each its own process."""

    def __init__(self, client: Redis, settings: Settings = SETTINGS) -> None:
        self.client = client
        self.clock = BrokerClock(client)
        self.ledger = Ledger(client, PageServers(client, settings.broker), self.clock, settings)
        self.janitor = Janitor(client, client, self.ledger, Registry(client), self.clock, settings)
        self.registries: dict[str, Registry] = {}
        self.settings = settings
        for name in ("p-0", "d-0"):
            self.register(name)
        self.ledger.own("api", LEASE_S)

    def register(self, name: str) -> None:
        self.registries[name] = Registry(self.client)
        role = "prefill" if name.startswith("p") else "decode"
        replica = Replica(name, "fake", role, "m", CONTRACT, slots=1, started_ms=1)
        self.registries[name].register(replica, LEASE_S)

    def die(self, *names: str) -> None:
        """Their leases end."""
        for name in names:
            self.client.delete(keys.replica(name))

    def create(self, *, owner: str = "api", age_s: float = 0.0, replica: str = "d-0") -> str:
        request = Request(secrets.token_hex(16), (1, 2, 3), Sampling(max_tokens=4))
        route = Route("fake", PREFILL, replica, f"decode.{replica}", "fake")
        begin(self.ledger, request, CONTRACT, asdict(route), owner)
        self.write(request.handoff_id, at_created=str(self.clock.now_ms() - 1000 * age_s))
        return request.handoff_id

    def write(self, handoff: str, **fields: str) -> None:
        self.client.hset(keys.HandoffKeys(handoff).record, mapping=fields)  # type: ignore[arg-type]

    def enter(self, handoff: str, role: Role, name: str = "") -> int:
        name = name or f"{role[0]}-0"
        return self.ledger.enter(handoff, role, f"{name}@{self.registries[name].incarnation}")[0]

    def accepted(self, **options: float) -> str:
        """P and D are at work and D has said so."""
        handoff = self.create(**options)  # type: ignore[arg-type]
        self.enter(handoff, "prefill")
        self.enter(handoff, "decode")
        self.ledger.accept(handoff, Accept(1, 1, 0), {})
        return handoff

    def seen(self, handoff: str) -> Snapshot:
        found = self.ledger.peek(handoff)
        assert found is not None
        return found

    def told(self, handoff: str) -> list[str]:
        """Error codes that the client was told."""
        raw = self.client.lrange(keys.HandoffKeys(handoff).tokens, 0, -1)
        return [entry.error.code for entry in map(channel.decode, raw) if entry.error is not None]


@pytest.fixture
def scene(redis_client: Redis) -> Scene:
    return Scene(redis_client)


# -- workers


def test_the_living_are_left_alone(scene: Scene) -> None:
    handoffs = [scene.create(), scene.accepted()]
    before = [scene.seen(handoff) for handoff in handoffs]
    assert scene.janitor.sweep() == 0
    assert [scene.seen(handoff) for handoff in handoffs] == before
    assert scene.ledger.live() == handoffs
    assert scene.client.smembers(keys.REPLICAS) == {b"p-0", b"d-0"}


def test_a_lost_p_is_told_to_d(scene: Scene) -> None:
    handoff = scene.accepted()
    scene.die("p-0")
    assert scene.janitor.sweep() == 1
    seen = scene.seen(handoff)
    assert (seen.state, seen.worker("prefill")) == (State.ACCEPTED, None)
    assert seen.worker("decode") is not None
    error = seen.error("prefill")
    assert error is not None
    assert (error.code, error.retryable) == (WorkerLostError.code, True)
    assert error.message == f"prefill worker p-0@{scene.registries['p-0'].incarnation} is gone"
    assert scene.janitor.sweep() == 0


@pytest.mark.parametrize("event", [None, Event.IMPORT, Event.COMMIT])
def test_a_lost_d_ends_the_handoff(scene: Scene, event: Event | None) -> None:
    handoff = scene.accepted()
    if event:
        scene.ledger.advance(handoff, "decode", 1, event)
    scene.die("d-0")
    assert scene.janitor.sweep() == 1
    assert scene.seen(handoff).state is State.FAILED
    assert scene.told(handoff) == ["worker_lost"]
    assert scene.ledger.live() == [handoff]  # P is still in
    scene.ledger.leave(handoff, "prefill", 1)
    assert scene.ledger.live() == []


def test_when_both_are_lost_everything_is_given_back(scene: Scene) -> None:
    handoff = scene.accepted()
    pair = Attempts(1, 1)
    stream.raise_fence(scene.client, handoff, pair, scene.settings.broker)
    credit = Credit(scene.client, handoff, pair, scene.settings.broker)
    assert credit.reserve(0, 10) is True
    scene.client.set(credit.payload_key(0), b"x" * 10)
    scene.die("p-0", "d-0")
    assert scene.janitor.sweep() == 1
    assert scene.told(handoff) == ["worker_lost"]
    assert scene.ledger.live() == []
    assert stream.gauges(scene.client).in_flight_bytes == 0
    scene.ledger.forget(handoff)
    assert list(scene.client.scan_iter(f"cf:{{{handoff}}}:*")) == []


def test_a_cancelled_handoff_of_a_lost_worker_is_cancelled_not_failed(scene: Scene) -> None:
    handoff = scene.create()
    scene.enter(handoff, "prefill")
    assert scene.ledger.cancel(handoff, "client") is State.CANCELLING
    scene.die("p-0")
    assert scene.janitor.sweep() == 1
    assert scene.seen(handoff).state is State.CANCELLED
    assert scene.told(handoff) == ["cancelled"]
    assert scene.ledger.live() == []


def test_a_lost_worker_of_an_ended_handoff_only_leaves(scene: Scene) -> None:
    handoff = scene.accepted()
    scene.ledger.advance(handoff, "decode", 1, Event.COMMIT)
    scene.ledger.leave(handoff, "prefill", 1)
    assert scene.ledger.stop(handoff) is True
    scene.die("d-0")
    assert scene.janitor.sweep() == 1
    assert scene.seen(handoff).state is State.FINISHED
    assert scene.told(handoff) == []
    assert scene.ledger.live() == []


@pytest.mark.parametrize(("role", "state"), [("prefill", State.ACCEPTED), ("decode", State.CREATED)])
def test_a_process_that_was_restarted_is_not_the_one_that_works(scene: Scene, role: Role, state: State) -> None:
    handoff, name = scene.accepted(), f"{role[0]}-0"
    scene.die(name)
    scene.register(name)
    assert scene.janitor.sweep() == 1
    seen = scene.seen(handoff)
    assert (seen.state, seen.worker(role)) == (state, None)
    assert seen.route["decode_replica"] == "d-0"  # as good as any other to begin anew
    assert scene.registries[name].holder(name) == scene.registries[name].incarnation
    assert scene.client.sismember(keys.REPLICAS, name) == 1


def test_a_worker_whose_name_has_the_separator_in_it(scene: Scene) -> None:
    scene.register("d@host")
    handoff = scene.create(replica="d@host")
    scene.enter(handoff, "decode", "d@host")
    assert scene.janitor.sweep() == 0
    scene.die("d@host", "d-0")
    assert scene.janitor.sweep() == 1
    assert scene.seen(handoff).state is State.FAILED


@pytest.mark.parametrize("record", ["{}", "[", '{"name": "d-0", "of_a_newer_version": 1}'])
def test_a_record_that_cannot_be_read_is_still_a_sign_of_life(scene: Scene, record: str) -> None:
    handoff, waiting = scene.accepted(), scene.create()
    scene.client.hset(keys.replica("d-0"), "replica", record)
    assert [replica.name for replica in scene.registries["p-0"].list()] == ["p-0"]
    assert scene.janitor.sweep() == 0
    assert scene.seen(handoff).state is State.ACCEPTED
    assert scene.seen(waiting).state is State.CREATED


# -- replicas


def test_a_replica_whose_lease_ended_is_forgotten_and_its_queue_tidied(scene: Scene) -> None:
    waiting = f"rq:queue:{keys.decode_queue('d-0')}"
    scene.client.rpush(waiting, "a-job-that-has-expired")
    scene.die("d-0")
    scene.janitor.sweep()
    assert scene.client.smembers(keys.REPLICAS) == {b"p-0"}
    assert scene.client.lrange(waiting, 0, -1) == []


def test_queues_of_names_that_never_come_back_are_forgotten(scene: Scene) -> None:
    """But not what a replica serves, what still holds a job, and what belongs to others on the server."""
    kept = ["decode.d-0", PREFILL, "decode.full", "mail"]
    for name in [*kept, "decode.gone", "prefill.old.12345678"]:
        scene.client.sadd("rq:queues", f"rq:queue:{name}")
    scene.client.rpush("rq:queue:decode.full", "waiting")
    scene.client.hset("rq:job:waiting", "status", "queued")
    killed = "rq:worker:gone.1"
    for workers in ("rq:workers", "rq:workers:decode.gone"):
        scene.client.sadd(workers, killed)
    scene.janitor.sweep()
    assert scene.client.smembers("rq:queues") == {f"rq:queue:{name}".encode() for name in kept}
    assert scene.client.exists("rq:workers", "rq:workers:decode.gone") == 0
    scene.client.sadd("rq:queues", "rq:queue:decode.gone")
    scene.janitor.sweep()
    assert scene.client.sismember("rq:queues", "rq:queue:decode.gone") == 1  # it looks every half minute
    scene.client.delete(keys.UPKEEP)
    scene.janitor.sweep()
    assert scene.client.sismember("rq:queues", "rq:queue:decode.gone") == 0


def test_a_replica_that_comes_back_while_it_is_being_forgotten_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.die("d-0")
    monkeypatch.setattr(queue, "tidy", lambda client, queues: scene.register("d-0"))
    scene.janitor.sweep()
    assert scene.client.smembers(keys.REPLICAS) == {b"p-0", b"d-0"}
    assert [replica.name for replica in Registry(scene.client).list()] == ["d-0", "p-0"]


def test_a_worker_that_registers_and_enters_during_a_sweep_is_alive(scene: Scene) -> None:
    class Late(Ledger):
        """Between the list of handoffs and the look at each, a new replica takes one."""

        def live(self) -> list[str]:
            found = super().live()
            scene.register("d-1")
            scene.enter(handoff, "decode", "d-1")
            return found

    handoff = scene.create(replica="d-1")
    late = Late(scene.client, PageServers(scene.client, scene.settings.broker), scene.clock, scene.settings)
    assert replace(scene.janitor, ledger=late).sweep() == 0
    assert scene.seen(handoff).state is State.ADMITTED


# -- others go on


def test_another_d_goes_on_for_a_lost_one(scene: Scene) -> None:
    scene.register("d-1")
    handoff = scene.accepted()
    scene.die("d-0")
    assert scene.janitor.sweep() == 1
    seen = scene.seen(handoff)
    assert (seen.state, seen.attempt("decode"), seen.route["decode_replica"]) == (State.CREATED, 2, "d-1")
    assert scene.told(handoff) == []
    assert scene.janitor.sweep() == 0


def test_what_d_left_unfinished_goes_to_another(scene: Scene) -> None:
    """A worker that is stopped leaves what it could not end in time: that is no death."""
    scene.register("d-1")
    scene.die("d-0")
    scene.register("d-0")
    handoff = scene.accepted()
    scene.ledger.leave(handoff, "decode", 1)
    scene.client.delete(keys.replica("d-0"))
    assert scene.janitor.sweep() == 1
    record = scene.ledger.load(handoff)
    assert record is not None
    assert (record.attempt("decode"), record.number("lost_workers")) == (2, 0)


def test_a_dead_replicas_queue_goes_to_another(scene: Scene) -> None:
    scene.register("d-1")
    handoff = scene.create()
    scene.die("d-0")
    scene.janitor.sweep()
    assert scene.seen(handoff).route["decode_queue"] == "decode.d-1"
    assert scene.told(handoff) == []


@pytest.mark.parametrize("another", [True, False])
def test_the_queue_of_a_replica_that_is_being_stopped_goes_to_another_if_there_is_one(
    scene: Scene, another: bool
) -> None:
    if another:
        scene.register("d-1")
    waiting, at_work = scene.create(), scene.accepted()
    scene.registries["d-0"].heartbeat("d-0", {}, {"draining": 1, "stopping": 1}, LEASE_S)
    assert scene.janitor.sweep() == another
    assert scene.seen(waiting).route["decode_replica"] == ("d-1" if another else "d-0")
    assert scene.seen(at_work).attempt("decode") == 1
    assert scene.told(waiting) == []


def test_a_prefill_queue_that_nobody_serves_is_told_to_d(scene: Scene) -> None:
    handoff = scene.create()
    scene.enter(handoff, "decode")
    scene.die("p-0")
    assert scene.janitor.sweep() == 1
    seen = scene.seen(handoff)
    error = seen.error("prefill")
    assert error is not None
    assert (error.code, seen.begun("prefill"), seen.state) == (NoReplicaError.code, True, State.ADMITTED)
    assert scene.janitor.sweep() == 0


def test_two_deaths_are_a_quarantine(scene: Scene) -> None:
    scene.register("d-1")
    handoff = scene.accepted()
    scene.die("p-0")
    scene.janitor.sweep()
    scene.die("d-0")
    scene.janitor.sweep()
    assert scene.told(handoff) == ["quarantined"]
    assert scene.ledger.live() == []
    record = scene.ledger.load(handoff)
    assert record is not None
    assert record.number("lost_workers") == 2


# -- owners and deadlines


def test_nobody_works_for_an_api_process_that_is_gone(scene: Scene) -> None:
    waiting, at_work = scene.create(owner="dead"), scene.create(owner="dead")
    scene.enter(at_work, "prefill")
    assert scene.janitor.sweep() == 2
    assert (scene.seen(waiting).state, scene.seen(at_work).state) == (State.CANCELLED, State.CANCELLING)
    assert scene.client.hget(keys.HandoffKeys(at_work).record, "reason") == b"owner-gone"
    assert scene.ledger.live() == [at_work]
    scene.ledger.leave(at_work, "prefill", 1)
    assert scene.seen(at_work).state is State.CANCELLED
    assert scene.ledger.live() == []


@pytest.mark.parametrize(("age_s", "begun", "ended"), [(50, False, False), (70, False, True), (70, True, False)])
def test_the_queue_deadline_is_for_those_d_has_not_begun(scene: Scene, age_s: float, begun: bool, ended: bool) -> None:
    handoff = scene.accepted(age_s=age_s) if begun else scene.create(age_s=age_s)
    assert scene.janitor.sweep() == ended
    assert scene.told(handoff) == [DeadlineError.code] * ended
    if ended:
        (raw,) = scene.client.lrange(keys.HandoffKeys(handoff).tokens, 0, -1)
        error = channel.decode(raw).error
        assert error is not None
        assert error.message == "no decode worker took the request within 60 s"


@pytest.mark.parametrize(("age_s", "ended"), [(590, False), (610, True)])
def test_the_total_deadline_is_for_all(scene: Scene, age_s: float, ended: bool) -> None:
    handoff = scene.accepted(age_s=age_s)
    assert scene.janitor.sweep() == ended
    assert scene.seen(handoff).state is (State.FAILED if ended else State.ACCEPTED)
    assert scene.told(handoff) == [DeadlineError.code] * ended
    assert scene.ledger.live() == [handoff]  # its workers are still in: they hear of it, and the last one releases


def test_a_handoff_that_waits_for_a_dead_replica_does_not_wait_for_the_deadline(scene: Scene) -> None:
    waiting, at_work = scene.create(), scene.accepted()
    scene.die("d-0")
    scene.janitor.sweep()
    assert scene.told(waiting) == [NoReplicaError.code]
    assert scene.told(at_work) == [WorkerLostError.code]


# -- what is left over


@pytest.mark.parametrize("end", [State.FINISHED, State.FAILED, State.CANCELLED])
def test_an_ended_handoff_without_workers_is_released(scene: Scene, end: State) -> None:
    handoff = scene.create()
    scene.write(handoff, state=end)
    assert scene.janitor.sweep() == 1
    assert scene.ledger.live() == []
    assert scene.seen(handoff).state is end
    assert scene.janitor.sweep() == 0


def test_the_last_worker_out_may_release_too(scene: Scene) -> None:
    """It has left, and the janitor is there before its release: the trace is kept once, nothing comes back."""
    handoff = scene.create()
    scene.write(handoff, state=State.FINISHED)
    assert scene.janitor.sweep() == 1
    scene.ledger.release(handoff)
    assert [trace["handoff_id"] for trace in scene.ledger.recent(9)] == [handoff]
    scene.ledger.forget(handoff)
    scene.ledger.release(handoff)
    assert list(scene.client.scan_iter(f"cf:{{{handoff}}}:*")) == []
    assert scene.ledger.live() == []


def test_an_id_without_a_record_goes(scene: Scene) -> None:
    handoff = scene.create()
    scene.client.delete(keys.HandoffKeys(handoff).record)
    assert scene.janitor.sweep() == 1
    assert scene.ledger.live() == []
    assert list(scene.client.scan_iter(f"cf:{{{handoff}}}:*")) == []


@pytest.mark.parametrize("field", ["state", "at_created", "route"])
def test_a_record_that_cannot_be_read_keeps_nobody_else_waiting(scene: Scene, field: str) -> None:
    """A newer version may share the broker; the record's TTL ends what we do not understand."""
    odd, after = scene.create(age_s=70), scene.create(age_s=70)
    scene.write(odd, **{field: "odd"})
    assert scene.ledger.live() == [odd, after]
    assert scene.janitor.sweep() == 1
    assert scene.told(after) == [DeadlineError.code]
    assert scene.told(odd) == []


def test_credits_of_the_silent_are_reaped(redis_client: Redis) -> None:
    scene = Scene(redis_client, Settings(broker=BrokerSettings(payload_ttl_s=0.05)))
    handoff, pair = secrets.token_hex(16), Attempts(1, 1)
    stream.raise_fence(redis_client, handoff, pair, scene.settings.broker)
    assert Credit(redis_client, handoff, pair, scene.settings.broker).reserve(0, 10) is True
    assert stream.gauges(redis_client).in_flight_bytes == 10
    time.sleep(0.1)
    scene.janitor.sweep()
    assert stream.gauges(redis_client) == (0, 0, 0)


def test_many_janitors_at_once_end_a_handoff_once(scene: Scene) -> None:
    lost, orphan, late = scene.accepted(), scene.create(owner="dead"), scene.create(age_s=70, replica="p-0")
    scene.die("d-0")
    sweeps: list[Callable[[], int]] = [
        Janitor(scene.client, scene.client, scene.ledger, Registry(scene.client), scene.clock, scene.settings).sweep
        for _ in range(6)
    ]
    with ThreadPoolExecutor(len(sweeps)) as pool:
        assert sum(sweep.result(60) for sweep in [pool.submit(sweep) for sweep in sweeps]) >= 3
    assert scene.told(lost) == [WorkerLostError.code]
    assert scene.told(orphan) == ["cancelled"]
    assert scene.told(late) == [DeadlineError.code]


def test_one_more_that_is_well_costs_one_more_command(scene: Scene) -> None:
    """In one round trip with its likes: sweeps must not grow into a load of their own."""

    def commands() -> int:
        def sofar() -> int:
            return int(scene.client.info("stats")["total_commands_processed"])

        before = sofar()
        assert scene.janitor.sweep() == 0
        return sofar() - before

    scene.accepted()
    scene.janitor.sweep()  # looks at the queues too, as it does every half minute
    one = commands()
    for _ in range(20):
        scene.accepted()
    assert commands() == one + 20


# -- turns


def test_of_many_janitors_one_sweeps_in_a_moment(scene: Scene) -> None:
    lost = scene.create(owner="dead")
    others = [replace(scene.janitor, registry=Registry(scene.client)) for _ in range(3)]
    assert [janitor.sweep_in_turn() for janitor in (scene.janitor, *others)] == [1, 0, 0, 0]
    assert scene.seen(lost).state is State.CANCELLED
    second = scene.create(owner="dead")
    scene.client.delete(keys.SWEEP)  # as its expiry does
    assert [janitor.sweep_in_turn() for janitor in others] == [1, 0, 0]
    assert scene.seen(second).state is State.CANCELLED
    assert 0 < scene.client.pttl(keys.SWEEP) <= TURN_MS


def test_a_full_broker_keeps_nobody_from_sweeping(scene: Scene) -> None:
    lost = scene.create(owner="dead")
    scene.client.config_set("maxmemory", 1)
    assert scene.janitor.sweep_in_turn() == 1
    assert scene.seen(lost).state is State.CANCELLED
