"""Writes the pages that are drawn from the code. With `--check`: names those that are not current, and exits with 1."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docs import generate_api, generate_configuration, generate_features, generate_handoff, generate_metrics

FOLDER = Path(__file__).parent
PAGES: dict[str, Callable[[str], str]] = {  # what a page becomes, from what it is
    "api.md": lambda _: generate_api.page(),
    "configuration.md": lambda _: generate_configuration.page(),
    "engines.md": generate_features.page,  # one table of it
    "handoff.md": lambda _: generate_handoff.page(),
    "metrics.md": lambda _: generate_metrics.page(),
}


def stale(folder: Path = FOLDER) -> dict[Path, str]:
    """Pages that are not current, with the text they should have."""
    found = {}
    for name, draw in PAGES.items():
        path = folder / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (wanted := draw(text)) != text:
            found[path] = wanted
    return found


def main(arguments: list[str]) -> int:
    pages = stale()
    if "--check" in arguments:
        for path in pages:
            print(f"{path.name} is not current: run `make docs`")
        return 1 if pages else 0
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
