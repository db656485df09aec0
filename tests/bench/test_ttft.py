"""The TTFT bench: what a handoff adds, and what it may add."""

from __future__ import annotations

from importlib import metadata

import pytest

from bench import ttft
from bench.client import Sample
from pipeline.cli.fleet import Fleet

MARKS = {"prefill_started": 2.0, "prefill_ended": 90.0, "first_page_out": 30.0, "last_page_out": 92.0}


def _sample(route: str, ttft_ms: float, step_ms: float = 10.0) -> Sample:
    return Sample(route, 744, ttft_ms, step_ms, 4, {"marks_ms": MARKS, "pages": 12, "bytes": 1000})


def test_added_is_beside_the_prefill_engine_alone_and_one_step_of_d() -> None:
    samples = [_sample("local:a", 100.0), _sample("local:b", 1000.0, 10.0)]
    samples += [_sample("a->b", ttft_ms) for ttft_ms in (127.0, 500.0, 128.0)] + [_sample("b->a", 1056.0)]
    there, back = ttft.summary(samples, "a", "b")
    assert (there["route"], there["added_ms"], there["target_ms"]) == ("a->b", 18.0, 18.0)
    assert (back["added_ms"], back["target_ms"]) == (46.0, 45.0)
    assert [target.reached for target in ttft.targets([there, back])] == [True, False]


def test_stages_of_a_trace() -> None:
    spans = ttft.stages({"marks_ms": MARKS})
    assert spans["prefill"] == pytest.approx(88.0)
    assert spans["transfer"] == pytest.approx(62.0)
    assert spans["import"] == 0.0  # marks that are not there


@pytest.mark.processes
def test_a_small_system_is_sampled(small: Fleet) -> None:
    words = "--engines reference,mlx --model models/tiny-llama --lengths 130 --samples 1"
    result = ttft.sample(small, ttft.parse(words.split()))
    # 129 tokens are transferred
    assert [(row["prompt_tokens"], row["route"], row["pages"]) for row in result["rows"]] == [
        (130, "reference->mlx", 3),
        (130, "mlx->reference", 3),
    ]
    assert len(result["raw"]) == 4  # the warm-up is not among them
    assert len(result["targets"]) == 2
    assert set(result["engines"]) == {"reference", "mlx"}
    assert result["engines"]["mlx"]["mlx-lm"] == metadata.version("mlx-lm")
