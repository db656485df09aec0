"""Identity: the contract of a checkpoint, what counts for it, and what two checkpoints differ in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline import checkpoint, contract
from pipeline.checkpoint.identity import config_digest
from pipeline.errors import ConfigError
from pipeline.page import PageShape
from pipeline.sample import tiny
from tests.checkpoint.conftest import Copy, edit


def test_the_contract_of_a_tiny_llama(originals: dict[str, Path], tmp_path: Path) -> None:
    found = checkpoint.read_contract(originals["llama"], cache=tmp_path)
    assert (found.layers, found.kv_heads, found.head_dim) == (2, 2, 32)
    assert (found.vocab_size, found.context_length, found.dtype) == (1024, 8192, "float16")
    assert found.page_shape == PageShape(2, 2, 32)
    fields = {
        "arch": "llama", "attention_bias": False, "head_dim": 32, "heads": 4, "hidden_size": 128,
        "intermediate_size": 256, "kv_heads": 2, "layers": 2, "mlp_bias": False, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 100000.0, "tie_word_embeddings": False, "vocab_size": 1024,
    }  # fmt: skip
    assert found.config == hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def test_the_weights_of_the_samples_never_change(originals: dict[str, Path], tmp_path: Path) -> None:
    """Golden: on every platform, and with every later numpy, the same seed gives the same bytes."""
    found = {arch: checkpoint.read_contract(path, cache=tmp_path).weights[:16] for arch, path in originals.items()}
    assert found == {"llama": "c642eaa8027c6a14", "qwen2": "8c32210057f01611", "qwen3": "e52a71e688161edd"}


def test_what_does_not_change_kv_leaves_the_contract_alone(
    copy: Copy, originals: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy(eos_token_id=[2, 0], rope_parameters=..., use_cache=False, torch_dtype=..., head_dim=None)
    edit(directory / "tokenizer_config.json", chat_template="another")
    ours = checkpoint.read_contract(originals["llama"], cache=tmp_path)
    theirs = checkpoint.read_contract(directory, context_length=100, cache=tmp_path)
    assert theirs.context_length == 100
    assert ours.digest == theirs.digest
    assert checkpoint.differences(originals["llama"], directory, cache=tmp_path) == []


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(checkpoint.ModelConfig)])
def test_every_other_field_counts(originals: dict[str, Path], field: str) -> None:
    config = checkpoint.read_config(originals["llama"])
    value = getattr(config, field)
    other = {bool: lambda: not value, str: lambda: "qwen3", tuple: lambda: (9,)}.get(
        type(value), lambda: (value or 0) + 1
    )()
    same = config_digest(dataclasses.replace(config, **{field: other})) == config_digest(config)
    assert same == (field in ("context_length", "eos_token_ids"))


def test_differences_name_tensors_fields_and_tokens(copy: Copy, originals: dict[str, Path], tmp_path: Path) -> None:
    directory = copy(rope_theta=10_000.0, rope_parameters=...)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] += np.float16(1)
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["added_tokens"][1]["content"] = "<start>"
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    found = checkpoint.differences(originals["llama"], directory, cache=tmp_path)
    assert [each.where for each in found] == ["config.rope_theta", "weights.model.norm.weight", "tokenizer.added['1']"]
    assert found[0] == ("config.rope_theta", 100_000.0, 10_000.0)
    ours, theirs = (checkpoint.read_contract(path, cache=tmp_path) for path in (originals["llama"], directory))
    assert list(contract.differences(ours, theirs)) == ["weights", "tokenizer", "config"]


def test_tensors_and_fields_of_one_side_only_are_named(originals: dict[str, Path], tmp_path: Path) -> None:
    found = checkpoint.differences(originals["qwen3"], originals["llama"], cache=tmp_path)
    where = {each.where: each for each in found}
    assert where["weights.lm_head.weight"].ours is None
    assert where["weights.model.layers.0.self_attn.q_norm.weight"].theirs is None
    assert where["config.arch"][1:] == ("qwen3", "llama")


def test_a_seed_changes_weights_only(originals: dict[str, Path], tmp_path: Path) -> None:
    other = tiny.write("llama", tmp_path / "other", seed=1)
    ours, theirs = (checkpoint.read_contract(path, cache=tmp_path) for path in (originals["llama"], other))
    assert list(contract.differences(ours, theirs)) == ["weights"]


@pytest.mark.parametrize("wanted", [0, -1, 8193])
def test_a_context_beyond_the_checkpoint_is_refused(originals: dict[str, Path], tmp_path: Path, wanted: int) -> None:
    with pytest.raises(ConfigError, match=rf"context_length {wanted} is not in 1\.\.8192"):
        checkpoint.read_contract(originals["llama"], context_length=wanted, cache=tmp_path)


def test_the_cache_is_where_the_environment_says(
    originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSFILL_CACHE", str(tmp_path / "named"))
    checkpoint.read_contract(originals["llama"])
    assert len(list((tmp_path / "named").iterdir())) == 1


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_checkpoint_without_one_of_its_files_is_incomplete(copy: Copy, missing: str) -> None:
    directory = copy()
    checkpoint.require_complete(directory)
    (directory / missing).unlink()
    with pytest.raises(ConfigError):
        checkpoint.require_complete(directory)
