"""Widened products against torch's own in double precision."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")
torch: Any = pytest.importorskip("torch")

from pipeline.engines.vllm import linear  # noqa: E402


class Layer(torch.nn.Module):
    """What vLLM leaves on a layer: its weight and the product it would use."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 32).to(dtype), requires_grad=False)
        self.cpu_linear = torch.nn.functional.linear


def test_products_are_computed_in_fp32_and_returned_in_fp16() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Layer(torch.float16), torch.nn.LayerNorm(32).half(), Layer(torch.float32)])
    assert linear.widen(model) == 1
    layer, x, bias = model[0], torch.randn(5, 32).half(), torch.randn(48).half()
    got = layer.cpu_linear(x, layer.weight, bias)
    exact = (x.double() @ layer.weight.double().T + bias.double()).half()
    assert got.dtype is torch.float16
    assert torch.equal(got, exact) or (got - exact).abs().max() <= 2**-9 * exact.abs().max()
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), (x.float() @ layer.weight.float().T).half())


@pytest.mark.parametrize(("asked", "answer"), [("float32", True), ("float16", False)])
def test_the_setting_decides(asked: str, answer: bool) -> None:
    assert linear.wanted(asked) is answer  # type: ignore[arg-type]


def test_tied_weights_are_copied_once() -> None:
    first, second = Layer(torch.float16), Layer(torch.float16)
    second.weight = first.weight
    assert linear.widen(torch.nn.ModuleList([first, second])) == 2
    assert first.cpu_linear.__closure__[0].cell_contents is second.cpu_linear.__closure__[0].cell_contents
