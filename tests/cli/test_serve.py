"""The API's command line."""

from __future__ import annotations

import pytest

from pipeline.__main__ import main, parser
from pipeline.cli import serve


def test_only_given_flags_override() -> None:
    assert serve.flags(parser("serve").parse_args(["serve"])) == {}
    given = parser("serve").parse_args(["serve", "--port", "0", "--model", "m", "--broker", "redis://h/1"])
    tree = serve.flags(given)
    assert tree["broker"] == {"url": "redis://h/1"}
    assert {key: str(value) for key, value in tree["api"].items()} == {"model": "m", "port": "0"}


def test_a_missing_model_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    assert main(["serve"]) == 2
    assert "api.model: which model to serve is not set" in capsys.readouterr().err
