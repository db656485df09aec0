"""Weight: what is written is what the safetensors library reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from pipeline.sample import weight


def test_the_library_reads_it_back(tmp_path: Path) -> None:
    tensors = {
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "a": np.arange(6, dtype=np.float16).reshape(2, 3).T,  # not contiguous
        "long.name.of.a.vector": np.array([-0.0, 65504.0, 6e-8], np.float16),
    }
    weight.save(tensors, tmp_path / "w")
    found = load_file(tmp_path / "w")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes()
    with safe_open(tmp_path / "w", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_data_is_aligned_and_order_does_not_count(tmp_path: Path) -> None:
    a, b = np.ones(3, np.float16), np.zeros(5, np.float16)
    weight.save({"a": a, "b": b}, tmp_path / "one")
    weight.save({"b": b, "a": a}, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert int.from_bytes((tmp_path / "one").read_bytes()[:8], "little") % 8 == 0
