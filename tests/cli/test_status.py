"""The status of an API, for people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.__main__ import main
from pipeline.cli import status


def test_a_row_per_replica() -> None:
    replica = {"name": "one", "engine": "mlx", "role": "both", "model": "m", "slots": 4}
    replica |= {"load": {"prefill_running": 1}, "stats": {"running": 2, "free_pages": 3}}
    out = io.StringIO()
    Console(file=out, width=120).print(status.replicas({"replicas": [replica]}))
    row = out.getvalue().splitlines()[-1]
    assert " ".join(row.split()) == "one mlx both m 4 prefill_running 1 running 2, free_pages 3"


def test_no_api_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 2
    assert "no Crossfill API answers at http://127.0.0.1:9" in capsys.readouterr().err
