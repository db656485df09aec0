"""The self-test on this host's `reference` engine, and how it reads what came back."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.cli import selftest
from pipeline.cli.selftest import Result


def _console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160), out


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_it_hands_over_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    console, out = _console()
    assert selftest.run(console, 200, {"reference": Path(sys.executable)}) == 0
    said = out.getvalue()
    assert "engines: reference; a tiny random llama" in said
    (row,) = [line.split() for line in said.splitlines() if line.startswith("ok ")]
    assert row[1:3] == ["reference", "reference"]
    assert int(row[3]) >= 2
    assert "all directions work" in said
    assert [*tmp_path.iterdir()] == []


def test_every_direction_of_what_is_there(tmp_path: Path) -> None:
    engines = {"mlx": Path("a"), "sglang": Path("b"), "reference": Path("c")}
    settings = selftest.describe(engines, tmp_path)
    assert [(worker.name, worker.role) for worker in settings.workers] == [
        ("mlx", "both"),
        ("sglang-prefill", "prefill"),
        ("sglang-decode", "decode"),
        ("reference", "both"),
    ]
    results = [*selftest.directions("http://127.0.0.1:9", settings)]
    assert len({(result.prefill, result.decode) for result in results}) == len(results) == 6
    assert all(result.error.startswith("no answer from http://127.0.0.1:9") for result in results)


def test_reference_is_always_there() -> None:
    assert selftest.found()["reference"] == Path(sys.executable)


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        ({"imported_tokens": 9}, ""),
        ({"imported_tokens": 0}, "no KV was handed over"),
        (
            {"imported_tokens": 9, "recomputed": "frame_invalid"},
            "the decode engine computed the prompt itself: frame_invalid",
        ),
    ],
)
def test_a_silent_fallback_is_a_failure(monkeypatch: pytest.MonkeyPatch, trace: dict[str, object], why: str) -> None:
    class Answer(list[str]):
        def __init__(self) -> None:
            super().__init__(["a", "b"])
            self.trace = trace

    monkeypatch.setattr(selftest, "ask", lambda *_: Answer())
    assert selftest.attempt("u", {}, "a", "b") == Result("a", "b", trace, "ab", why)


def test_the_table_names_what_failed() -> None:
    console, out = _console()
    trace = {"pages": 4, "imported_tokens": 199, "marks_ms": {"first_token": 41.6}}
    console.print(selftest.table([Result("mlx", "vllm", trace), Result("vllm", "mlx", {}, error="no [replica]")]))
    rows = [line.split() for line in out.getvalue().splitlines()[1:]]
    assert rows == [
        ["ok", "mlx", "vllm", "4", "199", "42", "ms"],
        ["fail", "vllm", "mlx", "-", "-", "-", "no", "[replica]"],
    ]
