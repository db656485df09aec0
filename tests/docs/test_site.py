"""The documentation builds as a site without a warning, and holds every page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate_api
from ops import site


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", "ops/mkdocs.yml"]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)], capture_output=True, text=True, check=False, timeout=240, env=environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_page_is_in_it_and_in_the_navigation(built: Path) -> None:
    start = (built / "index.html").read_text(encoding="utf-8")
    for path in sorted(Path("docs").glob("*.md")):
        name = path.stem
        assert (built / ("" if name == "index" else name) / "index.html").exists(), name
        assert name == "index" or f'href="{name}/"' in start, name


def test_nothing_is_fetched_from_elsewhere(built: Path) -> None:
    """But for the drawing of Mermaid diagrams, on the one page that has some."""
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text, page
        assert 'rel="stylesheet" href="http' not in text, page


def test_pages_that_nobody_named_are_put_under_more(tmp_path: Path) -> None:
    for name in ("index.md", "new.md", "decisions/0001.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = {"docs_dir": str(tmp_path), "nav": [{"Home": "index.md"}]}
    assert site.on_config(config)["nav"] == [{"Home": "index.md"}, {"More": ["new.md"]}]
    assert site.on_config(config | {"nav": ["index.md", {"x": ["new.md"]}]})["nav"][-1] == {"x": ["new.md"]}


def test_the_page_of_the_api_is_current_and_has_every_path() -> None:
    text = generate_api.page()
    assert generate_api.PAGE.read_text(encoding="utf-8") == text
    for path, methods in generate_api.document()["paths"].items():
        assert all(f"`{method.upper()} {path}`" in text for method in methods)


def test_a_row_of_the_api_says_type_bounds_and_default() -> None:
    schema = {
        "required": ["a"],
        "properties": {
            "a": {"type": "integer", "minimum": 1, "exclusiveMaximum": 9},
            "b": {"anyOf": [{"type": "array", "items": {"$ref": "#/x/Part"}, "maxItems": 3}, {"type": "null"}]},
            "c": {"enum": ["x", "y"], "default": "x"},
            "d": {"type": "boolean", "default": False},
        },
    }
    assert generate_api.table(schema)[2:] == [
        "| `a` | integer, at least 1, below 9 | required |",
        "| `b` | list of [Part](#part), items at most 3 |  |",
        "| `c` | `x` or `y` | default `x` |",
        "| `d` | boolean | default `false` |",
    ]
