"""Tensor: the weights of a checkpoint as "effective FP16", streamed out of its safetensors files.

Effective FP16: FP16 tensors as they are, BF16 tensors rounded to FP16 (to nearest even, what every engine does when
told to run in FP16). Values that overflow, and NaN or Inf, are refused by name. Neither torch nor numpy's missing
BF16 is needed. Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, raw data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.config import ModelConfig, read_config, read_json
from pipeline.errors import ConfigError, UnsupportedModelError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_BYTES = 8 << 20
_EXPONENT = np.uint16(0x7C00)  # all ones in FP16: Inf or NaN


class Entry(NamedTuple):
    """One tensor inside `file`: `dtype` F16 or BF16, `size` bytes from `start`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def load_tensors(directory: Path) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """Every weight the model uses, by file and place in it: Hugging Face name and a fresh effective FP16 array.

    Raises UnsupportedModelError naming a tensor that is no FP16/BF16, not finite or has the wrong shape, and
    ConfigError for missing or broken files.
    """
    for entry in entries(directory, read_config(directory)):
        parts = list(chunks(entry))
        yield entry.name, np.concatenate(parts).reshape(entry.shape)


def entries(directory: Path, config: ModelConfig) -> list[Entry]:
    """The tensors of `directory`, which are exactly those that `config` asks for. Raises as `load_tensors`."""
    found: dict[str, Entry] = {}
    for file in files(directory):
        for entry in _header(file):
            if _is_unused(entry.name, config):
                continue
            if entry.name in found:
                raise ConfigError(f"{entry.name} is in {found[entry.name].file.name} and {file.name}: keep one of them")
            found[entry.name] = entry
    _require_shapes(found, shapes(config))
    return list(found.values())


def files(directory: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, sorted. Raises ConfigError when engines would differ."""
    present = {path.name for path in directory.glob("*.safetensors")}
    if not present:
        raise ConfigError(f"{directory} has no .safetensors file: fetch the checkpoint again, or convert its weights")
    index = directory / "model.safetensors.index.json"
    wanted = set(read_json(index).get("weight_map", {}).values()) if index.exists() else {"model.safetensors"}
    if missing := sorted(wanted - present):
        raise ConfigError(f"{directory} lacks {', '.join(missing)}: fetch the checkpoint again")
    if extra := sorted(present - wanted):
        raise ConfigError(f"{directory} also holds {', '.join(extra)}, which some engines would load: remove it")
    return [directory / name for name in sorted(wanted)]


def chunks(entry: Entry) -> Iterator[NDArray[np.float16]]:
    """The effective FP16 values of a tensor, flat, in pieces of at most 8 MiB. Raises UnsupportedModelError."""
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        left = entry.size
        while left:
            data = file.read(min(left, _CHUNK_BYTES))
            if len(data) != min(left, _CHUNK_BYTES):
                raise ConfigError(f"{entry.file} ends inside {entry.name}: fetch the checkpoint again")
            yield _effective(entry, np.frombuffer(data, "<u2"))
            left -= len(data)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a model, linear weights as (out, in)."""
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config)}
    found["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def _layer(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, pair = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield from (("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,)))
    for name, rows in (("q", query), ("k", pair), ("v", pair)):
        yield from _linear(f"self_attn.{name}_proj", rows, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.o_proj", hidden, query, bias=config.output_bias)
    if config.qk_norm:
        yield from (("self_attn.q_norm.weight", (config.head_dim,)), ("self_attn.k_norm.weight", (config.head_dim,)))
    yield from _linear("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, bias=config.mlp_bias)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Tensors that some exporters write and every engine drops."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _require_shapes(found: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, entry in found.items():
        if name not in wanted:
            raise UnsupportedModelError(name, entry.shape, "config.json does not ask for this tensor")
        if entry.shape != wanted[name]:
            raise UnsupportedModelError(name, entry.shape, f"config.json asks for the shape {wanted[name]}")
    if missing := [name for name in wanted if name not in found]:
        raise ConfigError(f"{len(missing)} tensors are missing, first {missing[0]}: fetch the checkpoint again")
    kinds: dict[str, str] = {entry.dtype: name for name, entry in found.items()}
    if len(kinds) > 1:
        raise UnsupportedModelError("dtype", kinds, "all tensors must have one type: engines mix types differently")


def _header(file: Path) -> Iterator[Entry]:
    try:
        with file.open("rb") as stream:
            yield from _parse(file, stream)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a whole safetensors file ({error}): fetch the checkpoint again") from error


def _parse(file: Path, stream: IO[bytes]) -> Iterator[Entry]:
    length = int.from_bytes(stream.read(8), "little")
    file_bytes = file.stat().st_size
    if not 0 < length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    for name, field in header.items():
        entry = _entry(file, name, field, 8 + length)
        if entry.start + entry.size > file_bytes:
            raise ValueError(f"{name} lies beyond its end")
        yield entry


def _entry(file: Path, name: str, field: Mapping[str, Any], data_at: int) -> Entry:
    begin, end = field["data_offsets"]
    shape = tuple(int(size) for size in field["shape"])
    if field["dtype"] not in ("F16", "BF16") and not name.endswith("rotary_emb.inv_freq"):
        raise UnsupportedModelError(name, field["dtype"], "weights must be F16 or BF16")
    if not 0 <= begin <= end or (field["dtype"] in ("F16", "BF16") and end - begin != 2 * math.prod(shape)):
        raise ValueError(f"{name} has wrong offsets")
    return Entry(name, field["dtype"], shape, file, data_at + begin, end - begin)


def _effective(entry: Entry, bits: NDArray[np.uint16]) -> NDArray[np.float16]:
    if entry.dtype == "F16":
        values = bits.view("<f2")
    else:
        wide = (bits.astype("<u4") << np.uint32(16)).view("<f4")
        if not np.isfinite(wide).all():
            raise UnsupportedModelError(entry.name, "NaN or Inf", "the weights are broken: fetch the checkpoint again")
        with np.errstate(over="ignore", under="ignore"):
            values = wide.astype("<f2")
    if ((values.view("<u2") & _EXPONENT) == _EXPONENT).any():
        value = "NaN or Inf" if entry.dtype == "F16" else "above 65504"
        raise UnsupportedModelError(entry.name, value, "it does not fit FP16, in which KV is exchanged")
    return values
