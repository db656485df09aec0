"""A checkpoint to measure speed with: Qwen2.5-0.5B's dimensions, seeded random FP16 weights, a tokenizer to match.

    python -m ops.gpu.checkpoint TARGET

The real weights are not needed for timing and are not fetched. Text is nonsense; the vocabulary's unused ids decode to
themselves, so that every sampled token is visible text. About 1 GB, half a minute.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.sample import directory, tiny, weight

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 151_936, 896, 4864, 24, 14, 2, 64
CONTEXT = 40_960
ROPE_THETA = 1_000_000.0


def write(target: Path) -> Path:
    with directory.replace(target) as fresh:
        directory.write_json(fresh / "config.json", _config())
        directory.write_json(fresh / "tokenizer_config.json", tiny.tokenizer_config(CONTEXT))
        directory.write_json(fresh / "tokenizer.json", _tokenizer())
        weight.save({name: _tensor(name, shape) for name, shape in _shapes()}, fresh / "model.safetensors")
    return target


def _tokenizer() -> dict[str, Any]:
    """The tiny tokenizer, padded to the vocabulary with entries that no merge reaches."""
    made: dict[str, Any] = json.loads(tiny.tokenizer().to_str())
    vocab = made["model"]["vocab"]
    vocab |= {f"<{i}>": i for i in range(len(vocab), VOCAB)}
    return made


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float16",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
        for part, width in widths.items():
            yield f"{at}.self_attn.{part}_proj.weight", (width, HIDDEN)
            yield f"{at}.self_attn.{part}_proj.bias", (width,)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, widths["q"])
        yield f"{at}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)


def _tensor(name: str, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """Vocabulary rows small beside what the layers add, else tied embeddings make greedy text repeat its last token."""
    if name.endswith("norm.weight"):
        return np.full(shape, 4.0 if name == "model.norm.weight" else 1.0, np.float16)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    noise = np.random.default_rng(seed).standard_normal(shape, np.float32)
    noise *= 0.1 if name.endswith("bias") else 0.02 if shape[0] == VOCAB else shape[1] ** -0.5
    return noise.astype(np.float16)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
