"""Prefix chain: the content address of every page of a prompt.

`key[i] = SHA-256(key[i-1] || token ids of page i as uint32 little-endian)`, seeded with the contract digest
and the salt: equal keys mean the same model, tenant and whole prefix. The partial tail is shorter, so its key
differs from that of the full page by construction. About 1 us a page; must not know engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pipeline.page import PAGE_TOKENS


def seed(contract_digest: str, salt: str) -> bytes:
    """The link before page 0. `salt` keeps tenants apart: no page sharing, no timing leak."""
    return hashlib.sha256(f"crossfill/1\0{contract_digest}\0{salt}".encode()).digest()


def chain(start: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """One 32-byte key per page of `token_ids`, the partial tail included."""
    ids = np.asarray(token_ids, dtype="<u4").tobytes()
    keys, link = [], start
    for at in range(0, len(ids), 4 * PAGE_TOKENS):
        link = hashlib.sha256(link + ids[at : at + 4 * PAGE_TOKENS]).digest()
        keys.append(link)
    return keys


def prompt_digest(start: bytes, token_ids: Sequence[int]) -> bytes:
    """What P and D compare: the last link of the chain over the whole prompt."""
    return chain(start, token_ids)[-1]
