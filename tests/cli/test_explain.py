"""Why the router chooses what it chooses, for people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.__main__ import main
from pipeline.cli import explain


def test_a_row_per_way() -> None:
    way = {"way": "vllm->mac", "chosen": True, "known": True, "total_ms": 25.04}
    way |= {"queue_ms": 0.0, "prefill_ms": 20.0, "exposed_ms": 5.0}
    other = way | {"way": "local->mac", "chosen": False, "known": False, "total_ms": 90.0}
    out = io.StringIO()
    Console(file=out, width=120).print(explain.table({"model": "m", "tokens": 640, "ways": [way, other]}))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert rows[0] == "m, 640 tokens: time to first token"
    assert rows[2:] == ["vllm->mac 25.0 0.0 20.0 5.0 chosen", "local->mac 90.0 0.0 20.0 5.0 ?"]


def test_no_api_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9 explains nothing" in capsys.readouterr().err
