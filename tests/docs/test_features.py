"""The table of features in `docs/engines.md` is what the code says today."""

from __future__ import annotations

import pytest

from docs import generate_features
from pipeline.engines import ENGINES
from pipeline.engines.feature import SUPPORTED
from pipeline.request import FEATURES


def test_the_page_is_current() -> None:
    text = generate_features.PAGE.read_text(encoding="utf-8")
    assert generate_features.page(text) == text


def test_every_feature_and_engine_has_its_place() -> None:
    head, _, *rows = generate_features.table().splitlines()
    assert {name.split()[0] for name in SUPPORTED} == set(ENGINES)
    assert [cell.strip(" `") for cell in head.strip("|").split("|")][2:] == list(SUPPORTED)
    assert [row.split("`")[1] for row in rows] == list(FEATURES)
    said = {row.split("`")[1]: [cell.strip() for cell in row.strip("|").split("|")][2:] for row in rows}
    for at, has in enumerate(SUPPORTED.values()):
        assert {name for name, marks in said.items() if marks[at] == "yes"} == has


def test_what_lies_around_the_table_stays() -> None:
    begin, end = generate_features.BEGIN, generate_features.END
    made = generate_features.page(f"above\n{begin}\nold\n{end}\nbelow\n")
    assert made == f"above\n{begin}\n{generate_features.table()}\n{end}\nbelow\n"
    with pytest.raises(ValueError):
        generate_features.page("no marks")
