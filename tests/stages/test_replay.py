"""Replays on the reference engine and a fake one: what was recorded is said again, or where and why not."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline import capture as captures
from pipeline.capture import Capture
from pipeline.engines.base import Capabilities
from pipeline.engines.reference import ReferenceEngine
from pipeline.errors import CaptureError, ContractMismatchError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, page_count
from pipeline.request import Request, Sampling
from pipeline.sample import tiny
from pipeline.settings import EngineSettings
from pipeline.stages import replay
from pipeline.stages.replay import Heard, Verdict
from tests.stages import fake
from tests.stages.fake import FakeEngine
from tests.test_capture import capture, pages

GREEDY = Sampling(max_tokens=6, temperature=0.0)


@pytest.fixture
def engine(loaded: ReferenceEngine) -> ReferenceEngine:
    """With nothing cached: a wrong page that a test imports is nobody else's."""
    loaded.reset_prefix_cache()
    return loaded


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceEngine]:
    with closing(ReferenceEngine(tiny.write("qwen3", tmp_path_factory.mktemp("m") / "m"), EngineSettings())) as made:
        yield made


def recorded(
    engine: ReferenceEngine, tokens: int = 200, sampling: Sampling = GREEDY, *, first_token: bool = False
) -> tuple[Capture, list[Page]]:
    """A handoff that went well, by hand: pages of one run, text of another that computed everything itself."""
    ids = tuple(int(i) for i in np.random.default_rng(tokens).integers(16, 1024, tokens))
    request = Request(secrets.token_hex(16), ids, sampling, first_token=first_token)
    with closing(engine.prefill(request)) as work:
        sent = [work.read(at) for at in range(page_count(request.transfer_tokens))]
        assert work.wait_done(60)
        first = work.first_tokens
    with closing(engine.admit(replace(request, first_token=False), local=True)) as admission:
        said = tuple(token for step in admission.decode() for token in step.token_ids)
    engine.reset_prefix_cache()
    made = Capture(request, engine.contract, "reference", (said,), ("length",), tokens, len(sent), first_tokens=first)
    return made, sent


@pytest.mark.parametrize("tokens", [1, 64, 65, 129, 200])
def test_the_same_tokens_come_again(engine: ReferenceEngine, tokens: int) -> None:
    one, sent = recorded(engine, tokens)
    computed = engine.stats().prompt_tokens_computed
    [verdict] = replay.compare(one, "reference", replay.decode(engine, one, sent))
    assert (verdict.same, verdict.compared, verdict.fault) == (True, 6, False)
    assert engine.stats().prompt_tokens_computed == computed + 1  # the pages were used


@pytest.mark.parametrize("tokens", [64, 65, 129, 200])
def test_a_capture_with_the_kv_of_the_whole_prompt_is_cut(engine: ReferenceEngine, tokens: int) -> None:
    """Recorded for an engine that needs a first token (SGLang), replayed on one that does not."""
    one, sent = recorded(engine, tokens, first_token=True)
    [verdict] = replay.compare(one, "reference", replay.decode(engine, one, sent))
    assert (verdict.same, verdict.compared) == (True, 6)


def test_a_wrong_page_says_something_else_and_is_found(engine: ReferenceEngine) -> None:
    one, sent = recorded(engine)
    wrong = [page if page.index != 1 else Page(1, page.tokens, -page.data) for page in sent]
    [verdict] = replay.compare(one, "reference", replay.decode(engine, one, wrong))
    assert verdict.parted is not None
    assert verdict.replayed[verdict.parted] != verdict.recorded[verdict.parted]


def test_pages_are_computed_again_for_either_kind_of_engine(engine: ReferenceEngine) -> None:
    one, sent = recorded(engine)
    again, made = replay.prefill(engine, one)
    assert [page.data.tobytes() for page in made] == [page.data.tobytes() for page in sent]
    assert (again.request, again.tokens, again.whole) == (one.request, one.tokens, True)
    whole, longer = replay.prefill(engine, one, first_token=True)
    assert (whole.whole, whole.first_tokens) == (True, one.tokens[0][:1])
    assert sum(page.tokens for page in longer) == sum(page.tokens for page in made) + 1
    for found, its in ((again, made), (whole, longer)):
        assert b"".join(bytes(piece) for piece in captures.encode(found, its))  # both can be stored


def test_a_first_token_engine_gets_ps_first_token() -> None:
    one = fake_capture(first_token=True)
    engine = FakeEngine(capabilities=Capabilities(can_prefill=False, needs_first_token=True))
    [verdict] = replay.compare(one, "fake", replay.decode(engine, one, fake.pages(one.request)))
    assert (verdict.same, verdict.compared) == (True, 3)


