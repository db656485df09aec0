"""Tokenizer: what of `tokenizer.json` decides token ids, in one canonical form.

Counted: normaliser, pre-tokenizer, model, post-processor, added and special tokens. Not counted: the decoder,
truncation and padding (ids in stay the same) and the chat template: only the API renders it, once, so a replica with
another template still computes the same KV for the same ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.checkpoint.config import read_json
from pipeline.errors import ConfigError

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor")


def read_tokenizer(directory: Path) -> dict[str, Any]:
    """The canonical form: sections, `model` settings, `vocab` text -> id, `merges` as pairs, `added` by id.

    Older files spell merges "a b" and leave defaults out; both spellings come out equal. A model without
    a vocabulary object (Unigram) is refused: none of the supported architectures has one.
    Raises ConfigError when `tokenizer.json` is missing or broken.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{directory} has no tokenizer.json: fetch it, or convert the older tokenizer into one")
    raw = read_json(path)
    try:
        return _canonical(raw)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} is not a tokenizer ({error!r}): fetch the checkpoint again") from error


def tokenizer_digest(directory: Path) -> str:
    """Hex SHA-256 of the canonical form. Raises ConfigError."""
    canonical = json.dumps(read_tokenizer(directory), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Entries of two canonical forms that differ, as (name, ours, theirs). Of the merges only the first."""
    for section in (*_SECTIONS, "model"):
        if ours[section] != theirs[section]:
            yield section, ours[section], theirs[section]
    for table in ("vocab", "added"):
        a, b = ours[table], theirs[table]
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                yield f"{table}[{key!r}]", a.get(key), b.get(key)
    yield from _first_merge(ours["merges"], theirs["merges"])


def chat_template(directory: Path) -> str | None:
    """The chat template of the checkpoint: its own file, else that of `tokenizer_config.json`, else None."""
    if (own := directory / "chat_template.jinja").exists():
        return own.read_text(encoding="utf-8")
    path = directory / "tokenizer_config.json"
    found = read_json(path).get("chat_template") if path.exists() else None
    return found if isinstance(found, str) else None


def _canonical(raw: dict[str, Any]) -> dict[str, Any]:
    model = dict(raw["model"])
    vocab, merges = model.pop("vocab"), model.pop("merges", [])
    return {
        **{section: raw.get(section) for section in _SECTIONS},
        # A default (false, null, "") that an older file leaves out means the same.
        "model": {name: value for name, value in sorted(model.items()) if value},
        "vocab": dict(vocab),
        "merges": [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in merges],
        "added": {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in raw["added_tokens"]},
    }


def _first_merge(ours: list[list[str]], theirs: list[list[str]]) -> Iterator[tuple[str, object, object]]:
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            yield f"merges[{rank}]", " ".join(a), " ".join(b)
            return
    if len(ours) != len(theirs):
        yield "merges", f"{len(ours)} merges", f"{len(theirs)} merges"
