"""Identity: a checkpoint's contract, and what makes two checkpoints differ, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint import tokenizer
from pipeline.checkpoint.config import ModelConfig, read_config
from pipeline.checkpoint.tensor import entries
from pipeline.checkpoint.weight import cache_directory, tensor_digests, weights_digest
from pipeline.contract import Contract
from pipeline.errors import ConfigError

# Which ids end a text travels with each request, and a replica may serve a shorter context: neither changes KV.
_NOT_KV = ("context_length", "eos_token_ids")


class Difference(NamedTuple):
    """`where` is `config.<field>`, `weights.<tensor>` or `tokenizer.<entry>`; None: absent on that side."""

    where: str
    ours: object
    theirs: object


def read_contract(directory: Path, *, context_length: int | None = None, cache: Path | None = None) -> Contract:
    """The contract of the checkpoint in `directory`. Hashes all weights the first time, then remembers.

    `context_length` may shorten the checkpoint's own; `cache` is by default `$CROSSFILL_CACHE` or the user's cache
    directory. Raises UnsupportedModelError for what the engines cannot share, else ConfigError.
    """
    config = read_config(directory)
    tokens = tokenizer.tokenizer_digest(directory)
    return Contract(
        weights=weights_digest(tensor_digests(directory, config, cache or cache_directory())),
        tokenizer=tokens,
        config=config_digest(config),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=_context(config, context_length),
    )


def require_complete(directory: Path) -> None:
    """Raise ConfigError unless config, tokenizer and every tensor are there and fit; no weight is read."""
    entries(directory, read_config(directory))
    tokenizer.read_tokenizer(directory)


def config_digest(config: ModelConfig) -> str:
    """Hex SHA-256 over the fields that decide KV, however `config.json` spells them."""
    return hashlib.sha256(json.dumps(_kv_fields(config), sort_keys=True).encode()).hexdigest()


def differences(ours: Path, theirs: Path, *, cache: Path | None = None) -> list[Difference]:
    """Everything that makes the contracts of two checkpoint directories differ. Raises as `read_contract`."""
    a, b = read_config(ours), read_config(theirs)
    found = list(_of_fields(_kv_fields(a), _kv_fields(b), "config"))
    where = cache or cache_directory()
    found += _of_fields(tensor_digests(ours, a, where), tensor_digests(theirs, b, where), "weights")
    forms = (tokenizer.read_tokenizer(ours), tokenizer.read_tokenizer(theirs))
    return found + [Difference(f"tokenizer.{name}", x, y) for name, x, y in tokenizer.differences(*forms)]


def _context(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.context_length
    if not 0 < wanted <= config.context_length:
        raise ConfigError(
            f"context_length {wanted} is not in 1..{config.context_length}: the checkpoint allows no more"
        )
    return wanted


def _kv_fields(config: ModelConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in _NOT_KV}


def _of_fields(ours: Mapping[str, object], theirs: Mapping[str, object], part: str) -> Iterator[Difference]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            yield Difference(f"{part}.{name}", ours.get(name), theirs.get(name))
