"""Stub of SGLang's kernels, for tests on a CPU: every name imports, and calling one says which kernel is missing.

SGLang imports its kernels at module level and falls back to its own PyTorch code on a CPU, so none is called but one:
the hash behind seeded draws, for which it has no fallback. That one is here in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.4.10"  # SGLang compares it with the oldest it accepts
_MASK = 0xFFFFFFFF


def murmur_hash32_cpu(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit, seed 0; Appleby 2011) of 16 bytes: 64-bit seed, 32-bit position, 32-bit column.

    `seeds` and `positions` `(n,)`, `columns` `(m,)`, to `(n, m)` uint32.
    """
    rows = seeds.to(torch.int64)[:, None]
    blocks = (rows & _MASK, (rows >> 32) & _MASK, positions.to(torch.int64)[:, None], columns.to(torch.int64)[None])
    state = torch.zeros((len(seeds), len(columns)), dtype=torch.int64)
    for block in blocks:
        mixed = _rotate(block * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
        state = _rotate(state ^ mixed, 13) * 5 + 0xE6546B64 & _MASK
    state ^= 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & _MASK
    return (state ^ state >> 16).to(torch.uint32)


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value << bits | value >> 32 - bits) & _MASK


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: this is the stub for tests on a CPU")

    missing.__name__ = name
    return missing
