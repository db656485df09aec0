"""Lets a torchvision that is linked to CUDA be imported beside a PyTorch for the CPU.

Its import fails because two operators of its missing library are not defined. This defines their signatures, without
any code behind them, right before that import; a `.pth` file beside it loads it at interpreter start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class OperatorFinder(MetaPathFinder):
    """Finds nothing. Being asked for `torchvision`, it defines the operators and steps aside."""

    def __init__(self) -> None:
        self.library: object = None  # the definitions live as long as this

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self.library is None:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library = library
        return None


sys.meta_path.insert(0, OperatorFinder())
