"""Tensor: values against the safetensors library, BF16 against Python's own float packing, and every refusal."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pipeline.checkpoint.config import read_config
from pipeline.checkpoint.tensor import Entry, chunks, entries, load_tensors, shapes
from pipeline.errors import ConfigError, UnsupportedModelError
from tests.checkpoint.conftest import Copy

WEIGHTS = "model.safetensors"


def write_raw(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file by hand, for types that numpy does not know."""
    header, data = {}, b""
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def bf16_entry(path: Path, bits: list[int]) -> Entry:
    path.write_bytes(struct.pack(f"<{len(bits)}H", *bits))
    return Entry("w", "BF16", (len(bits),), path, 0, 2 * len(bits))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_values_equal_the_library_s(originals: dict[str, Path], arch: str) -> None:
    found = dict(load_tensors(originals[arch]))
    expected = load_file(originals[arch] / WEIGHTS)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float16
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_expected_shapes_are_those_of_the_samples(originals: dict[str, Path], arch: str) -> None:
    written = {name: values.shape for name, values in load_file(originals[arch] / WEIGHTS).items()}
    assert shapes(read_config(originals[arch])) == written


def test_biases_of_a_llama_are_expected_where_its_config_says_so(copy: Copy) -> None:
    found = shapes(read_config(copy(attention_bias=True, mlp_bias=True)))
    biases = {
        name.removeprefix("model.layers.1."): shape for name, shape in found.items() if "1." in name and "bias" in name
    }
    assert biases == {
        "self_attn.q_proj.bias": (128,),
        "self_attn.k_proj.bias": (64,),
        "self_attn.v_proj.bias": (64,),
        "self_attn.o_proj.bias": (128,),
        "mlp.gate_proj.bias": (256,),
        "mlp.up_proj.bias": (256,),
        "mlp.down_proj.bias": (128,),
    }


def test_a_sharded_checkpoint_gives_the_same_tensors(copy: Copy) -> None:
    directory = copy("qwen3")
    whole = dict(load_tensors(directory))
    shard(directory, 3)
    sharded = dict(load_tensors(directory))
    assert sharded.keys() == whole.keys()
    assert all(np.array_equal(sharded[name], whole[name]) for name in whole)


def shard(directory: Path, count: int) -> None:
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    weight_map: dict[str, str] = {}
    for number in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[number::count]}
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@settings(deadline=None)
@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=50))
def test_bf16_rounds_as_python_does(tmp_path_factory: pytest.TempPathFactory, bits: list[int]) -> None:
    entry = bf16_entry(tmp_path_factory.mktemp("bf16") / "w", bits)
    try:
        # struct packs "e" from a double, rounding to nearest even, and raises where FP16 overflows.
        wide = [struct.unpack("<f", struct.pack("<I", each << 16))[0] for each in bits]
        expected = None if not np.isfinite(wide).all() else b"".join(struct.pack("<e", each) for each in wide)
    except OverflowError:
        expected = None
    if expected is None:
        with pytest.raises(UnsupportedModelError) as caught:
            list(chunks(entry))
        assert caught.value.field == "w"
    else:
        assert b"".join(part.tobytes() for part in chunks(entry)) == expected


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("BF16", 0x4780, "above 65504"),  # 65536.0
        ("BF16", 0x7F80, "NaN or Inf"),
        ("BF16", 0x7FC0, "NaN or Inf"),
        ("F16", 0x7C00, "NaN or Inf"),
        ("F16", 0xFE00, "NaN or Inf"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, dtype: str, bits: int, value: str) -> None:
    entry = bf16_entry(tmp_path / "w", [0x3C00, bits])._replace(dtype=dtype)
    with pytest.raises(UnsupportedModelError) as caught:
        list(chunks(entry))
    assert (caught.value.field, caught.value.value) == ("w", value)


def test_large_tensors_come_in_pieces_of_8_mib(tmp_path: Path) -> None:
    values = np.arange(9 << 20, dtype=np.uint32).astype("<u2") & 0x3FFF
    (tmp_path / "w").write_bytes(values.tobytes())
    parts = list(chunks(Entry("w", "F16", values.shape, tmp_path / "w", 0, values.nbytes)))
    assert [part.size for part in parts] == [4 << 20, 4 << 20, 1 << 20]
    np.testing.assert_array_equal(np.concatenate(parts).view(np.uint16), values)


