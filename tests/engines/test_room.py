"""Out of memory, before or after it happened: what an operator is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import engines
from pipeline.engines.room import shortage
from pipeline.errors import ConfigError
from pipeline.settings import EngineSettings

GIB = 1 << 30


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights of 3 GiB in two files, and what does not count."""
    for name, size in (("model-1.safetensors", 2 * GIB), ("model-2.safetensors", GIB), ("tokenizer.json", 9 * GIB)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # sparse
    return tmp_path


def test_what_fits_is_not_short(checkpoint: Path) -> None:
    assert shortage(checkpoint, 5 * GIB, 8 * GIB) is None


def test_a_pool_that_is_too_large_is_named_with_what_to_change(checkpoint: Path) -> None:
    assert shortage(checkpoint, 6 * GIB, 8 * GIB) == (
        "out of memory: 3.0 GiB of weights and kv_cache_bytes of 6.0 GiB do not fit the 8.0 GiB that are free: "
        "lower kv_cache_bytes or free memory"
    )


def test_weights_that_are_too_large_need_another_device(checkpoint: Path) -> None:
    assert str(shortage(checkpoint, GIB, 3 * GIB)).endswith(
        "kv_cache_bytes of 1.0 GiB do not fit the 3.0 GiB that are free: this model needs a larger device"
    )


def test_an_mlx_pool_larger_than_the_gpu_does_not_start(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    for key in ("free_memory", "memory_size"):
        monkeypatch.setattr(mx, "device_info", lambda key=key: {key: GIB})
        with pytest.raises(ConfigError, match=r"kv_cache_bytes of 2\.0 GiB do not fit the 1\.0 GiB"):
            engines.load("mlx", checkpoints["llama"], EngineSettings(kv_cache_bytes=2 * GIB))


def test_engines_that_take_no_arguments_say_so(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="reference takes none"):
        engines.load("reference", checkpoints["llama"], EngineSettings(arguments={"x": 1}))
