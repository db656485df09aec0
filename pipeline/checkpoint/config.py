"""Config: the fields of `config.json` that decide what KV a model computes, or a refusal that names the field.

Refused is whatever the engines are known, or likely, to treat differently: an unknown rope type, a sliding window,
quantised weights. mlx-lm reads `rope_theta` and `rope_scaling` at the top level only and falls back to a default
in silence; transformers 5 writes them into `rope_parameters`. So the top level must be there, and agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pipeline.errors import ConfigError, UnsupportedModelError

Arch = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = ("float16", "bfloat16")
# Fields that must be absent, null, false or empty, and what they would mean.
_FORBIDDEN: Mapping[str, str] = {
    "quantization_config": "quantised weights are computed differently by each engine: use the FP16 or BF16 checkpoint",
    "quantization": "quantised weights are computed differently by each engine: use the FP16 or BF16 checkpoint",
    "compression_config": "compressed weights are not supported: use the FP16 or BF16 checkpoint",
    "use_sliding_window": "mlx-lm ignores it, vLLM does not",
    "vision_config": "only text models are supported",
    "audio_config": "only text models are supported",
    "text_config": "only plain text models are supported, not the text part of a larger one",
    "auto_map": "models with their own code are not supported",
    "model_file": "models with their own code are not supported",
    "num_experts": "mixtures of experts are not supported",
    "num_local_experts": "mixtures of experts are not supported",
    "encoder_layers": "only decoder models are supported",
    "is_encoder_decoder": "only decoder models are supported",
    "no_rope_layers": "every layer must use rotary positions",
}
_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Inverse frequencies are divided by `factor`: all of them (linear) or the low ones, blended (llama3).

    The three fields behind `factor` are 0 for linear. Source of llama3: transformers `_compute_llama3_parameters`.
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of one of three architectures.

    `attention_bias`: q, k and v add biases (always so in qwen2), and o too where `arch` is llama. qwen3 normalises
    q and k per head. `context_length` is the checkpoint's own; `eos_token_ids` come from all files that name one.
    """

    arch: Arch
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def qk_norm(self) -> bool:
        return self.arch == "qwen3"

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection adds a bias."""
        return self.attention_bias and self.arch == "llama"


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError, saying what to do, when `path` is missing or no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}): is this a checkpoint directory?") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object: fetch the checkpoint again")
    return value


def read_config(directory: Path) -> ModelConfig:
    """Read `config.json` of `directory`. Raises UnsupportedModelError or ConfigError."""
    raw = read_json(directory / "config.json")
    arch = _arch(raw)
    _refuse_unsupported(raw, arch)
    if (directory / "adapter_config.json").exists():
        raise UnsupportedModelError("adapter_config.json", "present", "merge the LoRA adapter into the weights first")
    heads, hidden = _positive(raw, "num_attention_heads"), _positive(raw, "hidden_size")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError("num_key_value_heads", kv_heads, f"must divide num_attention_heads {heads}")
    return ModelConfig(
        arch=arch,
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(raw, hidden, heads),
        vocab_size=_positive(raw, "vocab_size"),
        rms_norm_eps=_number(raw, "rms_norm_eps"),
        rope_theta=_rope_theta(raw),
        rope_scaling=_rope_scaling(raw),
        tie_word_embeddings=_tied(raw),
        attention_bias=arch == "qwen2" or bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
        context_length=_positive(raw, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(directory),
    )


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a text: those of `generation_config.json`, then `config.json`, each once. Empty when none is named.

    Raises ConfigError when an entry is no id.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if name == "config.json" or (directory / name).exists():
            found += _ids(read_json(directory / name).get("eos_token_id"), directory / name)
    return tuple(dict.fromkeys(found))


def _ids(value: object, path: Path) -> list[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for entry in listed:
        if type(entry) is not int or entry < 0:
            raise ConfigError(f"eos_token_id of {path} holds {entry!r}: it must be a token id or a list of them")
    return cast(list[int], listed)


def _arch(raw: Mapping[str, Any]) -> Arch:
    arch = raw.get("model_type")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UnsupportedModelError("model_type", arch, f"supported are {', '.join(ARCHITECTURES)}")
    named = raw.get("architectures")
    if named not in (None, [ARCHITECTURES[arch]]):
        raise UnsupportedModelError("architectures", named, f"a {arch} that generates text is {ARCHITECTURES[arch]}")
    return cast(Arch, arch)


def _refuse_unsupported(raw: Mapping[str, Any], arch: Arch) -> None:
    for field, why in _FORBIDDEN.items():
        if raw.get(field):
            raise UnsupportedModelError(field, raw[field], why)
    _refuse_windows(raw, arch)
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError("hidden_act", act, "the supported architectures use silu")
    if (parts := raw.get("pretraining_tp", 1)) not in (None, 1):
        raise UnsupportedModelError("pretraining_tp", parts, "split matrix products round differently")
    for field in ("torch_dtype", "dtype"):
        if raw.get(field) is not None and raw[field] not in DTYPES:
            raise UnsupportedModelError(field, raw[field], f"weights must be {' or '.join(DTYPES)}")
    _refuse_biases(raw, arch)


def _refuse_windows(raw: Mapping[str, Any], arch: Arch) -> None:
    kinds = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError("layer_types", sorted(set(kinds)), "every layer must use full attention")
    # Qwen configs carry a sliding_window that use_sliding_window = false switches off; elsewhere it is in force.
    if arch == "llama" and raw.get("sliding_window"):
        raise UnsupportedModelError("sliding_window", raw["sliding_window"], "every layer must use full attention")


def _refuse_biases(raw: Mapping[str, Any], arch: Arch) -> None:
    if arch == "qwen3" and raw.get("attention_bias"):
        raise UnsupportedModelError("attention_bias", raw["attention_bias"], "mlx-lm leaves the biases of qwen3 out")
    if arch != "llama" and raw.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias", raw["mlp_bias"], f"no engine adds MLP biases in {arch}")


def _tied(raw: Mapping[str, Any]) -> bool:
    """Required, because defaults differ: transformers false, mlx-lm true for llama."""
    value = raw.get("tie_word_embeddings")
    if not isinstance(value, bool):
        raise UnsupportedModelError("tie_word_embeddings", value, "must be true or false: defaults differ")
    return value


def _positive(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = default if raw.get(field) is None else raw[field]
    if type(value) is not int or value <= 0:
        raise UnsupportedModelError(field, value, "must be a positive whole number")
    return value


def _number(raw: Mapping[str, Any], field: str) -> float:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UnsupportedModelError(field, value, "must be a positive number, engines differ in its default")
    return float(value)


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedModelError("head_dim", None, f"hidden_size {hidden} is no multiple of {heads} heads")
    dim = _positive(raw, "head_dim", hidden // heads)
    if dim % 2:
        raise UnsupportedModelError("head_dim", dim, "rotary positions need an even number")
    return dim


def _rope_theta(raw: Mapping[str, Any]) -> float:
    nested = (raw.get("rope_parameters") or {}).get("rope_theta")
    if raw.get("rope_theta") is None:
        hint = f"add a top-level rope_theta of {nested}" if nested else "add it"
        raise UnsupportedModelError("rope_theta", None, f"engines differ in its default: {hint} to config.json")
    theta = _number(raw, "rope_theta")
    if nested is not None and nested != theta:
        raise UnsupportedModelError("rope_theta", theta, f"rope_parameters says {nested}: make them agree")
    return theta


def _rope_scaling(raw: Mapping[str, Any]) -> RopeScaling | None:
    nested, top = raw.get("rope_parameters"), raw.get("rope_scaling")
    for name, rope in (("rope_parameters", nested), ("rope_scaling", top)):
        if rope is not None and not isinstance(rope, dict):
            raise UnsupportedModelError(name, rope, "must be an object")
    for place in (raw, nested or {}, top or {}):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModelError("partial_rotary_factor", place["partial_rotary_factor"], "must be 1")
    scaling = _scaling("rope_scaling", top)
    if nested is not None and _scaling("rope_parameters", nested) != scaling:
        raise UnsupportedModelError("rope_scaling", top, f"rope_parameters says {nested}: make them agree")
    return scaling


def _scaling(field: str, rope: Mapping[str, Any] | None) -> RopeScaling | None:
    """None for plain rotary positions."""
    kind = "default" if not rope else rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not rope:
        return None
    if kind not in _SCALING_FIELDS:
        known = ", ".join(("default", *_SCALING_FIELDS))
        raise UnsupportedModelError(f"{field}.rope_type", kind, f"both engines treat alike only {known}")
    values = {name: _number(rope, name) for name in _SCALING_FIELDS[kind]}
    original = int(values.pop("original_max_position_embeddings", 0))
    return RopeScaling(
        rope_type=cast(Literal["linear", "llama3"], kind), original_max_position_embeddings=original, **values
    )
