"""The table of faults is whole, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path("docs/reliability.md")
ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def _rows() -> dict[int, str]:
    return {int(number): rest.rsplit(" | ", 1)[1] for number, rest in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_the_rows_are_numbered_in_order() -> None:
    numbers = [int(number) for number, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))]
    assert numbers == list(range(1, 80))


def test_every_row_names_a_test_or_says_why_there_is_none() -> None:
    for number, shown in _rows().items():
        assert NAMED.search(shown) or re.match(r"cannot arise: .{30,}", shown), number


def test_every_named_test_exists() -> None:
    for file, name in NAMED.findall(PAGE.read_text(encoding="utf-8")):
        text = Path(file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(" if name else r"^(async )?def test_", text, re.MULTILINE), (
            file,
            name,
        )


def test_every_numbered_test_stands_in_its_row() -> None:
    rows = _rows()
    for file in Path("tests/faults").glob("test_*.py"):
        for name, number in re.findall(r"^def (test_[a-f](\d+)_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"`{file}::{name}`" in rows[int(number)], name
