"""Contract: identity and shape of the KV that two engines may exchange.

Two replicas hand over only when every field but `context_length` is equal; a mismatch names the fields before
any byte moves. Reading a checkpoint into a contract is `checkpoint`'s work, not done here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache

from pipeline.errors import ContractMismatchError
from pipeline.page import PAGE_TOKENS, PageShape

WIRE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Contract:
    """Hex SHA-256 digests of weights, tokenizer and the KV-relevant config fields, and the shape of a page."""

    weights: str
    tokenizer: str
    config: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    dtype: str = "float16"
    page_tokens: int = PAGE_TOKENS
    wire_version: int = WIRE_VERSION

    @property
    def page_shape(self) -> PageShape:
        return PageShape(self.layers, self.kv_heads, self.head_dim)

    @property
    def digest(self) -> str:
        """Hex SHA-256 over every field that must agree; names queues (first 8 digits) and seeds the prefix chain."""
        return _digest(self)


@lru_cache(maxsize=64)  # asked for every replica and request; a process sees a handful of contracts
def _digest(contract: Contract) -> str:
    return hashlib.sha256(json.dumps(_shared(contract), sort_keys=True).encode()).hexdigest()


def _shared(contract: Contract) -> dict[str, object]:
    fields = asdict(contract)
    del fields["context_length"]  # a replica may serve a shorter context of the same model
    return fields


def differences(ours: Contract, theirs: Contract) -> dict[str, tuple[object, object]]:
    """Fields that differ, as name -> (ours, theirs). Empty when the two may hand over."""
    a, b = _shared(ours), _shared(theirs)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def require_equal(ours: Contract, theirs: Contract) -> None:
    """Raise ContractMismatchError naming every field that differs."""
    if found := differences(ours, theirs):
        raise ContractMismatchError(found)


@lru_cache(maxsize=64)
def encode(contract: Contract) -> str:
    return json.dumps(asdict(contract), sort_keys=True)


def decode(text: str | bytes) -> Contract:
    """Raises TypeError or ValueError when `text` is not a contract; unknown fields are refused."""
    return Contract(**json.loads(text))
