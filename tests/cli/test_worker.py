"""Which worker a command line means."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.__main__ import parser
from pipeline.cli import config, worker
from pipeline.errors import ConfigError
from pipeline.settings import EngineSettings, WorkerSettings

Workers = Sequence[Mapping[str, object]]
ONE = {"name": "one", "engine": "mlx", "model": "a", "engine_settings": {"chunk_tokens": 128}}
TWO = {"name": "two", "engine": "vllm", "model": "a", "role": "decode"}


def options(*argv: str) -> argparse.Namespace:
    return parser("worker").parse_args(["worker", *argv])


def choose(workers: Workers, *argv: str) -> WorkerSettings:
    return worker.choose(config.load(None, {}, {"workers": list(workers)}), options(*argv))


def test_by_name_from_the_file() -> None:
    assert choose([ONE, TWO], "--name", "two") == WorkerSettings(
        name="two", engine="vllm", model=Path("a"), role="decode"
    )


def test_flags_win_over_the_file_and_the_rest_stays() -> None:
    found = choose([ONE, TWO], "--name", "one", "--slots", "3", "--role", "prefill")
    assert found == WorkerSettings(
        name="one",
        engine="mlx",
        model=Path("a"),
        role="prefill",
        slots=3,
        engine_settings=EngineSettings(chunk_tokens=128),
    )


def test_the_only_worker_needs_no_name() -> None:
    assert choose([ONE]).name == "one"


def test_flags_alone_describe_one() -> None:
    found = choose([], "--name", "x", "--engine", "reference", "--model", "m")
    assert found == WorkerSettings(name="x", engine="reference", model=Path("m"))


@pytest.mark.parametrize(
    ("workers", "argv", "message"),
    [
        ([ONE, TWO], [], "no worker None in the file (one, two) and no --name"),
        ([ONE, TWO], ["--name", "three"], "no worker 'three' in the file (one, two) and no --engine"),
        ([], ["--name", "x", "--engine", "mlx"], "no worker 'x' in the file (none) and no --model"),
    ],
)
def test_an_unknown_worker_is_refused(workers: Workers, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(workers, *argv)
    assert message in str(caught.value)
