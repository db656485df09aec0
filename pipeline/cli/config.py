"""Config: from a file, the environment and the command line to one `Settings`.

Later sources win: file, then `CROSSFILL_<SECTION>__<FIELD>`, then flags. Whatever is wrong is named by its key and
by where it came from. Relative paths are relative to the working directory, in every source alike.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.settings import Settings

PREFIX = "CROSSFILL_"
DEFAULT_FILE = Path("crossfill.toml")
Tree: TypeAlias = dict[str, Any]


def load(file: Path | None, environ: Mapping[str, str], flags: Tree | None = None) -> Settings:
    """Settings of `file` (TOML, or the JSON that `save` wrote; None: defaults only). Raises ConfigError."""
    tree = merge(read(file) if file else {}, from_environment(environ))
    return validate(merge(tree, flags or {}), source=str(file) if file else "the defaults")


def find(file: Path | None) -> Path | None:
    """The file that was asked for, else `crossfill.toml` of the working directory, else None."""
    if file is not None:
        return file
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def read(file: Path) -> Tree:
    try:
        text = file.read_text(encoding="utf-8")
        tree = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # both decoders' errors and a bad UTF-8 sequence
        raise ConfigError(f"{file} is not valid {file.suffix.lstrip('.') or 'toml'}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a table of sections")
    return tree


def save(settings: Settings, file: Path) -> None:
    """Write settings for child processes. Mode 0600: a broker URL may hold a password."""
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(settings.model_dump_json(indent=2, exclude_unset=True), encoding="utf-8")


def from_environment(environ: Mapping[str, str]) -> Tree:
    """`CROSSFILL_BROKER__URL=x` is `{"broker": {"url": "x"}}`. Names without `__` are no settings: left alone."""
    tree: Tree = {}
    for name, value in sorted(environ.items()):
        path = name.removeprefix(PREFIX).lower().split("__")
        if not name.startswith(PREFIX) or len(path) < 2:
            continue
        if path[0] == "workers":
            raise ConfigError(f"{name}: workers are a list; set them in the file, or run `crossfill worker` with flags")
        tree = merge(tree, _nest(path, value))
    return tree


def _nest(path: list[str], value: str) -> Tree:
    head, *rest = path
    return {head: _nest(rest, value) if rest else value}


def merge(base: Tree, over: Tree) -> Tree:
    """A new tree: tables are merged key by key, anything else of `over` replaces."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def validate(tree: Tree, source: str) -> Settings:
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"in {source} or what overrides it: {_problems(error)}") from None
    names = [worker.name for worker in settings.workers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"workers: the name {twice[0]!r} is used twice; a replica's name must be unique")
    return settings


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{_key(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False))


def _key(location: tuple[int | str, ...]) -> str:
    """`workers[1].slots` of ("workers", 1, "slots")."""
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return key
