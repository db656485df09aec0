"""Which broker is looked into, and how often."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from pipeline.cli import view
from pipeline.errors import BrokerError, ConfigError


def _options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"config": None, "broker": None, "json": False, "watch": None} | given)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(directory: Path, name: str, url: str | None) -> Path:
    file = directory / name
    file.parent.mkdir(exist_ok=True)
    broker = {"url": url} if url else {"budget_bytes": 7}
    file.write_text(json.dumps({"broker": broker}) if file.suffix == ".json" else f'[broker]\nurl = "{url}"\n')
    return file


def test_the_broker_of_an_up_in_this_directory_counts_where_nothing_else_names_one(directory: Path) -> None:
    assert view.settings(_options()).broker.url == "redis://127.0.0.1:6380/0"
    _write(directory, ".run/settings.json", "redis://run:1/0")
    assert view.settings(_options()).broker.url == "redis://run:1/0"
    assert view.settings(_options(broker="redis://flag:1/0")).broker.url == "redis://flag:1/0"
    _write(directory, "crossfill.toml", "redis://file:1/0")
    assert view.settings(_options()).broker.url == "redis://file:1/0"


def test_a_file_that_is_asked_for_is_not_overruled(directory: Path) -> None:
    _write(directory, ".run/settings.json", "redis://run:1/0")
    chosen = _write(directory, "other.json", None)
    assert view.settings(_options(config=chosen)).broker.url == "redis://127.0.0.1:6380/0"
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        view.settings(_options(config=Path("missing.toml")))


def test_one_look_is_json_or_a_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    view.show(_options(json=True), lambda: {"a": 1}, str)
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    view.show(_options(), lambda: {"a": 1}, lambda found: Text(f"a is {found['a']}"))
    assert capsys.readouterr().out == "a is 1\n"


def _looks(*found: int | Exception) -> Iterator[int]:
    for one in found:
        if isinstance(one, Exception):
            raise one
        yield one
    raise KeyboardInterrupt


def test_a_watch_looks_until_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    looks = _looks(1, 2, 3)
    view.show(_options(json=True, watch=0.001), lambda: next(looks), str)
    assert capsys.readouterr().out == "1\n2\n3\n"


def test_a_watch_outlives_a_broker_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([BrokerError("it is away"), KeyboardInterrupt()])

    def look() -> int:
        raise next(answers)

    view.show(_options(watch=0.001), look, str)
    assert "it is away" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ms", "text"), [(-5, "0.0 s"), (1500, "1.5 s"), (100_000, "2 min"), (5_400_000, "1.5 h"), (36_000_000, "10.0 h")]
)
def test_a_span_for_people(ms: float, text: str) -> None:
    assert view.ago(ms) == text


def test_a_route_for_people() -> None:
    assert view.route({"route": {"prefill_engine": "vllm", "decode_engine": "mlx"}}) == "vllm->mlx"
    assert view.route({"route": {"prefill_engine": None, "decode_engine": "mlx"}}) == "local:mlx"
    assert view.route({"route": {"decode_replica": "d-0"}}) == "local:d-0"
    assert view.mib(3 << 19) == "1.5 MiB"
