"""One request's trace and log lines over real processes: API, P and D in one trace, the handoff's id in every line."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.scenarios.system import System, eventually, system, worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Path]]:
    """A system that writes spans and JSON logs, and the directory of both."""
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    directory = tmp_path_factory.mktemp("traced")
    settings: dict[str, Any] = {
        "api": {"model": tiny_model, "port": free_port()},
        "broker": {"budget_bytes": 1 << 18},
        "observe": {"log_format": "json", "trace_file": directory / "spans.jsonl"},
        "workers": [
            worker(f"ref-{role[0]}", "reference", tiny_model, role, engine_settings={"chunk_tokens": 64})
            for role in ("prefill", "decode")
        ],
    }
    with system(settings, directory) as running:
        yield running, directory


def _spans(directory: Path, trace_id: str) -> list[dict[str, Any]]:
    spans = [json.loads(line) for line in (directory / "spans.jsonl").read_text().splitlines() if line.endswith("}")]
    return [span for span in spans if span["context"]["trace_id"] == f"0x{trace_id}"]


def test_one_trace_holds_api_p_and_d(traced: tuple[System, Path]) -> None:
    running, directory = traced
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    running.http.headers["traceparent"] = f"00-{trace_id}-{parent}-01"
    try:
        trace = running.complete([5, 6, 7] * 60, "reference->reference").trace
    finally:
        del running.http.headers["traceparent"]
    eventually(lambda: {span["name"] for span in _spans(directory, trace_id)} >= {"handoff", "prefill", "decode"})
    by_id = {span["context"]["span_id"]: span for span in _spans(directory, trace_id)}
    who = {span["name"]: span["resource"]["attributes"]["service.instance.id"] for span in by_id.values()}
    roots = {"handoff": "api", "transfer": "ref-p", "first_page": "ref-p", "import": "ref-d", "first_token": "ref-d"}
    assert {name: who[name] for name in roots} == roots
    (api,) = [span for span in by_id.values() if span["name"] == "handoff"]
    assert api["parent_id"] == f"0x{parent}"
    parts = [span for span in by_id.values() if "crossfill.replica" in span["attributes"]]
    assert sorted(span["attributes"]["crossfill.replica"] for span in parts) == ["ref-d", "ref-p"]
    assert {span["parent_id"] for span in parts} == {api["context"]["span_id"]}
    ids = {span["attributes"].get("crossfill.handoff") for span in (api, *parts)}
    assert ids == {trace["handoff_id"]}
    for span in by_id.values():
        if span not in (api, *parts):
            above = by_id[span["parent_id"]]
            assert above in parts
            assert above["start_time"] <= span["start_time"] <= span["end_time"] <= above["end_time"]


def test_every_line_about_a_handoff_has_its_id(traced: tuple[System, Path]) -> None:
    running, directory = traced
    handoff_id = running.complete([9, 8] * 80, "reference->reference").trace["handoff_id"]

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (directory / f"{name}.log").read_text().splitlines()]

    eventually(lambda: all(any(handoff_id in line["message"] for line in lines(name)) for name in ("ref-p", "ref-d")))
    for name in ("ref-p", "ref-d"):
        about = [line for line in lines(name) if handoff_id in line["message"]]
        assert {line["handoff"] for line in about} == {handoff_id}
        assert {line["process"] for line in about} == {name}
    assert [line["process"] for line in lines("api")][:1] == ["api"]
