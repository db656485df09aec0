"""Spans through OpenTelemetry into a file, and a process that exports nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import tracing
from pipeline.errors import ConfigError
from pipeline.settings import ObserveSettings
from pipeline.tracing import Untraced

PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


def _spans(file: Path) -> dict[str, Any]:
    return {span["name"]: span for span in map(json.loads, file.read_text().splitlines())}


def test_nothing_asked_for_is_nothing_traced_and_the_clients_trace_passes() -> None:
    tracer = tracing.connect(ObserveSettings(), "api", lambda: 0.0)
    assert isinstance(tracer, Untraced)
    span = tracer.start("handoff", PARENT, {})
    assert span.traceparent == PARENT
    span.end({"a": 1}, "engine_failed")
    tracer.close()


def test_a_span_below_another_by_the_clock_given(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    file = tmp_path / "spans"
    times = iter([1000.5, 4000.0])
    tracer = tracing.connect(ObserveSettings(trace_file=file), "vllm-0", lambda: next(times))
    outer = tracer.start("prefill", PARENT, {"crossfill.attempt": 2})
    assert tracing.TRACEPARENT.fullmatch(outer.traceparent)
    tracer.start("transfer", outer.traceparent, {}, at_ms=2000.0).end(at_ms=2500.25)
    outer.end({"crossfill.pages": 3}, "engine_failed")
    tracer.close()
    found = _spans(file)
    prefill, transfer = found["prefill"], found["transfer"]
    assert prefill["context"]["trace_id"] == transfer["context"]["trace_id"] == f"0x{'1' * 32}"
    assert prefill["parent_id"] == f"0x{'2' * 16}"
    assert transfer["parent_id"] == prefill["context"]["span_id"]
    assert prefill["attributes"] == {"crossfill.attempt": 2, "crossfill.pages": 3}
    assert prefill["status"] == {"status_code": "ERROR", "description": "engine_failed"}
    assert (prefill["start_time"], prefill["end_time"]) == (
        "1970-01-01T00:00:01.000500Z",
        "1970-01-01T00:00:04.000000Z",
    )
    assert (transfer["start_time"], transfer["end_time"]) == (
        "1970-01-01T00:00:02.000000Z",
        "1970-01-01T00:00:02.500250Z",
    )
    assert prefill["resource"]["attributes"]["service.instance.id"] == "vllm-0"


def test_what_is_not_sampled_is_not_written_but_has_a_context(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    settings = ObserveSettings(trace_file=tmp_path / "spans", trace_share=0)
    tracer = tracing.connect(settings, "api", lambda: 1.0)
    own = tracer.start("handoff", "", {})
    assert int(own.traceparent[-2:], 16) & 1 == 0  # whoever is below does not sample either
    tracer.start("prefill", own.traceparent, {}).end()
    tracer.start("asked for", PARENT, {}).end()
    own.end()
    tracer.close()
    assert [*_spans(tmp_path / "spans")] == ["asked for"]


def test_a_context_holds_inside_only_and_must_be_one() -> None:
    with tracing.under(PARENT):
        assert tracing.current() == PARENT
        for bad in ("", "00-xyz", PARENT + "\r\nX: y", PARENT[:-1]):
            with tracing.under(bad):
                assert tracing.current() == ""
    assert tracing.current() == ""


def test_a_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    settings = ObserveSettings(trace_file=tmp_path / "none" / "spans")
    with pytest.raises(ConfigError, match=r"observe\.trace_file: cannot write .*No such file or directory"):
        tracing.connect(settings, "api", lambda: 0.0)


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from pipeline import tracing; from pipeline.settings import ObserveSettings\n"
        "try: tracing.connect(ObserveSettings(otlp_endpoint='http://x'), 'api', lambda: 0.0)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError traces need `pip install 'crossfill[otel]'`")
