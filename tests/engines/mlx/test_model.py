from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline import checkpoint
from pipeline.errors import UnsupportedModelError

pytest.importorskip("mlx.core", exc_type=ImportError)

import mlx.core as mx

from pipeline.engines.mlx.model import load


def weights(module: object) -> dict[str, object]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(module.parameters()))  # type: ignore[attr-defined]


def as_bf16(source: Path, target: Path, *, scale: float = 1.0) -> Path:
    """The checkpoint in BF16, its final norm multiplied by `scale`."""
    shutil.copytree(source, target)
    tensors = {name: value.astype(mx.bfloat16) for name, value in mx.load(str(target / "model.safetensors")).items()}
    tensors["model.norm.weight"] = (tensors["model.norm.weight"] * scale).astype(mx.bfloat16)
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return target


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_are_those_of_the_checkpoint(llama: Path, dtype: str) -> None:
    model = load(llama, checkpoint.read_contract(llama), dtype)  # type: ignore[arg-type]
    ours, expected = weights(model.module), dict(checkpoint.load_tensors(llama))
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        array = np.array(ours[name])
        assert array.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(array, value)


def test_bf16_means_its_fp16_rounding(llama: Path, tmp_path: Path) -> None:
    directory = as_bf16(llama, tmp_path / "bf16")
    model = load(directory, checkpoint.read_contract(directory), "float32")
    ours = weights(model.module)
    for name, value in checkpoint.load_tensors(directory):
        np.testing.assert_array_equal(np.array(ours[name]), value)


def test_an_overflow_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    directory = as_bf16(llama, tmp_path / "large", scale=1e6)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight"):
        load(directory, checkpoint.read_contract(llama), "float32")


def test_sizes(llama: Path) -> None:
    contract = checkpoint.read_contract(llama)
    single, half = load(llama, contract, "float32"), load(llama, contract, "float16")
    assert half.token_bytes * 64 == contract.page_shape.page_bytes
    assert single.token_bytes == 2 * half.token_bytes


def test_a_cpu_computes_in_fp32_by_default(llama: Path) -> None:
    model = load(llama, checkpoint.read_contract(llama), "auto")
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert (model.dtype, model.queues) == ((mx.float32, False) if on_cpu else (mx.float16, True))


def test_importing_the_engine_keeps_the_limit_of_open_files() -> None:
    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE); import pipeline.engines.mlx;"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
