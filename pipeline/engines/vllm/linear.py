"""Linear layers of vLLM's CPU build, widened to FP32 where the processor has no FP16 kernel.

Without AVX-512 a half-precision product runs element by element: 30 ms where FP32 takes 4. Weights are copied once
(twice their FP16 size); inputs and outputs stay FP16, and so does the KV. Nothing here is used on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


def wanted(compute_dtype: Literal["auto", "float16", "float32"]) -> bool:
    """Whether FP32 products are asked for, or are the faster ones on this processor."""
    import torch

    if compute_dtype == "auto":
        return not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return compute_dtype == "float32"


def widen(model: torch.nn.Module) -> int:
    """Replace the product of every FP16 linear layer; returns how many. vLLM keeps it in `cpu_linear` of the layer."""

    layers = [module for module in model.modules() if _is_half_linear(module)]
    widened: dict[int, torch.Tensor] = {}  # tied weights are copied once
    for layer in layers:
        weight: Any = layer.weight
        if weight.data_ptr() not in widened:
            widened[weight.data_ptr()] = weight.detach().float()
        layer.cpu_linear = _product(widened[weight.data_ptr()])
    return len(layers)


def _is_half_linear(module: Any) -> bool:
    import torch

    weight: Any = getattr(module, "weight", None)
    return callable(getattr(module, "cpu_linear", None)) and weight.ndim == 2 and weight.dtype is torch.float16


def _product(wide: torch.Tensor) -> Any:
    import torch

    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), wide, None if bias is None else bias.float()).to(x.dtype)

    return apply
