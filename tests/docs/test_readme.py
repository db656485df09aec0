"""Both READMEs: what they link to exists, and they tell the same commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

READMES = [Path("README.md"), Path("README.zh-CN.md")]


def links(file: Path) -> set[str]:
    return {found for found in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")) if "://" not in found}


@pytest.mark.parametrize("file", READMES, ids=str)
def test_what_it_links_to_exists(file: Path) -> None:
    assert links(file)
    assert [link for link in links(file) if not Path(link).exists()] == []


def test_each_language_names_the_other() -> None:
    for ours, other in (READMES, READMES[::-1]):
        assert str(other) in links(ours)


def test_the_same_shell_commands_stand_in_both() -> None:
    blocks = [re.findall(r"```sh\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL) for file in READMES]
    commands = [[line.split("#")[0].strip() for block in one for line in block.splitlines()] for one in blocks]
    assert commands[0] == commands[1]
