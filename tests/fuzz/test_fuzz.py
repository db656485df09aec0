"""A short run of the fuzzers, and proof that they would notice: each check is taken out and the judge objects."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import frame as frames_module
from pipeline.frame import FrameReader
from tests.fuzz import records
from tests.fuzz.__main__ import frames
from tests.fuzz.frames import Broken, Feeder, transfer
from tests.fuzz.judge import links


def test_the_judge_knows_the_chain_by_itself() -> None:
    """SHA-256 of 100 as uint32, after the seed of contract `c`: computed with coreutils, not with this code."""
    assert links("c", "", [100])[0].hex() == "aaeddda6b9784a787d9a94ae5a20026955c2dbdbb106372dbc782e26fbd8ca2a"


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 48))
def test_no_frame_gets_through_unverified(seed: int) -> None:
    feeder = Feeder(seed)
    feeder.run(400)
    assert sum(feeder.outcome.values()) == 400
    assert feeder.outcome["refused"] > 200


def test_every_kind_of_frame_is_taken_and_refused() -> None:
    seen = frames(seed=7, count=15_000)
    assert all(seen[f"frame {outcome}"] > 20 for outcome in ("open", "page", "commit", "abort", "refused"))
    assert sum(count for name, count in seen.items() if name.startswith("fed")) == 15_000


@pytest.mark.parametrize("check", ["digest", "fault", "place", "keys"])
def test_the_judge_notices_when_a_check_is_missing(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    if check == "fault":  # NaN, Inf, dirty padding
        monkeypatch.setattr(frames_module, "_fault", lambda page: None)
    elif check == "digest":
        monkeypatch.setattr(FrameReader, "_require_digest", lambda self, header, data: None)
    elif check == "place":
        monkeypatch.setattr(FrameReader, "_require_place", lambda self, header: None)
        monkeypatch.setattr(
            FrameReader, "_CHECKS", FrameReader._CHECKS | {frames_module.Kind.PAGE: lambda self, header: None}
        )
    else:
        monkeypatch.setattr(FrameReader, "_CHECKS", {kind: lambda self, header: None for kind in frames_module.Kind})
    with pytest.raises(Broken, match="came out that is"):
        Feeder(1).run(100_000)


def test_a_valid_transfer_is_taken_whole() -> None:
    feeder = Feeder(0)
    for codec in ("raw", "lz4"):
        feeder._renew()
        while feeder._place:
            feeder._renew()
        assert [feeder.feed(frame) for frame in transfer(codec)[:6]] == [
            "open",
            "page",
            "page",
            "page",
            "page",
            "commit",
        ]


def test_records_and_jobs_are_read_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    seen = records.run(seed=3, count=10_000)
    assert sum(seen.values()) == 10_000
    assert {name.rpartition(" ")[0] for name in seen} == set(records.READERS)
