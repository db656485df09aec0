"""What the demo asks, and that it cannot call a fallback a success."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import config, demo
from pipeline.cli.demo import DemoError
from pipeline.settings import Settings


def settings(*workers: tuple[str, str], served_name: str | None = None) -> Settings:
    entries = [{"name": f"w{i}", "engine": e, "role": r, "model": "m"} for i, (e, r) in enumerate(workers)]
    api = {"model": "models/sample"} | ({"served_name": served_name} if served_name else {})
    return config.load(None, {}, {"api": api, "workers": entries})


@pytest.mark.parametrize(
    ("workers", "directions"),
    [
        ([("vllm", "both"), ("mlx", "both")], [("vllm", "mlx"), ("mlx", "vllm")]),
        ([("vllm", "prefill"), ("mlx", "both")], [("vllm", "mlx")]),
        ([("mlx", "prefill"), ("mlx", "decode")], [("mlx", "mlx")]),
        ([("mlx", "both")], [("mlx", "mlx")]),
        ([("mlx", "prefill")], []),
    ],
)
def test_directions(workers: list[tuple[str, str]], directions: list[tuple[str, str]]) -> None:
    assert demo.directions(settings(*workers)) == directions


def test_chunks_are_small_unless_told_otherwise(tmp_path: Path) -> None:
    worker = {"engine": "mlx", "model": "m"}
    given = [worker | {"name": "a"}, worker | {"name": "b", "engine_settings": {"chunk_tokens": 256}}]
    changed = demo.small_chunks(config.load(None, {}, {"workers": given}))
    config.save(changed, tmp_path / "settings.json")  # as the workers will read it
    found = config.load(tmp_path / "settings.json", {}).workers
    assert [each.engine_settings.chunk_tokens for each in found] == [64, 256]


def test_stand_ins_are_named() -> None:
    assert demo.notes(settings(("vllm", "both"), ("mlx", "both"))) == []
    no_vllm, stand_in = demo.notes(settings(("reference", "both"), ("mlx", "both")))
    assert no_vllm.startswith("vLLM is not part of this set-up")
    assert "`reference`" in stand_in
    assert demo.notes(settings(("mlx", "prefill"), ("mlx", "decode")))[1].startswith("mlx serves both roles")


def test_each_direction_asks_another_prompt_of_the_served_model() -> None:
    first, second = (demo.body(settings(("mlx", "both"), served_name="named"), n, 8) for n in (1, 2))
    assert first["messages"] != second["messages"]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("named", 8, 0)
    assert demo.body(settings(("mlx", "both")), 1, 8)["model"] == "sample"


GOOD: dict[str, Any] = {
    "route": {"prefill_engine": "vllm", "decode_engine": "mlx"},
    "imported_tokens": 64,
    "recomputed": None,
}


def test_a_real_handoff_passes() -> None:
    demo.require_handoff(GOOD, "vllm", "mlx")


@pytest.mark.parametrize(
    "change",
    [
        {"route": {"prefill_engine": None, "decode_engine": "mlx"}},
        {"route": {"prefill_engine": "mlx", "decode_engine": "vllm"}},
        {"route": None},
        {"imported_tokens": 0},
        {"recomputed": "peer_error"},
    ],
)
def test_a_fallback_fails(change: dict[str, Any]) -> None:
    with pytest.raises(DemoError, match="no KV was handed from vllm to mlx"):
        demo.require_handoff(GOOD | change, "vllm", "mlx")
