"""Directory: a checkpoint appears whole or not at all.

Files are written into a temporary directory beside the target, which is renamed over at the end. A directory that
holds something else than a checkpoint is never replaced.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import ConfigError


@contextmanager
def replace(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` when the block ends well, and disappears when it raises.

    Raises ConfigError when `target` exists and is no checkpoint directory.
    """
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh, old = work / "fresh", work / "old"
        fresh.mkdir()
        yield fresh
        _swap(fresh, target, old)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _swap(fresh: Path, target: Path, old: Path) -> None:
    """POSIX renames a directory over an empty one only, so what is there moves away first, and back on failure."""
    with suppress(FileNotFoundError):
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def _require_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file: name a directory for the checkpoint")
    if any(target.iterdir()) and not (target / "config.json").is_file():
        raise ConfigError(f"{target} holds something that is not a checkpoint: name another directory")


def write_json(path: Path, value: object) -> None:
    """Sorted keys and a final newline: equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
