"""Which handoffs are captured, what is in them, and that the stages do not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture import Capture, Reader
from pipeline.engines.base import Capabilities, TokenStep
from pipeline.errors import EngineError
from pipeline.handoff import State
from pipeline.logprob import TokenLogprob
from pipeline.page import Page
from pipeline.request import Request, Sampling
from pipeline.settings import CaptureSettings
from pipeline.stages import decode
from pipeline.stages.archive import Archive
from pipeline.stages.recording import RecordedEngine, Recorder
from tests.stages.fake import FakeAdmission, pages, text
from tests.stages.stand import FINISHED, Outcome, Stand, failure, outcome, same

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)
Record = Callable[..., "Tape"]


class Tape:
    """D's job with a recorder of the given mode, and what came of it."""

    def __init__(self, stand: Stand, settings: CaptureSettings) -> None:
        self.stand = stand
        self.folder = settings.folder
        self.archive = Archive(settings)
        ledger = stand.d_services.ledger
        look, trace = stand.d_services.signals.seen, partial(_trace, ledger)
        self.engine = RecordedEngine(stand.d, Recorder(settings, self.archive, look, trace))

    def decode(self, request: Request) -> Future[Outcome]:
        return self.stand._start(decode.run, self.stand.d_services, self.engine, request.handoff_id)

    def begin(self, request: Request) -> Future[Outcome]:
        self.stand.prefill(request)
        return self.decode(request)

    def stored(self) -> list[tuple[Capture, list[Page]]]:
        assert self.archive.flush(40)
        assert self.archive.disabled == ""
        found = []
        for path in sorted(self.folder.glob("*.handoff")):
            with path.open("rb") as file:
                reader = Reader(file)
                found.append((reader.capture, list(reader.pages())))
        return found


def _trace(ledger: Any, handoff_id: str) -> dict[str, Any] | None:
    return ledger.trace(handoff_id) or next((t for t in ledger.recent(99) if t["handoff_id"] == handoff_id), None)


@pytest.fixture
def record(stand: Stand, tmp_path: Path) -> Iterator[Record]:
    tapes: list[Tape] = []

    def make(mode: str, **settings: object) -> Tape:
        tapes.append(Tape(stand, CaptureSettings.model_validate({"mode": mode, "folder": tmp_path} | settings)))
        return tapes[-1]

    yield make
    for tape in tapes:
        tape.archive.close()


def test_all_stores_everything_about_a_handoff(stand: Stand, record: Record) -> None:
    tape, request = record("all"), stand.open()
    assert outcome(tape.begin(request)) == FINISHED
    [(found, stored)] = tape.stored()
    assert (found.request, found.engine, found.contract) == (request, "fake", stand.d.contract)
    assert (found.tokens, found.finishes, found.error) == ((text(request),), ("length",), None)
    assert same(stored, pages(request))
    assert found.trace["state"] == "finished"
    assert {"created_ms", "marks_ms", "route"} <= found.trace.keys()
    assert found.trace["marks_ms"]["last_page_out"] > 0  # P's, though D's worker wrote the file
    assert found.versions["numpy"]


def test_pages_that_d_held_are_stored_too(stand: Stand, record: Record) -> None:
    tape, request = record("all"), stand.open()
    stand.d.set(held=2)
    assert outcome(tape.begin(request)) == FINISHED
    [(found, stored)] = tape.stored()
    assert (found.held_pages, found.trace["reused_tokens"]) == (2, 128)
    assert same(stored, pages(request))


def test_ps_first_token_is_stored(stand: Stand, record: Record) -> None:
    tape, request = record("all"), stand.open(first_token=True)
    stand.d.set(capabilities=Capabilities(can_prefill=False, needs_first_token=True))
    assert outcome(tape.begin(request)) == FINISHED
    [(found, _)] = tape.stored()
    assert found.first_tokens == text(request)[:1]
    assert found.whole


@pytest.mark.parametrize("mode", ["off", "errors", "sample:0"])
def test_what_went_well_is_not_stored(stand: Stand, record: Record, mode: str) -> None:
    tape = record(mode)
    assert outcome(tape.begin(stand.open())) == FINISHED
    assert tape.stored() == []


def test_a_sample_is_chosen_by_the_id(stand: Stand, record: Record) -> None:
    recorder = record("sample:0.25").engine._recorder
    assert recorder.may_want("3fffffff" + "0" * 24)
    assert not recorder.may_want("40000000" + "0" * 24)


def test_errors_stores_a_failure_with_what_there_was(stand: Stand, record: Record) -> None:
    tape, request = record("errors"), stand.open()
    stand.d.set(tokens=1, decode_error=EngineError("D broke"))
    assert isinstance(failure(tape.begin(request)), EngineError)
    [(found, stored)] = tape.stored()
    assert (found.error, found.trace["state"], found.tokens) == (
        "engine_failed: D broke",
        "failed",
        (text(request)[:1],),
    )
    assert same(stored, pages(request))


