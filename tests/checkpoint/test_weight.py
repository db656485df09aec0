"""Weight: digests against hashlib over the library's own reading, independent of sharding; the cache and its keys."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.checkpoint.config import read_config
from pipeline.checkpoint.weight import TensorDigest, cache_directory, tensor_digests, weights_digest
from pipeline.errors import UnsupportedModelError
from tests.checkpoint.conftest import Copy
from tests.checkpoint.test_tensor import WEIGHTS, shard, write_raw

ROOT = Path(__file__).parents[2]


def digests(directory: Path, cache: Path) -> dict[str, TensorDigest]:
    return tensor_digests(directory, read_config(directory), cache)


def overall(directory: Path, cache: Path) -> str:
    return weights_digest(digests(directory, cache))


def test_digests_are_sha256_of_the_values(originals: dict[str, Path], tmp_path: Path) -> None:
    expected = {
        name: TensorDigest(values.shape, hashlib.sha256(values.tobytes()).hexdigest())
        for name, values in load_file(originals["qwen2"] / WEIGHTS).items()
    }
    found = digests(originals["qwen2"], tmp_path)
    assert found == expected
    text = "".join(
        f"{n} F16 [{', '.join(map(str, expected[n].shape))}] {expected[n].sha256}\n" for n in sorted(expected)
    )
    assert weights_digest(found) == hashlib.sha256(text.encode()).hexdigest()


def test_sharding_does_not_count(copy: Copy, originals: dict[str, Path], tmp_path: Path) -> None:
    directory = copy()
    shard(directory, 2)
    assert overall(directory, tmp_path) == overall(originals["llama"], tmp_path)


def test_a_bf16_checkpoint_agrees_with_its_fp16_cast(copy: Copy, tmp_path: Path) -> None:
    half, brain = copy(name="half"), copy(name="brain", torch_dtype="bfloat16")
    bits = {n: (v.astype("<f4").view("<u4") >> 16).astype("<u2") for n, v in load_file(half / WEIGHTS).items()}
    write_raw(brain / WEIGHTS, {n: ("BF16", list(b.shape), b.tobytes()) for n, b in bits.items()})
    save_file({n: (b.astype("<u4") << 16).view("<f4").astype("<f2") for n, b in bits.items()}, half / WEIGHTS)
    assert overall(brain, tmp_path) == overall(half, tmp_path)


def test_one_changed_value_changes_exactly_its_tensor(copy: Copy, originals: dict[str, Path], tmp_path: Path) -> None:
    directory = copy()
    tensors = load_file(directory / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += np.float16(1)
    save_file(tensors, directory / WEIGHTS)
    ours, theirs = digests(originals["llama"], tmp_path), digests(directory, tmp_path)
    assert [name for name in ours if ours[name] != theirs[name]] == ["model.layers.1.mlp.up_proj.weight"]


def test_the_same_bytes_in_another_shape_differ() -> None:
    flat, square = TensorDigest((4,), "00"), TensorDigest((2, 2), "00")
    assert weights_digest({"w": flat}) != weights_digest({"w": square})


def test_the_second_reading_comes_from_the_cache(copy: Copy, tmp_path: Path) -> None:
    directory, cache = copy(), tmp_path / "cache"
    first = digests(directory, cache)
    (record,) = cache.iterdir()
    stored = json.loads(record.read_text())
    stored["tensors"]["model.norm.weight"] = "planted"
    record.write_text(json.dumps(stored))
    expected = first | {"model.norm.weight": TensorDigest((128,), "planted")}
    assert digests(directory, cache) == expected


def test_a_changed_file_of_the_same_size_and_time_is_hashed_again(copy: Copy, tmp_path: Path) -> None:
    directory, cache = copy(), tmp_path / "cache"
    before = digests(directory, cache)
    path = directory / WEIGHTS
    state, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 0x80  # the sign of the last value
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    after = digests(directory, cache)
    assert len([name for name in before if before[name] != after[name]]) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": [], "tensors": {}}'])
def test_a_damaged_record_is_replaced(copy: Copy, tmp_path: Path, content: str) -> None:
    directory, cache = copy(), tmp_path / "cache"
    expected = digests(directory, cache)
    (record,) = cache.iterdir()
    good = record.read_text()
    record.write_text(content)
    assert digests(directory, cache) == expected
    assert record.read_text() == good


def test_an_unwritable_cache_only_costs_time(copy: Copy, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    assert digests(copy(), blocked / "cache") == digests(tmp_path / "copy", tmp_path / "good")


def test_a_refused_checkpoint_is_not_remembered(copy: Copy, tmp_path: Path) -> None:
    directory, cache = copy(), tmp_path / "cache"
    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"][0] = np.inf
    save_file(tensors, directory / WEIGHTS)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight"):
            digests(directory, cache)


def test_processes_that_hash_at_once_agree(originals: dict[str, Path], tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from pipeline.checkpoint import read_contract as read"
    code += "; print(read(Path(sys.argv[1]), cache=Path(sys.argv[2])).weights)"
    command = [sys.executable, "-c", code, str(originals["llama"]), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    found = [process.communicate(timeout=60)[0].strip() for process in running]
    assert found == [overall(originals["llama"], tmp_path / "other")] * 3
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFILL_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("CROSSFILL_CACHE")
    assert cache_directory() == Path("/b/crossfill")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/crossfill")
