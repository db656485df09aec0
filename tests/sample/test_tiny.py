"""Tiny: bit-identical for a seed, readable by the libraries, and a real forward pass that varies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jinja2 import Environment
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pipeline.errors import ConfigError, UnsupportedModelError
from pipeline.sample import corpus, tiny

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("tiny")
    return {arch: tiny.write(arch, made / arch) for arch in tiny.ARCHS}


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("arch", list(tiny.ARCHS))
def test_one_seed_gives_one_set_of_bytes(written: dict[str, Path], tmp_path: Path, arch: str) -> None:
    again = tiny.write(arch, tmp_path / arch)
    assert content(again).keys() == FILES
    assert content(again) == content(written[arch])


def test_another_seed_changes_the_weights_only(written: dict[str, Path], tmp_path: Path) -> None:
    ours, theirs = content(written["llama"]), content(tiny.write("llama", tmp_path / "m", seed=7))
    assert [name for name in sorted(ours) if ours[name] != theirs[name]] == ["model.safetensors"]


def test_more_layers_leave_the_first_ones_alone(written: dict[str, Path], tmp_path: Path) -> None:
    shallow = load_file(written["llama"] / "model.safetensors")
    deep = load_file(tiny.write("llama", tmp_path / "m", layers=5) / "model.safetensors")
    assert all(np.array_equal(deep[name], values) for name, values in shallow.items())
    assert len(deep) - len(shallow) == 3 * 9


def test_chosen_dimensions_stand_in_config_and_weights(tmp_path: Path) -> None:
    made = tiny.write("llama", tmp_path / "m", dims=tiny.Dims(2, 64, hidden=96, intermediate=32, heads=3, kv_heads=1))
    config = json.loads((made / "config.json").read_text())
    names = ("num_hidden_layers", "head_dim", "hidden_size", "intermediate_size")
    assert [config[name] for name in names] == [2, 64, 96, 32]
    assert [config["num_attention_heads"], config["num_key_value_heads"]] == [3, 1]
    shapes = {name: values.shape for name, values in load_file(made / "model.safetensors").items()}
    layer = "model.layers.1.self_attn"
    assert [shapes[f"{layer}.{part}_proj.weight"] for part in "qkvo"] == [(192, 96), (64, 96), (64, 96), (96, 192)]
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (96, 32)
    assert len(shapes) == 3 + 2 * 9


def test_rows_beyond_the_tokenizer_leave_the_others_alone(tmp_path: Path) -> None:
    dims = tiny.Dims(1, 32)
    plain, padded = (
        load_file(tiny.write("llama", tmp_path / str(vocab), dims=replace(dims, vocab=vocab)) / "model.safetensors")
        for vocab in (1024, 1100)
    )
    assert padded["lm_head.weight"].shape == (1100, 128)
    assert np.array_equal(padded["lm_head.weight"][:1024], plain["lm_head.weight"])
    assert padded["model.embed_tokens.weight"].astype(np.float64).std() == pytest.approx(0.02, rel=0.05)
    assert json.loads((tmp_path / "1100" / "config.json").read_text())["vocab_size"] == 1100


@pytest.mark.parametrize("arch", list(tiny.ARCHS))
def test_weights_have_the_stated_spread(written: dict[str, Path], arch: str) -> None:
    for name, values in load_file(written[arch] / "model.safetensors").items():
        wide = values.astype(np.float64)
        assert values.dtype == np.float16
        assert np.isfinite(wide).all()
        if wide.size >= 4096:
            assert wide.std() == pytest.approx(0.02 if values.shape[0] == 1024 else 0.08, rel=0.05), name
        elif name.endswith("bias"):
            assert 0.05 < wide.std() < 0.2, name


def test_qwen2_has_biases_and_qwen3_head_norms(written: dict[str, Path]) -> None:
    names = {arch: load_file(path / "model.safetensors").keys() for arch, path in written.items()}
    assert "model.layers.2.self_attn.k_proj.bias" in names["qwen2"]
    assert "model.layers.3.self_attn.q_norm.weight" in names["qwen3"]
    assert not [name for name in names["llama"] if "bias" in name or "q_norm" in name]
    assert [arch for arch in names if "lm_head.weight" in names[arch]] == ["llama"]


@pytest.mark.parametrize("arch", list(tiny.ARCHS))
def test_positions_are_spelt_for_every_engine(written: dict[str, Path], arch: str) -> None:
    config = json.loads((written[arch] / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000.0
    assert config["torch_dtype"] == "float16"
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]


@pytest.mark.parametrize("text", ["Hello there, what is 12 + 30?", "  two\n\n\ttabs ", "naïve 你好 😀", ""])
def test_text_comes_back_from_its_ids(written: dict[str, Path], text: str) -> None:
    tokenizer = Tokenizer.from_file(str(written["qwen3"] / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(2 < each < 1024 for each in ids)


def test_the_vocabulary_is_full_and_specials_come_first(written: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(written["llama"] / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    assert [tokenizer.id_to_token(each) for each in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.encode("<|im_start|> the<|im_end|>").tokens == ["<|im_start|>", "Ġthe", "<|im_end|>"]
    assert tokenizer.decode([1, 2]) == ""


def test_the_chat_template_marks_turns(written: dict[str, Path]) -> None:
    template = json.loads((written["llama"] / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    shown = Environment(autoescape=False).from_string(template).render(messages=messages, add_generation_prompt=True)
    assert shown == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="choose one of llama, qwen2, qwen3"):
        tiny.write("gpt2", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_directory_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        tiny.write("llama", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_corpus_is_the_same_each_time_and_has_no_repeated_line() -> None:
    lines = list(corpus.lines(500))
    assert lines == list(corpus.lines(500))
    assert len(set(lines)) == 500
    assert all(line[0].isupper() for line in lines)