def test_errors_stores_a_handoff_that_lost_its_transfer(stand: Stand, record: Record) -> None:
    tape, request = record("errors"), stand.open()
    stand.p.set(bad_page=2)
    assert outcome(tape.begin(request)) == FINISHED  # D computed the prompt itself
    found = tape.stored()
    assert [one.trace["recomputed"] for one, _ in found] == ["peer_aborted"] * len(found)
    assert (found[-1][0].tokens, found[-1][0].trace["state"]) == ((text(request),), "finished")


@pytest.mark.parametrize("mode", ["errors", "all"])
def test_a_cancelled_handoff_is_not_stored(stand: Stand, record: Record, mode: str) -> None:
    tape, request = record(mode), stand.open()
    stand.d.set(tokens=1)
    job = tape.begin(request)
    stand.await_state(request, State.DECODING)
    stand.cancel(request)
    failure(job)
    assert tape.stored() == []


def test_one_that_a_stop_string_ended_is_stored(stand: Stand, record: Record) -> None:
    tape, request = record("all"), stand.open()
    stand.d.set(tokens=2)
    job = tape.begin(request)
    stand.await_state(request, State.DECODING)
    assert stand.ledger.stop(request.handoff_id)
    assert outcome(job) == {"outcome": "stopped"}
    [(found, stored)] = tape.stored()
    assert (found.trace["state"], found.finishes) == ("finished", (None,))
    assert same(stored, pages(request))


def test_a_live_one_is_stored_when_an_operator_asks(stand: Stand, record: Record) -> None:
    tape, request, other = record("off"), stand.open(), stand.open()
    stand.d.set(tokens=1)
    job, quiet = tape.begin(request), tape.begin(other)
    stand.await_state(request, State.DECODING)
    assert stand.ledger.capture(request.handoff_id) is State.DECODING
    seen = stand.d_services.signals.seen
    wait_for(lambda: (snapshot := seen(request.handoff_id)) is not None and snapshot.capture)
    stand.d.set(tokens=3)
    assert outcome(job) == outcome(quiet) == FINISHED
    [(found, stored)] = tape.stored()
    assert found.request == request
    assert same(stored, pages(request))
    assert [work.kept for work in stand.d.works if isinstance(work, FakeAdmission)].count(True) == 1


def test_it_is_too_late_to_ask_for_one_that_has_ended(stand: Stand) -> None:
    request = stand.open()
    _, job = stand.begin(request)
    assert outcome(job) == FINISHED
    assert stand.ledger.capture(request.handoff_id) is State.FINISHED
    assert stand.ledger.capture("0" * 32) is None


def test_a_handoff_larger_than_the_buffer_is_answered_all_the_same(stand: Stand, record: Record) -> None:
    tape = record("all", buffer_bytes=1)
    assert outcome(tape.begin(stand.open())) == FINISHED
    assert tape.stored() == []


def test_an_engine_that_gives_no_pages_costs_nothing(
    stand: Stand, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: FakeAdmission) -> Iterator[Page]:
        yield pages(self.request)[0]
        raise EngineError("no more")

    monkeypatch.setattr(FakeAdmission, "export_pages", broken)
    tape, request = record("all"), stand.open()
    assert outcome(tape.begin(request)) == FINISHED
    [(found, stored)] = tape.stored()
    assert (found.pages, found.whole) == (1, False)
    assert same(stored, pages(request)[:1])


def test_a_bug_in_capturing_costs_nothing(stand: Stand, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAdmission, "export_pages", lambda self: 1 // 0)
    tape = record("all")
    assert outcome(tape.begin(stand.open())) == FINISHED
    assert tape.stored() == []
    assert stand.d.live == []
    assert tape.archive.reserve("next", LIMITS_BYTES)  # its room was given back


def test_every_sample_is_stored_with_its_logprobs(stand: Stand, record: Record) -> None:
    tape, request = record("all"), stand.open(sampling=Sampling(max_tokens=2, n=2, logprobs=0))
    stand.d.set(
        script=[
            TokenStep((5,), logprobs=(TokenLogprob(5, -0.5),)),
            TokenStep((6, 7), "length", sample=1, logprobs=(TokenLogprob(6, -1.0), TokenLogprob(7, -2.0))),
            TokenStep((8,), "stop", logprobs=(TokenLogprob(8, -0.25),)),
        ]
    )
    outcome(tape.begin(request))
    [(found, _)] = tape.stored()
    assert (found.tokens, found.finishes) == (((5, 8), (6, 7)), ("stop", "length"))
    assert found.logprobs == ((-0.5, -0.25), (-1.0, -2.0))


LIMITS_BYTES = CaptureSettings().buffer_bytes


def test_several_at_once(stand: Stand, record: Record) -> None:
    tape = record("all")
    requests = [stand.open() for _ in range(3)]
    for job in [tape.begin(one) for one in requests]:
        assert outcome(job) == FINISHED
    assert {found.request for found, _ in tape.stored()} == set(requests)


def wait_for(condition: Callable[[], bool]) -> None:
    paused = threading.Event()
    for _ in range(400):
        if condition():
            return
        paused.wait(0.05)
    raise AssertionError("it never came")
