"""Prompts that begin alike and come in together: who waits for whom, for how long, and that nobody waits in vain."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline import prefix
from pipeline.engines.base import Admission
from pipeline.engines.reference.engine import ReferenceEngine
from pipeline.errors import HandoffCancelledError
from pipeline.page import page_count
from pipeline.request import Request, Sampling
from pipeline.sample import tiny
from pipeline.settings import EngineSettings
from pipeline.stages.crowd import PATIENCE_S, Crowd, CrowdEngine
from tests.stages.fake import CONTRACT, FakeAdmission, FakeEngine, pages
from tests.stages.stand import eventually

GREEDY = Sampling(max_tokens=2, temperature=0.0)
BASE = tuple(range(3, 3 + 5 * 64))


def _nothing() -> None:
    pass


def _request(common_pages: int, tail: int, tokens: int = 40, salt: str = "") -> Request:
    """`common_pages` pages that others begin with as well, then tokens of its own."""
    own = tuple(400 + (tail * 31 + i) % 500 for i in range(tokens))
    return Request(secrets.token_hex(16), BASE[: 64 * common_pages] + own, GREEDY, salt)


def _keys(*pages: int) -> list[bytes]:
    """Addresses of pages with one token each in place of 64."""
    return [prefix.chain(b"", [p for one in pages[: i + 1] for p in [one] * 64])[-1] for i in range(len(pages))]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("first", "held", "came", "ours", "waits"),
    [
        ((1, 2, 3), None, 0, (1, 2, 3), True),  # the same prompt, which waits for room
        ((1, 2, 3), 0, 0, (1, 2, 9), True),
        ((1, 2, 3), 2, 0, (1, 2, 9), False),  # the engine held what both have
        ((1, 2, 3), 0, 0, (7, 2, 3), False),  # nothing in common: addresses are chained
        ((1, 2, 3, 4), 0, 0, (1, 9), False),  # three pages too many for one
        ((1, 2, 3, 4), 0, 2, (1, 9), True),  # two of them have come
        ((1,), 0, 0, (), False),
        ((), 0, 0, (1,), False),
    ],
)
def test_who_is_worth_waiting_for(
    first: tuple[int, ...], held: int | None, came: int, ours: tuple[int, ...], waits: bool
) -> None:
    clock = Clock()
    crowd = Crowd(now_s=clock)
    lead, _ = crowd.join(_keys(*first), 10.0, _nothing)
    if held is not None:
        crowd.admitted(lead, held, 0)
    for _ in range(came):
        crowd.moved(lead)
    looked: list[int] = []

    def check() -> None:
        looked.append(1)
        clock.now_s += 20.0  # past the deadline of a wait

    crowd.join(_keys(*ours), 10.0, check)
    assert looked == [1] * waits
    assert crowd.size == 2


def test_one_that_stands_still_is_not_waited_for() -> None:
    clock = Clock()
    crowd = Crowd(now_s=clock)
    lead, _ = crowd.join(_keys(1, 2), 10.0, _nothing)
    crowd.admitted(lead, 0, 0)
    clock.now_s += PATIENCE_S - 0.1
    crowd.moved(lead)
    looked: list[float] = []

    def check() -> None:
        looked.append(clock.now_s)
        clock.now_s += PATIENCE_S / 2

    crowd.join(_keys(1, 2), 100.0, check)
    assert len(looked) == 2


def test_after_a_wait_in_vain_nobody_waits_for_a_while() -> None:
    clock = Clock()
    crowd = Crowd(now_s=clock)

    def served(held: int) -> tuple[int, int]:
        """Times looked, and pages expected, of one that comes while another one does."""
        first, _ = crowd.join(_keys(1, 2), 10.0, _nothing)
        crowd.admitted(first, 0, 0)
        looked = 0

        def check() -> None:
            nonlocal looked
            looked += 1
            crowd.leave(first, whole=True)

        second, expected = crowd.join(_keys(1, 2), 10.0, check)
        crowd.admitted(second, held, expected)
        for lead in (first, second):
            crowd.leave(lead, whole=True)
        return looked, expected

    assert served(held=2) == (1, 2)
    assert served(held=0) == (1, 2)  # this engine has kept nothing
    assert served(held=0) == (0, 0)
    clock.now_s += 61
    assert served(held=2) == (1, 2)
    assert crowd.size == 0


def test_a_failed_first_one_is_no_wait_in_vain() -> None:
    crowd = Crowd()
    first, _ = crowd.join(_keys(1), 10.0, _nothing)
    _, expected = crowd.join(_keys(1), 10.0, lambda: crowd.leave(first, whole=False))
    assert expected == 0


# -- around an engine


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def _admit(pool: ThreadPoolExecutor, engine: CrowdEngine, request: Request) -> Future[Admission]:
    return pool.submit(engine.admit, request)


def test_the_second_asks_for_room_once_the_first_has_its_token(pool: ThreadPoolExecutor) -> None:
    inner, crowd = FakeEngine(), Crowd()
    engine = CrowdEngine(inner, crowd)
    one, two = _request(3, 1), _request(3, 2)
    first = engine.admit(one)
    second = _admit(pool, engine, two)
    for page in pages(one):
        first.import_page(page)
    steps = first.decode()
    assert not second.done()
    assert len(inner.works) == 1
    next(iter(steps))
    second.result(60).close()
    assert [work.request for work in inner.works] == [one, two]
    first.close()
    assert crowd.size == 0


def test_the_next_one_leads_when_the_first_is_closed(pool: ThreadPoolExecutor) -> None:
    inner, crowd = FakeEngine(), Crowd()
    engine = CrowdEngine(inner, crowd)
    first = engine.admit(_request(3, 1))
    later = [_admit(pool, engine, _request(3, tail)) for tail in (2, 3)]
    first.close()
    eventually(lambda: sum(job.done() for job in later) == 1, "one of them admitted")
    next(job for job in later if job.done()).result().close()
    for job in later:
        job.result(60).close()
    assert crowd.size == 0
    assert len(inner.works) == 3


def test_what_ends_a_wait_leaves_nothing() -> None:
    inner, crowd = FakeEngine(), Crowd()
    engine = CrowdEngine(inner, crowd)
    first = engine.admit(_request(3, 1))

    def cancelled() -> None:
        raise HandoffCancelledError("gone")

    with pytest.raises(HandoffCancelledError):
        engine.admit(_request(3, 2), check=cancelled)
    assert crowd.size == 1
    first.close()
    assert crowd.size == 0


def test_a_prompt_without_room_leaves_the_crowd() -> None:
    inner, crowd = FakeEngine(), Crowd()
    inner.set(seats=0)
    with pytest.raises(Exception, match="no room"):
        CrowdEngine(inner, crowd).admit(_request(3, 1), timeout_s=0.01)
    assert crowd.size == 0


@pytest.mark.parametrize("other", [_request(3, 2, salt="another tenant"), _request(0, 2, 300)])
def test_strangers_do_not_wait(other: Request) -> None:
    inner = FakeEngine()
    engine = CrowdEngine(inner, Crowd())
    engine.admit(_request(3, 1))
    assert isinstance(engine.admit(other)._inner, FakeAdmission)  # type: ignore[attr-defined]


def test_a_prompt_computed_here_waits_for_nobody() -> None:
    engine = CrowdEngine(FakeEngine(), Crowd())
    engine.admit(_request(3, 1))
    assert isinstance(engine.admit(_request(3, 2), local=True), FakeAdmission)


def test_common_pages_come_in_once(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Four prompts at once on a real engine: five pages in common, one each."""
    model = tiny.write("llama", tmp_path / "tiny")
    requests = [_request(5, tail) for tail in range(4)]
    go = threading.Barrier(len(requests))
    p = ReferenceEngine(model, EngineSettings())
    d = ReferenceEngine(model, EngineSettings())
    engine = CrowdEngine(d, Crowd())

    def served(request: Request) -> tuple[int, list[int]]:
        work = p.prefill(request)
        sent = [work.read(index) for index in range(page_count(request.transfer_tokens))]
        work.close()
        go.wait(60)
        admission = engine.admit(request)
        for page in sent[admission.held_pages :]:
            admission.import_page(page)
        tokens = [token for step in admission.decode() for token in step.token_ids]
        admission.close()
        return len(sent) - admission.held_pages, tokens

    try:
        found = list(pool.map(served, requests))
        alone = [[t for step in _alone(p, request) for t in step] for request in requests]
    finally:
        p.close()
        d.close()
    assert sorted(imported for imported, _ in found) == [1, 1, 1, 6]
    assert [tokens for _, tokens in found] == alone


def _alone(engine: ReferenceEngine, request: Request) -> Iterator[tuple[int, ...]]:
    admission = engine.admit(Request(secrets.token_hex(16), request.token_ids, GREEDY, "alone"), local=True)
    for step in admission.decode():
        yield step.token_ids
    admission.close()


def test_contract_and_salt_seed_the_addresses() -> None:
    engine = CrowdEngine(FakeEngine(), Crowd())
    request = _request(1, 0, salt="s")
    assert engine._keys(request) == prefix.chain(prefix.seed(CONTRACT.digest, "s"), request.token_ids[:64])
