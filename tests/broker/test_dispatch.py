"""Dispatch on real servers: who goes on when a transfer or a worker is lost, and what happens to old jobs."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from pipeline.broker import dispatch, keys
from pipeline.broker.channel import ErrorInfo, TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.job import open_queue, text
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.queue import DECODE_JOB, PREFILL_JOB, JobSpec
from pipeline.broker.record import ROLES, Accept, Record
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.scripts import Scripts
from pipeline.contract import Contract
from pipeline.errors import HandoffCancelledError, NoReplicaError, PeerError, QuarantinedError, StaleAttemptError
from pipeline.handoff import Attempts, Event, State
from pipeline.request import FEATURES, Request, Sampling
from pipeline.routing import Route
from pipeline.settings import HandoffSettings, Settings

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
SHORT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=8)
VLLM, MLX = (f"prefill.{engine}.{CONTRACT.digest[:8]}" for engine in ("vllm", "mlx"))
ROUTE = Route("vllm", VLLM, "mac-0", "decode.mac-0", "mlx")
SAMPLING = Sampling(max_tokens=5)
BROKEN = ErrorInfo.of(PeerError("broken"))
LEASE_S = 60.0


class Scene:
    """A broker and replicas: `box-*` prefill on vLLM, `mac-*` decode on MLX, others as told."""

    def __init__(self, client: Redis, **limits: int) -> None:
        self.client = client
        settings = Settings(handoff=HandoffSettings(**limits))
        self.ledger = Ledger(client, PageServers(client, settings.broker), BrokerClock(client), settings)
        self.dispatch = Dispatch(client, self.ledger, Registry(client), settings)
        self.register("box-0", "vllm", "prefill")
        self.register("mac-0", "mlx", "decode")

    def register(
        self,
        name: str,
        engine: str,
        role: str,
        contract: Contract = CONTRACT,
        first_token: bool = False,
        features: frozenset[str] = frozenset(),
    ) -> None:
        replica = Replica(name, engine, role, "tiny", contract, slots=4, started_ms=0)
        replica = replace(replica, can_prefill=not first_token, needs_first_token=first_token, features=features)
        Registry(self.client).register(replica, LEASE_S)

    def die(self, *names: str) -> None:
        for name in names:
            self.client.delete(keys.replica(name))

    def begin(self, route: Route = ROUTE, sampling: Sampling = SAMPLING) -> str:
        request = Request(secrets.token_hex(16), (1, 2, 3), sampling)
        self.ledger.own("api", LEASE_S)
        assert Scripts(self.client).run(*self.dispatch.opening(request, CONTRACT, route, "api", "tiny")) == 1
        return request.handoff_id

    def at_work(self, tokens: int = 0, sampling: Sampling = SAMPLING) -> str:
        """P and D are in; D has emitted `tokens`."""
        handoff = self.begin(sampling=sampling)
        self.ledger.enter(handoff, "prefill", "box-0@1")
        self.ledger.enter(handoff, "decode", "mac-0@1")
        self.ledger.accept(handoff, Accept(1, 1, 0), {})
        if tokens:
            self.ledger.advance(handoff, "decode", 1, Event.COMMIT)
            self.ledger.emit(handoff, 1, TokenEntry(0, tuple(range(100, 100 + tokens))))
        return handoff

    def record(self, handoff: str) -> Record:
        found = self.ledger.load(handoff)
        assert found is not None
        return found

    def queued(self, handoff: str) -> list[tuple[str, str]]:
        """(queue, function) of every job of it that waits."""
        names = [text(key).removeprefix("rq:queue:") for key in self.client.smembers("rq:queues")]
        jobs = [(name, job) for name in sorted(names) for job in open_queue(self.client, name).get_jobs()]
        return [(name, job.func_name or "") for name, job in jobs if list(job.args) == [handoff]]


@pytest.fixture
def scene(redis_client: Redis) -> Scene:
    return Scene(redis_client)


# -- first jobs


def test_a_handoff_begins_with_a_job_for_each(scene: Scene) -> None:
    handoff = scene.begin()
    assert scene.queued(handoff) == [("decode.mac-0", DECODE_JOB), (VLLM, PREFILL_JOB)]
    record = scene.record(handoff)
    assert (record.attempt("decode"), record.attempt("prefill")) == (1, 1)
    assert (record.begun("decode"), record.begun("prefill")) == (False, False)


def test_a_local_handoff_has_one_job() -> None:
    meta = {"model": "tiny", "route": "local:mlx"}
    route = Route(None, None, "mac-0", "decode.mac-0", "mlx")
    assert dispatch.jobs("ab", route, "tiny") == [JobSpec("decode.mac-0", DECODE_JOB, "ab", meta)]


# -- P again


def test_another_p_is_asked_and_the_older_attempt_is_fenced(scene: Scene) -> None:
    handoff = scene.at_work()
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN) is True
    record = scene.record(handoff)
    assert (record.state, record.attempt("prefill"), record.attempt("decode")) == (State.ACCEPTED, 2, 1)
    assert (record.worker("prefill"), record.worker("decode"), record.error("prefill")) == (None, "mac-0@1", None)
    assert (record.number("resent"), record.fields["resent_for"]) == (1, "peer_error")
    assert scene.queued(handoff).count((VLLM, PREFILL_JOB)) == 2  # the first was begun here without its queue
    assert scene.ledger.enter(handoff, "prefill", "box-1@1")[0] == 2
    scene.ledger.leave(handoff, "prefill", 1, error=BROKEN)
    assert scene.record(handoff).error("prefill") is None
    with pytest.raises(HandoffCancelledError, match="begun by another"):
        scene.ledger.enter(handoff, "prefill", "box-0@1")


def test_where_its_engine_is_gone_another_engine_is_asked(scene: Scene) -> None:
    handoff = scene.at_work()
    scene.register("mac-1", "mlx", "both")
    scene.die("box-0")
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN) is True
    assert scene.record(handoff).route["prefill_queue"] == MLX
    assert (MLX, PREFILL_JOB) in scene.queued(handoff)


def test_elsewhere_means_another_engine(scene: Scene) -> None:
    handoff = scene.at_work()
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN, elsewhere=True) is False
    scene.register("mac-1", "mlx", "prefill")
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN, elsewhere=True) is True
    assert scene.record(handoff).route["prefill_engine"] == "mlx"


def test_d_alone_is_nobody_to_send(scene: Scene) -> None:
    scene.register("mac-9", "mlx", "both")
    handoff = scene.begin(Route("vllm", VLLM, "mac-9", "decode.mac-9", "mlx"))
    scene.die("box-0")
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN) is False
    assert scene.record(handoff).attempt("prefill") == 1


def test_retries_end(redis_client: Redis) -> None:
    scene = Scene(redis_client, retries=1)
    handoff = scene.at_work()
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN) is True
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN) is False  # of an attempt that is over
    assert scene.dispatch.resend(handoff, Attempts(2, 1), BROKEN) is False


@pytest.mark.parametrize("event", [Event.COMMIT, Event.CANCEL, Event.FAIL])
def test_nothing_is_sent_again_when_nothing_is_wanted(scene: Scene, event: Event) -> None:
    handoff = scene.at_work()
    if event is Event.CANCEL:
        scene.ledger.cancel(handoff, "client")
    elif event is Event.FAIL:
        scene.ledger.fail(handoff, BROKEN)
    else:
        scene.ledger.advance(handoff, "decode", 1, event)
    assert scene.dispatch.resend(handoff, Attempts(1, 1), BROKEN) is False


# -- another D


@pytest.mark.parametrize("tokens", [0, 3])
def test_another_d_takes_over_with_a_p_of_its_own(scene: Scene, tokens: int) -> None:
    scene.register("mac-1", "mlx", "decode")
    handoff = scene.at_work(tokens)
    scene.die("mac-0")
    assert scene.dispatch.take_over(handoff, 1, {"decode": "mac-0@1"}) is True
    record = scene.record(handoff)
    assert (record.state, record.attempt("decode"), record.attempt("prefill")) == (State.CREATED, 2, 2)
    assert (record.worker("decode"), record.worker("prefill")) == (None, None)
    assert record.route == {
        "prefill_engine": "vllm",
        "prefill_queue": VLLM,
        "decode_replica": "mac-1",
        "decode_queue": "decode.mac-1",
        "decode_engine": "mlx",
    }
    assert (record.resumed, record.number("taken_over"), record.number("lost_workers")) == (tokens, 1, 1)
    request = scene.ledger.request_of(record)
    assert request.token_ids == (1, 2, 3, 100, 101, 102)[: 3 + tokens]
    assert request.sampling.max_tokens == 5 - tokens
    assert ("decode.mac-1", DECODE_JOB) in scene.queued(handoff)
    assert scene.ledger.enter(handoff, "decode", "mac-1@1")[0] == 2


def test_the_zombie_emits_nothing_from_the_moment_of_the_takeover(scene: Scene) -> None:
    scene.register("mac-1", "mlx", "decode")
    handoff = scene.at_work(2)
    scene.dispatch.take_over(handoff, 1, {})
    with pytest.raises(StaleAttemptError):
        scene.ledger.emit(handoff, 1, TokenEntry(2, (9,)))
    with pytest.raises(StaleAttemptError):
        scene.ledger.emit(handoff, 1, TokenEntry(2, (9,), finish="stop"))
    assert scene.ledger.fail(handoff, BROKEN, 1) is False
    assert scene.record(handoff).number("tokens") == 2


def test_the_old_jobs_of_a_dead_replica_find_nothing_to_do(scene: Scene) -> None:
    """It comes back under its name, and finds its queue as it was."""
    scene.register("mac-1", "mlx", "decode")
    handoff = scene.begin()
    scene.die("mac-0")
    scene.dispatch.take_over(handoff, 1, {})
    with pytest.raises(HandoffCancelledError, match="with another replica"):
        scene.ledger.enter(handoff, "decode", "mac-0@2")
    assert scene.ledger.enter(handoff, "decode", "mac-1@1")[0] == 2
    assert scene.ledger.enter(handoff, "prefill", "box-0@1")[0] == 2  # by the old job or the new: one of them
    with pytest.raises(HandoffCancelledError, match="begun by another"):
        scene.ledger.enter(handoff, "prefill", "box-0@1")


@pytest.mark.parametrize(("engine", "first_token"), [("sglang", True), ("vllm", False)])
def test_a_d_of_another_engine_gets_what_it_needs(scene: Scene, engine: str, first_token: bool) -> None:
    scene.register("other", engine, "decode", first_token=first_token)
    handoff = scene.at_work()
    scene.die("mac-0")
    scene.dispatch.take_over(handoff, 1, {})
    record = scene.record(handoff)
    assert (record.route["decode_replica"], record.request.first_token) == ("other", first_token)
    assert record.route["prefill_queue"] == VLLM


def test_d_computes_the_prompt_where_no_p_is_left(scene: Scene) -> None:
    scene.register("mac-1", "mlx", "both")
    handoff = scene.at_work()
    scene.die("mac-0", "box-0")
    scene.dispatch.take_over(handoff, 1, {"decode": "mac-0@1"})
    record = scene.record(handoff)
    assert (record.route["prefill_queue"], record.route["decode_replica"]) == (None, "mac-1")
    with pytest.raises(HandoffCancelledError, match="begun by another"):
        scene.ledger.enter(handoff, "prefill", "box-0@1")  # the job that still waits for a vLLM


def test_nobody_can_take_over(scene: Scene) -> None:
    scene.register("small", "mlx", "decode", SHORT)
    handoff = scene.begin(sampling=replace(SAMPLING, max_tokens=6))  # 3 + 6 tokens do not fit into 8
    scene.die("mac-0")
    with pytest.raises(NoReplicaError, match="no other decode replica"):
        scene.dispatch.take_over(handoff, 1, {})
    assert scene.record(handoff).state is State.CREATED
    assert scene.dispatch.take_over(scene.begin(), 1, {}) is True


@pytest.mark.parametrize("more", [{"n": 2}, {"grammar": "{}"}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}])
def test_an_answer_of_any_kind_is_continued(scene: Scene, more: dict[str, Any]) -> None:
    scene.register("mac-1", "mlx", "decode", features=frozenset(FEATURES))
    handoff = scene.at_work(1, replace(SAMPLING, **more))
    scene.die("mac-0")
    assert scene.dispatch.take_over(handoff, 1, {}) is True
    assert scene.record(handoff).resumed == 1


def test_who_takes_over_can_do_what_was_asked(scene: Scene) -> None:
    scene.register("mac-1", "mlx", "decode", features=frozenset({"penalties"}))
    handoff = scene.at_work(1, replace(SAMPLING, min_p=0.1))
    scene.die("mac-0")
    with pytest.raises(NoReplicaError, match="no other decode replica"):
        scene.dispatch.take_over(handoff, 1, {})


def test_takeovers_end(redis_client: Redis) -> None:
    scene = Scene(redis_client, retries=0)
    with pytest.raises(NoReplicaError, match="taken over 0 times already"):
        scene.dispatch.take_over(scene.at_work(), 1, {})


def test_one_that_lost_two_workers_is_quarantined(scene: Scene) -> None:
    scene.register("mac-1", "mlx", "decode")
    handoff = scene.at_work()
    scene.die("mac-0")
    assert scene.dispatch.take_over(handoff, 1, {"decode": "mac-0@1"}) is True
    scene.ledger.enter(handoff, "decode", "mac-1@1")
    with pytest.raises(QuarantinedError, match="2 workers died") as caught:
        scene.dispatch.take_over(handoff, 2, {"decode": "mac-1@1"})
    assert (caught.value.http_status, caught.value.retryable) == (500, False)
    scene.ledger.leave(handoff, "prefill", 2, fields={"lost_prefill_2": "box-0@1"})
    with pytest.raises(QuarantinedError):
        scene.dispatch.resend(handoff, Attempts(2, 2), BROKEN)


def test_one_that_served_both_roles_died_once(scene: Scene) -> None:
    scene.register("mac-1", "mlx", "decode")
    handoff = scene.begin()
    for role in ROLES:
        scene.ledger.enter(handoff, role, "mac-0@1")
    scene.die("mac-0")
    assert scene.dispatch.take_over(handoff, 1, dict.fromkeys(ROLES, "mac-0@1")) is True
    assert scene.record(handoff).number("lost_workers") == 1
    assert scene.record(handoff).lost_with({"lost_decode_2": "mac-1@1"}) == 2


def test_of_many_who_notice_at_once_one_acts(scene: Scene) -> None:
    scene.register("mac-1", "mlx", "decode")
    handoff = scene.at_work()
    scene.die("mac-0")
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: scene.dispatch.take_over(handoff, 1, {"decode": "mac-0@1"}), range(6)))
    assert sorted(done) == [False] * 5 + [True]
    record = scene.record(handoff)
    assert (record.attempt("decode"), record.number("taken_over"), record.number("lost_workers")) == (2, 1, 1)
    assert scene.queued(handoff).count(("decode.mac-1", DECODE_JOB)) <= 1
