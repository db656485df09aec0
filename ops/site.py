"""Hook of the documentation's site: pages that the navigation does not name are put under "More", so none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

MORE = "More"


def on_config(config: Any) -> Any:
    """MkDocs calls this once its settings are read."""
    pages = {str(path.relative_to(config["docs_dir"])) for path in Path(config["docs_dir"]).rglob("*.md")}
    left = sorted(name for name in pages - set(_named(config["nav"])) if not name.startswith("decisions/"))
    if left:
        config["nav"] = [*config["nav"], {MORE: left}]
    return config


def _named(nav: Any) -> Iterator[str]:
    """Every page in a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for below in nav.values():
            yield from _named(below)
    else:
        for one in nav:
            yield from _named(one)
