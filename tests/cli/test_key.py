"""`crossfill key` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.api.keyring import Keyring


def test_new_list_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert main(["key", "--file", str(file), "new", "alice"]) == 0
    key = capsys.readouterr().out.strip()
    assert Keyring(file).admits(key) == "alice"
    main(["key", "--file", str(file), "new", "Bob"])
    capsys.readouterr()
    assert main(["key", "--file", str(file), "list"]) == 0
    assert capsys.readouterr().out == "Bob\nalice\n"
    assert main(["key", "--file", str(file), "revoke", "alice"]) == 0
    assert Keyring(file).admits(key) is None
    assert main(["key", "--file", str(file), "revoke", "alice"]) == 2
    assert "no key is named 'alice'" in capsys.readouterr().err


def test_the_file_of_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "crossfill.toml"
    config.write_text(f'[api]\nmodel = "m"\nkeys_file = "{tmp_path}/mine"\n')
    assert main(["key", "--config", str(config), "new", "alice"]) == 0
    assert Keyring(tmp_path / "mine").admits(capsys.readouterr().out.strip()) == "alice"
    config.write_text('[api]\nmodel = "m"\n')
    assert main(["key", "--config", str(config), "list"]) == 2
    assert "api.keys_file" in capsys.readouterr().err
