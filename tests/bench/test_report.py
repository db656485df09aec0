"""What was to be reached, as tables and results tell it."""

from __future__ import annotations

import json
from importlib import metadata

from bench.report import Target, machine, rows


def test_a_target_says_which_side_is_good() -> None:
    assert Target("rate", 0.4, 0.35, "x", at_least=True).reached
    assert not Target("rate", 0.34, 0.35, "x", at_least=True).reached
    assert Target("added", 25.0, 25.0, "ms").reached
    assert not Target("added", 25.1, 25.0, "ms").reached


def test_a_row_of_a_result() -> None:
    assert rows([Target("rate", 1 / 3, 0.35, "x", at_least=True)]) == [
        {"what": "rate", "measured": 0.3333, "target": ">= 0.35", "unit": "x", "reached": False}
    ]


def test_the_machine_line_tells_the_load_and_every_version() -> None:
    found = machine()
    load = found["load_average"]
    assert isinstance(load, list)
    assert len(load) == 3
    assert metadata.version("redis") in json.dumps(found["versions"])
