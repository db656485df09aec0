"""Tiny checkpoints that a test may break: a fresh copy each time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.sample import tiny

Copy = Callable[..., Path]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("originals")
    return {arch: tiny.write(arch, made / arch) for arch in tiny.ARCHS}


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Copy:
    """`copy(arch, name="copy", field=value, ...)`: a copy whose config.json has the fields set, or without (...)."""

    def make(arch: str = "llama", name: str = "copy", **fields: object) -> Path:
        target = Path(shutil.copytree(originals[arch], tmp_path / name))
        edit(target / "config.json", **fields)
        return target

    return make


def edit(path: Path, **fields: object) -> None:
    """Set fields of a JSON object in a file; `...` removes one."""
    value: dict[str, Any] = json.loads(path.read_text())
    value |= {name: new for name, new in fields.items() if new is not ...}
    for name in [name for name, new in fields.items() if new is ...]:
        value.pop(name, None)
    path.write_text(json.dumps(value))