THREE = Sampling(max_tokens=3, temperature=0.0)


@pytest.mark.parametrize(("recorded_logprobs", "expected"), [(((-0.5, -1.0, -2.0),), -0.5), ((), 0.0)])
def test_ps_token_shows_no_difference_in_logprobs(
    recorded_logprobs: tuple[tuple[float, ...], ...], expected: float
) -> None:
    """It is not drawn again. Every engine that can is asked for logprobs, so it must come with one."""
    one = replace(fake_capture(first_token=True), logprobs=recorded_logprobs)
    features = frozenset({"logprobs"})
    capabilities = Capabilities(can_prefill=False, needs_first_token=True, features=features)
    engine = FakeEngine(capabilities=capabilities)
    replay.decode(engine, one, fake.pages(one.request))
    admission: Any = engine.works[-1]
    assert admission.first == (one.first_tokens, (TokenLogprob(one.first_tokens[0], expected),))


def fake_capture(*, first_token: bool = False, sampling: Sampling = THREE) -> Capture:
    request = Request(secrets.token_hex(16), tuple(range(100)), sampling, first_token=first_token)
    said = fake.text(request)
    return Capture(request, fake.CONTRACT, "fake", (said,), ("length",), 100, 2, first_tokens=said[:1])


def test_what_cannot_be_replayed_says_what_to_do() -> None:
    one = fake_capture()
    needs = FakeEngine(capabilities=Capabilities(can_prefill=False, needs_first_token=True))
    with pytest.raises(CaptureError, match="have it computed with --prefill"):
        replay.decode(needs, one, fake.pages(one.request))
    with pytest.raises(CaptureError, match=r"1 of 2 pages.*--prefill"):
        replay.decode(FakeEngine(), replace(one, pages=1, error="broke"), [])
    with pytest.raises(CaptureError, match="redacted"):
        replay.decode(FakeEngine(), captures.redact(one, fake.pages(one.request)), [])
    with pytest.raises(ContractMismatchError, match="weights"):
        replay.decode(FakeEngine(), replace(one, contract=replace(one.contract, weights="other")), [])
    with pytest.raises(CaptureError, match="it has no n"):
        replay.decode(FakeEngine(), fake_capture(sampling=Sampling(max_tokens=3, n=2)), [])
    assert [work.closed for work in needs.works] == [True] * len(needs.works)


# The margin rule


def verdict(said: list[int], *, margins: list[float], engine: str = "fake", **sampling: object) -> Verdict:
    one = capture(65)
    asked = replace(one.request, sampling=replace(one.request.sampling, **sampling))  # type: ignore[arg-type]
    [found] = replay.compare(replace(one, request=asked), engine, [Heard(said, [], margins)])
    return found


@pytest.mark.parametrize(
    ("margin", "fault"),
    [(0.0, False), (0.09, False), (0.11, True), (5.0, True)],
)
def test_a_near_tie_is_no_fault(margin: float, fault: bool) -> None:
    found = verdict([5, 8, 9], margins=[9, margin, 9])
    assert (found.parted, found.compared, found.margin, found.fault) == (1, 1, margin, fault)


def test_without_a_margin_a_difference_is_a_fault() -> None:
    assert verdict([5, 8, 9], margins=[]).fault


def test_a_shorter_recording_counts_as_far_as_it_goes() -> None:
    found = verdict([5, 6, 7, 8], margins=[])
    assert (found.same, found.compared) == (True, 3)


def test_sampled_texts_are_compared_where_they_must_agree() -> None:
    draw: dict[str, Any] = {"temperature": 1.0}
    assert not verdict([8], margins=[9], **draw).fault
    assert not verdict([8], margins=[9], **draw, seed=1, engine="other").fault
    assert verdict([8], margins=[9], **draw, seed=1).fault


def test_logprobs_are_compared_over_the_common_tokens() -> None:
    one = replace(capture(65), logprobs=((-1.0, -2.0, -3.0),))
    [found] = replay.compare(one, "fake", [Heard([5, 6, 8], [-1.5, -2.25, -9.0], [9, 9, 9])])
    assert found.logprob_error == 0.5


def test_fitted_pages_have_zero_padding() -> None:
    one = capture(130)
    cut = list(replay.fitted(pages(one), 129, 100))
    assert [(page.index, page.tokens) for page in cut] == [(0, 64), (1, 36)]
    assert not cut[1].data[..., 36:, :].any()
    assert pages(one)[1].data[..., 36:, :].any()  # the original was not touched
