"""Weight: SHA-256 digests of a checkpoint's tensors, remembered per file.

A tensor's digest covers its effective FP16 bytes, so a BF16 checkpoint and its FP16 cast agree, and sharding does not
count. Hashing reads every byte once (a second or two per GB); the cache is keyed by what changes when a file does.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, cast

from pipeline.checkpoint.config import ModelConfig
from pipeline.checkpoint.tensor import Entry, chunks, entries
from pipeline.errors import ConfigError

_CACHE_VERSION = 1  # raise it when a digest comes to mean something else


class TensorDigest(NamedTuple):
    shape: tuple[int, ...]
    sha256: str


def cache_directory() -> Path:
    """`$CROSSFILL_CACHE`, else `crossfill` in `$XDG_CACHE_HOME`, else `~/.cache/crossfill`."""
    if named := os.environ.get("CROSSFILL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossfill"


def tensor_digests(directory: Path, config: ModelConfig, cache: Path) -> dict[str, TensorDigest]:
    """Name -> digest of every tensor. Raises as `load_tensors`; an unwritable cache only costs time."""
    found: dict[str, TensorDigest] = {}
    for file, group in groupby(entries(directory, config), key=lambda entry: entry.file):
        found |= _of_file(file, list(group), cache)
    return found


def weights_digest(tensors: Mapping[str, TensorDigest]) -> str:
    """Hex SHA-256 over name, shape and digest of all tensors, in the order of their names."""
    lines = (f"{name} F16 {list(tensor.shape)} {tensor.sha256}\n" for name, tensor in sorted(tensors.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _of_file(file: Path, held: list[Entry], cache: Path) -> dict[str, TensorDigest]:
    identity = _identity(file)
    record = cache / f"weights-{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
    digests = _recall(record, identity)
    if digests is None or not {entry.name for entry in held} <= digests.keys():
        digests = dict(_hash(held))
        if _identity(file) != identity:
            raise ConfigError(f"{file} changed while it was read: start again when nothing writes to it")
        _remember(record, identity, digests)
    return {entry.name: TensorDigest(entry.shape, digests[entry.name]) for entry in held}


def _hash(held: list[Entry]) -> Iterator[tuple[str, str]]:
    for entry in held:
        digest = hashlib.sha256()
        for values in chunks(entry):
            digest.update(values.tobytes())
        yield entry.name, digest.hexdigest()


def _identity(file: Path) -> list[object]:
    """Changes whenever the bytes may have: the change time catches copies that keep size and modification time."""
    state = file.stat()
    return [_CACHE_VERSION, str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _recall(record: Path, identity: list[object]) -> dict[str, str] | None:
    try:
        stored = json.loads(record.read_bytes())
        return cast(dict[str, str], stored["tensors"]) if stored["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: hash again


def _remember(record: Path, identity: list[object], digests: dict[str, str]) -> None:
    """Written beside and renamed: of several processes the last one wins with a whole file."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, prefix=".weights-", delete=False) as file:
            json.dump({"identity": identity, "tensors": digests}, file)
        Path(file.name).replace(record)
    except OSError:
        return
