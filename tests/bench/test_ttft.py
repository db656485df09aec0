"""The TTFT bench: what a handoff adds, and what it may add."""

from __future__ import annotations

from importlib import metadata

import pytest

from bench import ttft
from bench.client import Sample
from bench.fleet import versions
from pipeline.cli.fleet import Fleet
from tests.bench.conftest import TINY

MARKS = {"prefill_started": 2.0, "prefill_ended": 90.0, "first_page_out": 30.0, "last_page_out": 92.0}


def _sample(route: str, ttft_ms: float, step_ms: float = 10.0) -> Sample:
    return Sample(route, 744, ttft_ms, step_ms, 4, {"marks_ms": MARKS, "pages": 12, "bytes": 1000})


def test_added_is_beside_the_prefill_engine_of_its_round_and_one_step_of_d() -> None:
    samples = [_sample("local:a", ttft_ms) for ttft_ms in (100.0, 500.0, 99.0)]
    samples += [_sample("local:b", 1000.0, 10.0)] * 3
    samples += [_sample("a->b", ttft_ms) for ttft_ms in (127.0, 528.0, 300.0)]
    samples += [_sample("b->a", 1056.0)] * 3
    there, back = ttft.summary(samples, "a", "b")
    assert (there["route"], there["samples"], there["prefill_alone_ms"]) == ("a->b", 3, 100.0)
    assert (there["added_ms"], there["target_ms"]) == (18.0, 18.0)  # the median of 27, 28 and 201, less a step
    assert (back["added_ms"], back["target_ms"]) == (46.0, 45.0)
    found = ttft.targets([{"model": "m", **row} for row in (there, back)])
    assert [(target.what, target.reached) for target in found] == [
        ("m, a->b, 744 tokens: added", True),
        ("m, b->a, 744 tokens: added", False),
    ]


def test_stages_of_a_trace() -> None:
    spans = ttft.stages({"marks_ms": MARKS})
    assert spans["prefill"] == pytest.approx(88.0)
    assert spans["transfer"] == pytest.approx(62.0)
    assert spans["import"] == 0.0  # marks that are not there


@pytest.mark.processes
def test_a_small_system_is_sampled(small: Fleet) -> None:
    options = ttft.parse(["--engines", "reference,mlx", "--fewest", "1"])
    taken = ttft.sample(small, TINY, "130", options, end_s=0)
    # 129 tokens are transferred
    assert [(row["prompt_tokens"], row["route"], row["samples"], row["pages"]) for row in taken.rows] == [
        (130, "reference->mlx", 1, 3),
        (130, "mlx->reference", 1, 3),
    ]
    assert [each["route"] for each in taken.raw] == list(ttft.routes("reference,mlx"))  # without those for warming up


def test_versions_of_what_computes() -> None:
    found = versions(["reference", "mlx"])
    assert set(found) == {"reference", "mlx"}
    assert found["mlx"]["mlx-lm"] == metadata.version("mlx-lm")
