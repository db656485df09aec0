"""The entry point: finds commands, turns our errors into a line and a status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import __main__ as entry


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        entry.main([name, "--help"])
    assert caught.value.code == 0
    assert f"crossfill {name}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.main(["--help"])
    out = capsys.readouterr().out
    assert [name for name in entry.COMMANDS if re.search(rf"^    {name}\s", out, re.M)] == list(entry.COMMANDS)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["serve", "--nonsense"]])
def test_a_wrong_command_line_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        entry.main(argv)
    assert caught.value.code == 2
    assert "usage: crossfill" in capsys.readouterr().err


def test_a_config_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert entry.main(["serve", "--config", str(missing)]) == 2
    expected = f"crossfill: config_invalid: cannot read {missing}: No such file or directory\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", ["worker", "status"])
def test_a_command_does_not_load_what_others_need(command: str) -> None:
    """A worker must start in an environment without the web framework; `--help` imports all that parsing needs."""
    code = (
        "import sys; from pipeline.__main__ import parser; parser(sys.argv[1]);"
        "print(sorted({'fastapi', 'uvicorn', 'mlx', 'vllm', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
