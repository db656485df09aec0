"""Config: precedence, and that every mistake is named by its key."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pipeline.cli import config
from pipeline.errors import ConfigError
from pipeline.settings import Settings

TOML = """
[broker]
budget_bytes = 1000
result_ttl_s = 7
[api]
model = "models/a"
port = 1
[[workers]]
name = "one"
engine = "mlx"
model = "models/a"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "crossfill.toml"
    path.write_text(TOML)
    return path


def test_later_sources_win_key_by_key(file: Path) -> None:
    environ = {"CROSSFILL_BROKER__BUDGET_BYTES": "2000", "CROSSFILL_API__PORT": "2", "CROSSFILL_CACHE": "/elsewhere"}
    settings = config.load(file, environ, {"api": {"port": 3}})
    assert settings.broker.budget_bytes == 2000
    assert settings.broker.result_ttl_s == 7
    assert settings.api is not None
    assert (settings.api.port, settings.api.model) == (3, Path("models/a"))


def test_defaults_without_a_file() -> None:
    assert config.load(None, {}) == Settings()


def test_environment_alone_makes_a_section() -> None:
    settings = config.load(None, {"CROSSFILL_API__MODEL": "m", "CROSSFILL_HANDOFF__FAILURE_POLICY": "fail"})
    assert settings.api is not None
    assert settings.api.model == Path("m")
    assert settings.handoff.failure_policy == "fail"


@pytest.mark.parametrize(
    ("environ", "flags", "key"),
    [
        ({"CROSSFILL_BROKER__BUDGET": "1"}, {}, "broker.budget: Extra inputs are not permitted"),
        ({"CROSSFILL_API__PORT": "http"}, {}, "api.port: Input should be a valid integer"),
        ({}, {"handoff": {"failure_policy": "hope"}}, "handoff.failure_policy: Input should be 'recompute' or 'fail'"),
        ({}, {"workers": [{"engine": "mlx", "model": "m"}]}, "workers[0].name: Field required"),
        ({}, {"handoff": {"queue_s": 0}}, "handoff.queue_s: Input should be greater than 0"),
        ({}, {"handoff": {"total_s": 900}}, "raise handoff_ttl_s to 930 or more, or lower total_s"),
        ({"CROSSFILL_WORKERS__0__SLOTS": "2"}, {}, "CROSSFILL_WORKERS__0__SLOTS: workers are a list"),
    ],
)
def test_a_mistake_is_named_by_its_key(file: Path, environ: dict[str, str], flags: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(file, environ, flags)
    assert key in str(caught.value)


def test_two_workers_of_one_name_are_refused() -> None:
    worker = {"name": "one", "engine": "mlx", "model": "m"}
    with pytest.raises(ConfigError, match="'one' is used twice"):
        config.load(None, {}, {"workers": [worker, worker]})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.toml", "[broker", "not valid toml"), ("a.json", "{", "not valid json"), ("a.json", "[]", "must hold a table")],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(path, {})
    assert str(path) in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        config.load(tmp_path / "none.toml", {})


def test_what_is_saved_is_read_back_and_is_private(file: Path, tmp_path: Path) -> None:
    settings = config.load(file, {"CROSSFILL_BROKER__URL": "redis://:secret@host/0"})
    saved = tmp_path / "settings.json"
    config.save(settings, saved)
    assert config.load(saved, {}) == settings
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_saving_keeps_apart_what_was_set_from_defaults(file: Path, tmp_path: Path) -> None:
    """`up` starts an own broker only while no URL was given: a default must not turn into a given one."""
    saved = tmp_path / "settings.json"
    config.save(config.load(file, {}), saved)
    assert "url" not in config.load(saved, {}).broker.model_fields_set


def test_find_prefers_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.find(None) is None
    config.DEFAULT_FILE.write_text("")
    assert config.find(None) == Path("crossfill.toml")
    assert config.find(Path("other.toml")) == Path("other.toml")


def test_the_sample_file_holds_the_defaults() -> None:
    settings = config.load(Path(__file__).parents[2] / "ops/crossfill.toml", {})
    assert settings.broker == Settings().broker
    assert settings.handoff == Settings().handoff
    assert [(w.name, w.engine, w.role) for w in settings.workers] == [("vllm", "vllm", "both"), ("mlx", "mlx", "both")]
