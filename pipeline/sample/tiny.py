"""Tiny: seeded random Qwen2, Qwen3 and Llama checkpoints of under a megabyte or two, for tests and demonstrations.

Grouped-query attention, FP16, a 1024-entry byte-level BPE tokenizer with a chat template. One seed gives one set of
bytes: weights come from the raw Philox stream (whose values numpy guarantees) by integer arithmetic only. Every
tensor has its own stream, so more layers do not change the first ones. Text is nonsense, but it varies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.errors import UnsupportedModelError
from pipeline.sample import corpus, directory, weight

VOCAB = 1024
CONTEXT = 8192
ROPE_THETA = 100_000.0
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Standard deviations. Vocabulary rows are small beside what the layers add, else tied embeddings make greedy text
# repeat its last token; the final norm's scale brings the logits back to about 1. Biases and norms are far from
# 0 and 1, so that an engine leaving one out shows.
_LINEAR, _VOCABULARY, _BIAS, _NORM = 0.08, 0.02, 0.1, 0.1
_FINAL_NORM_SCALE = 4.0
_EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ARCH_FIELDS: Mapping[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
}


@dataclass(frozen=True, slots=True)
class Dims:
    """What decides how much a model computes, and how large its KV is."""

    layers: int
    head_dim: int
    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocab: int = VOCAB  # rows beyond the tokenizer's stand for no text, as in many real models


@dataclass(frozen=True, slots=True)
class _Arch:
    architecture: str
    dims: Dims
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6


ARCHS = {
    "llama": _Arch("LlamaForCausalLM", Dims(layers=2, head_dim=32), tied=False, eps=1e-5),
    "qwen2": _Arch("Qwen2ForCausalLM", Dims(layers=3, head_dim=32), tied=True, qkv_bias=True),
    "qwen3": _Arch("Qwen3ForCausalLM", Dims(layers=4, head_dim=64), tied=True, qk_norm=True),
}


def write(
    arch: str,
    target: Path,
    *,
    seed: int = 0,
    layers: int | None = None,
    dims: Dims | None = None,
    rope_scaling: dict[str, Any] | None = None,
    context_length: int = CONTEXT,
) -> Path:
    """Write a checkpoint of `arch` (qwen2 | qwen3 | llama) to `target`, replacing one that is there; return `target`.

    `layers` and `dims` stand for the architecture's own where they are given, `layers` above both.
    `rope_scaling` is written as it is, for example `{"rope_type": "linear", "factor": 2.0}`.
    Raises UnsupportedModelError for another arch and ConfigError when `target` is no checkpoint directory.
    """
    if arch not in ARCHS:
        raise UnsupportedModelError("arch", arch, f"choose one of {', '.join(ARCHS)}")
    spec = ARCHS[arch]
    chosen = dims or spec.dims
    chosen = replace(chosen, layers=layers or chosen.layers)
    with directory.replace(target) as fresh:
        config = _config(arch, spec, chosen, context_length) | _rope(rope_scaling)
        directory.write_json(fresh / "config.json", config)
        directory.write_json(fresh / "generation_config.json", _token_ids() | {"do_sample": False})
        directory.write_json(fresh / "tokenizer_config.json", tokenizer_config(context_length))
        tokenizer().save(str(fresh / "tokenizer.json"))
        tensors = {name: _tensor(seed, name, shape) for name, shape in _shapes(spec, chosen)}
        weight.save(tensors, fresh / "model.safetensors")
    return target


def tokenizer() -> Tokenizer:
    """A byte-level BPE of 1024 entries: the specials, 256 bytes, merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(corpus.lines(), trainer)
    return made


def tokenizer_config(context_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "unk_token": SPECIALS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": CHAT_TEMPLATE,
    }


def _token_ids() -> dict[str, int]:
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _config(arch: str, spec: _Arch, dims: Dims, context_length: int) -> dict[str, Any]:
    return _token_ids() | {
        "architectures": [spec.architecture],
        "model_type": arch,
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": spec.eps,
        "tie_word_embeddings": spec.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "initializer_range": 0.02,
        "torch_dtype": "float16",
        **_ARCH_FIELDS[arch],
    }


def _rope(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Both spellings: transformers 5 reads `rope_parameters`, mlx-lm only the two top-level fields."""
    parameters = {"rope_type": "default", "rope_theta": ROPE_THETA} | (scaling or {})
    return {"rope_theta": ROPE_THETA, "rope_scaling": scaling, "rope_parameters": parameters}


def _shapes(spec: _Arch, dims: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield _EMBEDDING, (dims.vocab, dims.hidden)
    yield "model.norm.weight", (dims.hidden,)
    if not spec.tied:
        yield HEAD, (dims.vocab, dims.hidden)
    for layer in range(dims.layers):
        for name, shape in _layer_shapes(spec, dims):
            yield f"model.layers.{layer}.{name}", shape


def _layer_shapes(spec: _Arch, dims: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv_width = dims.kv_heads * dims.head_dim
    widths = {"q": dims.heads * dims.head_dim, "k": kv_width, "v": kv_width}
    yield "input_layernorm.weight", (dims.hidden,)
    yield "post_attention_layernorm.weight", (dims.hidden,)
    for part, width in widths.items():
        yield f"self_attn.{part}_proj.weight", (width, dims.hidden)
        if spec.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (dims.head_dim,)
        yield "self_attn.k_norm.weight", (dims.head_dim,)
    yield "self_attn.o_proj.weight", (dims.hidden, widths["q"])
    yield "mlp.gate_proj.weight", (dims.intermediate, dims.hidden)
    yield "mlp.up_proj.weight", (dims.intermediate, dims.hidden)
    yield "mlp.down_proj.weight", (dims.hidden, dims.intermediate)


def _tensor(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float16]:
    noise = _noise(f"{seed}/{name}", int(np.prod(shape))).reshape(shape)
    if name.endswith("norm.weight"):
        return ((1.0 + _NORM * noise) * (_FINAL_NORM_SCALE if name == "model.norm.weight" else 1.0)).astype(np.float16)
    if name.endswith("bias"):
        return (_BIAS * noise).astype(np.float16)
    return ((_VOCABULARY if name in (_EMBEDDING, HEAD) else _LINEAR) * noise).astype(np.float16)


def _noise(stream: str, count: int) -> NDArray[np.float64]:
    """About standard normal: the sum of four uniform 16-bit numbers (Irwin-Hall), variance 4/12, rescaled to 1."""
    key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(count)
    parts = raw.astype("<u8").view("<u2").reshape(count, 4).astype(np.int64).sum(axis=1)
    return np.asarray((parts - 4 * 32767.5) / 65536 * np.sqrt(3.0), np.float64)