def test_a_bf16_checkpoint_loads_as_fp16(copy: Copy) -> None:
    directory = copy()
    tensors = load_file(directory / WEIGHTS)
    bits = {name: (values.astype("<f4").view("<u4") >> 16).astype("<u2") for name, values in tensors.items()}
    write_raw(directory / WEIGHTS, {n: ("BF16", list(b.shape), b.tobytes()) for n, b in bits.items()})
    found = dict(load_tensors(directory))
    for name, kept in bits.items():
        expected = (kept.astype("<u4") << 16).view("<f4")  # 8 bits of mantissa: exact in FP16 at these sizes
        np.testing.assert_array_equal(found[name].astype("<f4"), expected.astype("<f2").astype("<f4"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"extra.weight": np.zeros(3, np.float16)}, "extra.weight"),
        ({"model.norm.weight": np.zeros(3, np.float16)}, "model.norm.weight"),
        ({"model.norm.weight": np.zeros(128, np.float32)}, "model.norm.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(128, np.float16)}, "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    copy: Copy, change: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]], field: str
) -> None:
    directory = copy()
    save_file(load_file(directory / WEIGHTS) | change, directory / WEIGHTS)
    with pytest.raises(UnsupportedModelError) as caught:
        list(load_tensors(directory))
    assert caught.value.field == field


def test_mixed_types_are_refused(copy: Copy) -> None:
    directory = copy()
    tensors = {n: ("F16", list(v.shape), v.tobytes()) for n, v in load_file(directory / WEIGHTS).items()}
    tensors["model.norm.weight"] = ("BF16", [128], b"\x80\x3f" * 128)
    write_raw(directory / WEIGHTS, tensors)
    with pytest.raises(UnsupportedModelError) as caught:
        list(load_tensors(directory))
    assert caught.value.field == "dtype"
    assert "model.norm.weight" in str(caught.value)


def test_tensors_that_every_engine_drops_are_dropped(copy: Copy) -> None:
    directory = copy("qwen2")
    tensors = load_file(directory / WEIGHTS)
    unused = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
    }
    save_file(tensors | unused, directory / WEIGHTS)
    assert {name for name, _ in load_tensors(directory)} == tensors.keys()


def test_a_missing_tensor_is_named(copy: Copy) -> None:
    directory = copy()
    tensors = load_file(directory / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(ConfigError, match=r"1 tensors are missing, first model\.layers\.1\.mlp\.up_proj\.weight"):
        list(load_tensors(directory))


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1])
def test_a_truncated_file_is_refused(copy: Copy, keep: int) -> None:
    directory = copy()
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        entries(directory, read_config(directory))


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 18) + b'{"model.norm":null}',
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 68) + b'{"model.norm.weight":{"dtype":"F16","shape":[1],"data_offsets":[2,0]}}',
    ],
)
def test_what_is_no_safetensors_file_is_refused(copy: Copy, content: bytes) -> None:
    directory = copy()
    (directory / WEIGHTS).write_bytes(content)
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        entries(directory, read_config(directory))


def test_files_that_some_engines_would_load_are_refused(copy: Copy) -> None:
    directory = copy()
    (directory / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"also holds consolidated\.safetensors"):
        entries(directory, read_config(directory))


def test_a_missing_shard_is_named(copy: Copy) -> None:
    directory = copy()
    shard(directory, 2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002"):
        entries(directory, read_config(directory))


def test_a_tensor_in_two_shards_is_refused(copy: Copy) -> None:
    directory = copy()
    shard(directory, 2)
    first = directory / "model-00001-of-00002.safetensors"
    second = directory / "model-00002-of-00002.safetensors"
    twice = next(iter(load_file(first)))
    save_file(load_file(second) | {twice: load_file(first)[twice]}, second)
    with pytest.raises(ConfigError, match="keep one of them"):
        entries(directory, read_config(directory))


def test_weights_in_another_format_are_explained(copy: Copy) -> None:
    directory = copy()
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="convert its weights"):
        entries(directory, read_config(directory))
