"""A decode replica with a page server of its own: pages cross there and nowhere else, and its death is told apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from redis import Redis

from pipeline.broker import keys, stream
from pipeline.broker.address import Address
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer
from pipeline.broker.registry import Registry, Replica
from pipeline.errors import HandoffCancelledError, PageServerError, StaleAttemptError
from pipeline.handoff import Attempts, State
from pipeline.request import Request
from pipeline.settings import MIB
from tests.ports import free_port
from tests.stages.fake import CONTRACT, PAGE_BYTES, FakeAdmission, pages, text
from tests.stages.stand import (
    FINISHED,
    LIMITS,
    PAGES_PASSWORD,
    Outcome,
    Stand,
    eventually,
    failure,
    outcome,
    quiet,
    same,
)

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
FAIL = LIMITS.model_copy(update={"failure_policy": "fail"})


class Beside:
    """D's page server, behind a password, and the tests' own client of it."""

    def __init__(self, directory: Path) -> None:
        self.server = EmbeddedServer(directory, MIB, port=free_port())
        self.url = self.server.start()
        self.client: Redis = connect(self.url)
        self.client.config_set("requirepass", PAGES_PASSWORD)
        self.address = Address(self.url, 4 * PAGE_BYTES)

    def kill(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    found = Beside(tmp_path)
    with connect(f"redis://:{PAGES_PASSWORD}@{found.url.removeprefix('redis://')}") as client:
        found.client.close()
        found.client = client
        yield found
        found.close()


@pytest.fixture
def stand(server_url: str, redis_client: Redis, beside: Beside) -> Iterator[Stand]:
    with Stand(server_url, address=beside.address) as found:
        yield found


@pytest.fixture
def strict(server_url: str, redis_client: Redis, beside: Beside) -> Iterator[Stand]:
    """Policy `fail`."""
    with Stand(server_url, FAIL, FAIL, address=beside.address) as found:
        yield found


def _killed_in_the_midst(stand: Stand, beside: Beside) -> tuple[Request, Future[Outcome]]:
    """A handoff, and D's job of it, whose page server dies when one page is in."""
    request = stand.open()
    stand.d.set(imports=1)
    _, job = stand.begin(request)
    stand.await_state(request, State.STREAMING)
    beside.kill()
    stand.d.set(imports=1 << 30)
    return request, job


def _local(stand: Stand) -> list[bool]:
    return [work.local for work in stand.d.works if isinstance(work, FakeAdmission)]


def test_pages_cross_there_and_not_the_broker(stand: Stand, beside: Beside) -> None:
    request = stand.open()
    stand.d.set(imports=1)
    p, d = stand.begin(request)
    eventually(lambda: len(stand.d.imported) == 1, "a page")
    names = keys.HandoffKeys(request.handoff_id)
    eventually(lambda: beside.client.exists(names.credits, names.fence, names.stream) == 3, "the transfer")
    assert stand.client.exists(names.credits, names.fence, names.stream) == 0
    assert stream.gauges(beside.client).in_flight_bytes > 0
    assert stream.gauges(stand.client) == (0, 0, 0)
    stand.d.set(imports=1 << 30)
    assert outcome(d) == FINISHED
    assert outcome(p)["pages"] == 4
    assert same(stand.d.imported, pages(request))
    assert stand.said(request) == list(text(request))
    trace = stand.ledger.ended(request.handoff_id)
    assert trace is not None
    assert trace["page_server"] == beside.url
    quiet(stand, request)
    assert list(beside.client.scan_iter("*")) == [keys.BUDGET_TOTAL.encode()]
    assert stream.gauges(beside.client) == (0, 0, 0)


def test_the_record_says_where_and_holds_no_secret(stand: Stand, beside: Beside) -> None:
    request = stand.open()
    stand.d.set(imports=0)
    stand.begin(request)
    eventually(lambda: stand.seen(request).accept, "accept")
    assert stand.seen(request).page_server == beside.address
    record = str(stand.client.hgetall(keys.HandoffKeys(request.handoff_id).record))
    assert beside.url in record
    assert PAGES_PASSWORD not in record
    stand.cancel(request)


def test_its_own_budget_holds(stand: Stand, beside: Beside) -> None:
    """Four pages, of which one handoff may have two in flight; the broker's budget is of eight."""
    request = stand.open(tokens=64 * 12)
    stand.d.set(imports=0)
    stand.begin(request)
    eventually(lambda: stream.gauges(beside.client) == (2 * PAGE_BYTES, 1, 1), "two pages in flight")
    other = stand.open(tokens=64 * 12)
    stand.begin(other)
    eventually(lambda: stream.gauges(beside.client) == (4 * PAGE_BYTES, 2, 2), "four pages in flight")
    third = stand.open(tokens=64 * 12)
    stand.begin(third)
    eventually(lambda: stream.gauges(beside.client).waiters == 3, "the third in line")
    assert stream.gauges(beside.client) == (4 * PAGE_BYTES, 3, 2)
    for each in (request, other, third):
        stand.cancel(each)
    eventually(lambda: stream.gauges(beside.client) == (0, 0, 0), "nothing in flight")
    assert stand.remains(request) == []


