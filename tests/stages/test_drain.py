"""The frame around both stages: whatever happens inside, the worker leaves and the ledger knows why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.broker import keys
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.record import Role
from pipeline.errors import (
    BrokerError,
    ContractMismatchError,
    EngineError,
    HandoffCancelledError,
    PeerError,
    StaleAttemptError,
)
from pipeline.handoff import State
from pipeline.request import Request
from pipeline.stages import drain
from pipeline.stages.drain import Part, Services, require_wanted, taking_part
from tests.stages.fake import CONTRACT
from tests.stages.stand import Stand, eventually, outcome

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])


@ROLES
def test_it_enters_and_leaves_with_its_marks(stand: Stand, role: Role) -> None:
    request = stand.open()
    with taking_part(stand.services(role), request.handoff_id, role) as part:
        assert (part.role, part.attempt, part.handoff_id) == (role, 1, request.handoff_id)
        assert part.record.request == part.request == request
        assert stand.seen(request).worker(role) == stand.services(role).worker
        assert stand.state(request) is State.ADMITTED
        assert stand.services(role).signals.active() == [request.handoff_id]
        part.fields["pages"] = 7
    left = stand.seen(request)
    assert (left.worker(role), left.error(role), left.state) == (None, None, State.ADMITTED)
    assert stand.field(request, "pages") == "7"
    assert stand.services(role).signals.active() == []


def test_the_first_mark_counts_and_is_the_brokers_time(stand: Stand) -> None:
    request = stand.open()
    with taking_part(stand.d_services, request.handoff_id, "decode") as part:
        before_s = stand.client.time()[0]
        part.mark("accepted")
        first = part.fields["at_accepted"]
        part.mark("accepted")
        assert part.fields == {"decode_replica": "d-0", "at_accepted": first}
        assert stand.field(request, "at_accepted") is None
        part.flush()
        assert stand.field(request, "at_accepted") == str(first)
    assert before_s * 1000 - 50 <= float(first) <= (stand.client.time()[0] + 1) * 1000 + 50


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineError("no"), "engine_failed", "no"),
        (ValueError("odd"), "internal_error", "ValueError: odd"),
    ],
)
@ROLES
def test_ps_failure_is_ds_to_judge_and_ds_ends_it(
    stand: Stand, role: Role, error: Exception, code: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = stand.open()
    with pytest.raises(type(error), match=str(error)), taking_part(stand.services(role), request.handoff_id, role):
        raise error
    left = stand.seen(request)
    assert left.worker(role) is None
    told = left.error("prefill") if role == "prefill" else stand.log(request)[-1].error
    assert told is not None
    assert (told.code, told.message) == (code, message)
    assert left.state is (State.ADMITTED if role == "prefill" else State.FAILED)
    bugs = [entry for entry in caplog.records if entry.name == "pipeline.stages.drain" and entry.exc_info]
    assert [entry.levelno for entry in bugs] == ([logging.ERROR] if code == "internal_error" else [])


def _take_part(taking: Services, request: Request, role: Role, work: Callable[[Part], None]) -> None:
    with taking_part(taking, request.handoff_id, role) as part:
        work(part)


def _cancelled(stand: Stand, request: Request) -> Callable[[Part], None]:
    def work(part: Part) -> None:
        stand.cancel(request)
        part.watch.look()
        part.check()

    return work


def _never(part: Part) -> None:
    raise AssertionError("the work began")


@ROLES
def test_a_cancelled_part_drains_before_it_leaves(stand: Stand, role: Role) -> None:
    request = stand.open()
    other: Role = "decode" if role == "prefill" else "prefill"
    stand.ledger.enter(request.handoff_id, other, stand.services(other).worker)
    with pytest.raises(HandoffCancelledError):
        _take_part(stand.services(role), request, role, _cancelled(stand, request))
    left = stand.seen(request)
    assert (left.state, left.worker(role), left.error(role)) == (State.DRAINING, None, None)


@ROLES
def test_the_last_one_out_of_a_cancelled_handoff_ends_it(stand: Stand, role: Role) -> None:
    request = stand.open()
    with pytest.raises(HandoffCancelledError):
        _take_part(stand.services(role), request, role, _cancelled(stand, request))
    assert stand.state(request) is State.CANCELLED
    assert stand.remains(request) == []


@ROLES
def test_a_stale_part_is_no_failure(stand: Stand, role: Role) -> None:
    request = stand.open()

    def work(part: Part) -> None:
        stand.supersede(request, role, "d-0@2")
        raise StaleAttemptError("another one has it")

    with pytest.raises(StaleAttemptError):
        _take_part(stand.services(role), request, role, work)
    left = stand.seen(request)
    assert (left.state, left.worker(role), left.error(role)) == (State.ADMITTED, "d-0@2", None)
    assert stand.log(request) == []


@pytest.mark.parametrize(("role", "code"), [("prefill", "worker_lost"), ("decode", None)])
def test_a_part_that_is_abandoned_leaves_the_handoff_as_it_is(stand: Stand, role: Role, code: str | None) -> None:
    """D is told that its P has gone; that D has gone, the janitor sees."""
    request = stand.open()

    def work(part: Part) -> None:
        part.services.signals.abandon()
        part.check()

    with pytest.raises(HandoffCancelledError):
        _take_part(stand.services(role), request, role, work)
    left = stand.seen(request)
    error = left.error(role)
    assert (left.state, left.worker(role), error and error.code) == (State.ADMITTED, None, code)


@ROLES
def test_workers_of_two_wire_versions_refuse_each_other_by_name(stand: Stand, role: Role) -> None:
    """As at a rolling upgrade: before a byte moves, and with the word that says what differs."""
    request = stand.open()
    newer = replace(stand.services(role), contract=replace(CONTRACT, wire_version=CONTRACT.wire_version + 1))
    with pytest.raises(ContractMismatchError, match=r"wire_version \(2 here, 1 there\)") as caught:
        _take_part(newer, request, role, _never)
    assert caught.value.retryable is False
    names = keys.HandoffKeys(request.handoff_id)
    assert stand.client.exists(names.stream, names.fence, names.credits) == 0
    assert stand.seen(request).accept is None


@ROLES
def test_a_contract_mismatch_names_the_field(stand: Stand, role: Role) -> None:
    request = stand.open()
    ours = replace(stand.services(role), contract=replace(CONTRACT, weights="others"))
    with pytest.raises(ContractMismatchError, match=r"weights \(others here, w there\)"):
        _take_part(ours, request, role, _never)
    left = stand.seen(request)
    told = left.error("prefill") if role == "prefill" else stand.log(request)[-1].error
    assert told is not None
    assert (told.code, told.retryable) == ("contract_mismatch", False)


@ROLES
def test_no_work_for_a_handoff_whose_owner_is_gone(stand: Stand, role: Role) -> None:
    request = stand.open(owned=False)
    with pytest.raises(HandoffCancelledError, match="is gone"):
        _take_part(stand.services(role), request, role, _never)
    assert stand.state(request) is State.CANCELLED
    assert stand.remains(request) == []


@pytest.mark.parametrize("state", [State.COMMITTED, State.DECODING])
def test_p_is_wanted_until_d_has_every_page(stand: Stand, state: State) -> None:
    request = stand.open()
    require_wanted(stand.seen(request))
    with taking_part(stand.p_services, request.handoff_id, "prefill") as part:
        part.check()
        stand.write(request, "state", state)
        part.watch.look()
        with pytest.raises(StaleAttemptError, match="needs no page"):
            part.check()
        Part(part.services, "decode", 1, part.record, request, part.watch).check()  # D itself is not meant


def test_p_is_wanted_until_d_recomputes(stand: Stand) -> None:
    request = stand.open()
    stand.write(request, "recomputed", "peer_error")
    with pytest.raises(StaleAttemptError):
        require_wanted(stand.seen(request))


def test_d_asks_whether_p_has_failed_only_where_it_needs_p(stand: Stand) -> None:
    request = stand.open()
    attempt, _ = stand.ledger.enter(request.handoff_id, "prefill", "p@1")
    with taking_part(stand.d_services, request.handoff_id, "decode") as part:
        part.require_prefill()
        stand.ledger.leave(request.handoff_id, "prefill", attempt, error=ErrorInfo.of(EngineError("no")))
        part.watch.look()
        part.check()
        with pytest.raises(PeerError, match="prefill failed: no"):
            part.require_prefill()
        stand.supersede(request, "prefill", "p@1")
        part.watch.look()
        part.require_prefill()


def test_insisting_ends_and_says_so(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "INSIST_S", 0.0)
    calls = []

    def step() -> None:
        calls.append(1)
        raise BrokerError("away")

    with pytest.raises(BrokerError, match="away"):
        drain.insist(step)
    assert len(calls) <= 2


def test_insisting_repeats_nothing_but_a_broker_error(stand: Stand) -> None:
    answers = iter([BrokerError("away"), EngineError("other")])

    def step() -> None:
        raise next(answers)

    with pytest.raises(EngineError, match="other"):
        drain.insist(step)


def test_the_broker_is_away_when_it_enters(stand: Stand) -> None:
    request = stand.open()
    stand.hop.cut()
    job = stand.prefill(request)
    eventually(lambda: stand.hop.refused >= 4, "it insists")
    stand.hop.mend()
    outcome(stand.decode(request))
    assert outcome(job)["outcome"] == "sent"
    assert stand.seen(request).number("prefill_attempt") == 1
    assert stand.remains(request) == []
