"""Stub of SGLang's CUDA kernels, for tests on a CPU: every name imports, and calling one says which kernel is missing.

SGLang imports its kernels at module level and falls back to its own PyTorch code on a CPU, so none is ever called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"  # SGLang compares it with the oldest it accepts


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: this is the stub for tests on a CPU")

    missing.__name__ = name
    return missing