def test_killed_in_the_midst_d_computes_the_prompt_itself(stand: Stand, beside: Beside) -> None:
    request, job = _killed_in_the_midst(stand, beside)
    assert outcome(job) == FINISHED
    assert stand.said(request) == list(text(request))
    assert stand.seen(request).recomputed == "page_server_unavailable"
    assert _local(stand)[-1] is True
    quiet(stand, request)


def test_killed_in_the_midst_under_policy_fail(strict: Stand, beside: Beside) -> None:
    """Clear, retryable, and it names the server."""
    request, job = _killed_in_the_midst(strict, beside)
    error = failure(job)
    assert isinstance(error, PageServerError)
    assert beside.url in str(error)
    told = strict.log(request)[-1].error
    assert told is not None
    assert (told.code, told.retryable, told.http_status) == ("page_server_unavailable", True, 503)
    quiet(strict, request)


def test_down_before_accept(stand: Stand, beside: Beside) -> None:
    request = stand.open()
    beside.kill()
    _, job = stand.begin(request)
    assert outcome(job) == FINISHED
    assert stand.seen(request).recomputed == "page_server_unavailable"
    quiet(stand, request)


def test_a_wrong_password_says_which_setting(strict: Stand, beside: Beside) -> None:
    beside.client.config_set("requirepass", "another")
    request = strict.open()
    _, job = strict.begin(request)
    with pytest.raises(
        PageServerError, match=r"refused our credentials: check user and password in broker\.pages_user"
    ):
        job.result(60)
    assert PAGES_PASSWORD not in str(strict.log(request)[-1].error)


def test_a_restart_in_the_midst_is_got_over(stand: Stand, beside: Beside) -> None:
    """It comes back empty, at once: another attempt of P sends what D still needs."""
    Registry(stand.client).register(Replica("p-0", "fake", "prefill", "m", CONTRACT, 4, 1), 600)
    request = stand.open(tokens=64 * 9)
    stand.d.set(imports=1)
    _, job = stand.begin(request)
    stand.await_state(request, State.STREAMING)
    beside.client.flushall()
    stand.d.set(imports=1 << 30)
    eventually(lambda: stand.seen(request).attempt("prefill") == 2, "another attempt")
    stand.prefill(request)
    assert outcome(job) == FINISHED
    assert same(stand.d.imported, pages(request))
    assert stand.seen(request).recomputed is None
    quiet(stand, request)


def test_cancel_leaves_nothing_on_either(stand: Stand, beside: Beside) -> None:
    request = stand.open(tokens=64 * 9)
    stand.d.set(imports=1)
    stand.begin(request)
    eventually(lambda: stream.gauges(beside.client).waiters == 1, "P waits for credit")
    stand.cancel(request)
    assert stand.remains(request) == []
    assert list(beside.client.scan_iter("*")) == [keys.BUDGET_TOTAL.encode()]
    assert stream.gauges(beside.client) == (0, 0, 0)


@pytest.mark.parametrize("shared", [True, False])
def test_a_takeover_leaves_nothing_where_the_lost_one_took_its_pages(
    stand: Stand, beside: Beside, shared: bool
) -> None:
    """`shared`: the next D has the same page server, on which its own transfer may have begun."""
    registry = Registry(stand.client)
    registry.register(Replica("p-0", "fake", "prefill", "m", CONTRACT, 4, 1), 600)
    mine = beside.address if shared else None
    registry.register(Replica("d-1", "fake", "decode", "m", CONTRACT, 4, 1, pages=mine), 600)
    request = stand.open(tokens=64 * 9)
    stand.d.set(imports=0)
    p, d = stand.begin(request)
    eventually(lambda: stream.gauges(beside.client).waiters == 1, "pages in flight")
    assert stand.d_services.dispatch.take_over(request.handoff_id, 1, {"decode": "d-0@1"})
    seen = stand.seen(request)
    assert (seen.page_server, seen.accept and seen.accept.decode_attempt, seen.attempt("decode")) == (None, 1, 2)
    assert isinstance(failure(p), StaleAttemptError)
    assert isinstance(failure(d), StaleAttemptError | HandoffCancelledError)
    assert stream.gauges(beside.client).in_flight_bytes == (2 * PAGE_BYTES if shared else 0)
    if shared:  # until its own accept says so
        stream.raise_fence(beside.client, request.handoff_id, Attempts(2, 2), stand.settings.broker)
    assert stream.gauges(beside.client) == (0, 0, 0)


def test_a_stale_d_places_nothing(stand: Stand, beside: Beside) -> None:
    request = stand.open()
    stand.supersede(request, "decode")
    with pytest.raises(StaleAttemptError):
        stand.ledger.place(request.handoff_id, 1, beside.address)
    assert stand.seen(request).page_server is None
    with pytest.raises(HandoffCancelledError, match="gone"):
        stand.ledger.place("0" * 32, 1, beside.address)


def test_release_of_a_handoff_whose_server_is_gone(stand: Stand, beside: Beside) -> None:
    """What is left on the control broker goes all the same, and at once the second time."""
    request = stand.open()
    stand.ledger.enter(request.handoff_id, "decode", "d-0@1")
    stand.ledger.place(request.handoff_id, 1, beside.address)
    stream.raise_fence(beside.client, request.handoff_id, Attempts(1, 1), stand.settings.broker)
    beside.kill()
    stand.ledger.release(request.handoff_id)
    assert stand.ledger.live() == []
