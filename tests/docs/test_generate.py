"""The pages drawn from the code: written, then current; touched, then named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from docs import generate


def test_every_page_is_current() -> None:
    assert generate.stale() == {}


@pytest.mark.parametrize("name", sorted(generate.PAGES))
def test_a_page_that_was_touched_is_found(name: str, tmp_path: Path) -> None:
    for page in generate.PAGES:
        shutil.copy(generate.FOLDER / page, tmp_path)
    path = tmp_path / name
    text = path.read_text(encoding="utf-8")
    touched = text.replace("| yes", "| no", 1) if name == "engines.md" else text.replace("| `", "| x`", 1)
    path.write_text(touched.replace("| created", "| born", 1), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    assert generate.stale(tmp_path) == {path: text}
