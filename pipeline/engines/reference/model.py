"""Model: the forward pass of Llama, Qwen2 and Qwen3 in plain numpy. FP32 math, KV rounded to FP16.

One sequence at a time: batching would make a request's rounding depend on its neighbours, and this engine is the
oracle. Architecture: Llama 2 (arXiv:2307.09288), RoPE (arXiv:2104.09864) in the half-split form of the Hugging
Face checkpoints, grouped-query attention (arXiv:2305.13245). Must not know requests, threads or stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import checkpoint
from pipeline.engines.reference.rope import Rope
from pipeline.errors import ConfigError
from pipeline.page import PAGE_TOKENS, Page, PageArray, PageShape, page_count

Array = NDArray[np.float32]

# exp(-x) of SiLU may overflow, rightly: x / inf is 0. KV that overflows FP16 becomes Inf and then NaN, and is
# refused where it would get out: in a page, or as logits.
_quiet = np.errstate(over="ignore", invalid="ignore")


class KvCache:
    """KV of one sequence, `data` `(layers, 2, kv_heads, capacity, head_dim)` FP16; the first `tokens` rows count."""

    def __init__(self, shape: PageShape, capacity_tokens: int) -> None:
        self.shape = shape
        rows = page_count(capacity_tokens) * PAGE_TOKENS
        self.data = np.zeros((shape.layers, 2, shape.kv_heads, rows, shape.head_dim), np.float16)
        self.tokens = 0

    def copy(self) -> KvCache:
        """Another sequence that begins with the same tokens."""
        twin = KvCache(self.shape, self.data.shape[3])
        twin.data[..., : self.tokens, :] = self.data[..., : self.tokens, :]
        twin.tokens = self.tokens
        return twin

    def page(self, index: int, tokens: int) -> Page:
        """Copy `tokens` rows of page `index` into a fresh, zero padded page."""
        data = self.shape.empty()
        start = index * PAGE_TOKENS
        data[..., :tokens, :] = self.data[..., start : start + tokens, :]
        return Page(index, tokens, data)

    def append_page(self, data: PageArray, tokens: int) -> None:
        """Copy the first `tokens` rows of a page behind what is there."""
        self.data[..., self.tokens : self.tokens + tokens, :] = data[..., :tokens, :]
        self.tokens += tokens

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Write rows `(new, kv_heads, head_dim)` of one layer behind `tokens`, which moves once all layers are done."""
        rows = slice(self.tokens, self.tokens + keys.shape[0])
        self.data[layer, 0, :, rows] = keys.transpose(1, 0, 2)
        self.data[layer, 1, :, rows] = values.transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Array  # (out, in)
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        y: Array = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Array
    qkv: _Linear  # fused: one BLAS call reads the activations once
    q_norm: Array | None
    k_norm: Array | None
    out: _Linear
    post_norm: Array
    gate_up: _Linear
    down: _Linear


class Model:
    """Loaded weights as FP32, and the forward pass over them. Stateless: all state is in the KvCache."""

    def __init__(self, config: checkpoint.ModelConfig, tensors: dict[str, NDArray[np.float16]]) -> None:
        self.config = config
        self.shape = PageShape(config.layers, config.kv_heads, config.head_dim)
        self._rope = Rope(config)
        self._tensors = tensors
        self._embedding = self._take("model.embed_tokens.weight")
        self._layers = [self._layer(index) for index in range(config.layers)]
        self._norm = self._take("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else self._take("lm_head.weight")
        del self._tensors

    @classmethod
    def load(cls, directory: Path) -> Model:
        """Read a checkpoint directory. Raises ConfigError when a tensor is missing, UnsupportedModelError and others
        as `checkpoint` does."""
        return cls(checkpoint.read_config(directory), dict(checkpoint.load_tensors(directory)))

    @_quiet
    def prefill(self, token_ids: Sequence[int], cache: KvCache) -> None:
        """Append the KV of `token_ids` to `cache`, without logits."""
        self._forward(token_ids, cache, kv_only=True)

    @_quiet
    def logits(self, token_ids: Sequence[int], cache: KvCache) -> Array:
        """Append the KV of `token_ids`; the logits `(vocab,)` after the last of them."""
        x = self._forward(token_ids, cache, kv_only=False)
        last = _rms_norm(x[-1:], self._norm, self.config.rms_norm_eps)
        row: Array = (last @ self._head.T)[0]
        return row

    def _forward(self, token_ids: Sequence[int], cache: KvCache, *, kv_only: bool) -> Array:
        x: Array = self._embedding[np.asarray(token_ids)]
        turn = self._rope.turn(cache.tokens, len(token_ids))
        for index, layer in enumerate(self._layers):
            queries = self._project(index, layer, x, turn, cache)
            if kv_only and index == len(self._layers) - 1:
                break  # nothing reads the last layer's output
            x = x + layer.out(self._attend(index, queries, cache))
            x = x + self._feed_forward(layer, x)
        cache.tokens += len(token_ids)
        return x

    def _project(self, index: int, layer: _Layer, x: Array, turn: tuple[Array, Array], cache: KvCache) -> Array:
        """Queries `(new, heads, head_dim)` after RoPE; keys and values go into the cache."""
        config, new = self.config, x.shape[0]
        qkv = layer.qkv(_rms_norm(x, layer.input_norm, config.rms_norm_eps))
        qkv = qkv.reshape(new, config.heads + 2 * config.kv_heads, config.head_dim)
        queries, keys, values = np.split(qkv, (config.heads, config.heads + config.kv_heads), axis=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = _rms_norm(queries, layer.q_norm, config.rms_norm_eps)
            keys = _rms_norm(keys, layer.k_norm, config.rms_norm_eps)
        cache.append(index, Rope.apply(keys, turn), values)
        return Rope.apply(queries, turn)

    def _attend(self, index: int, queries: Array, cache: KvCache) -> Array:
        """Causal attention of the new rows over all rows: `(new, heads * head_dim)`."""
        config, new, past = self.config, queries.shape[0], cache.tokens
        group = config.heads // config.kv_heads
        keys, values = cache.data[index, :, :, : past + new].astype(np.float32)
        q = queries.reshape(new, config.kv_heads, group, config.head_dim).transpose(1, 2, 0, 3)
        q = q.reshape(config.kv_heads, group * new, config.head_dim) * np.float32(config.head_dim**-0.5)
        scores = (q @ keys.transpose(0, 2, 1)).reshape(config.kv_heads, group, new, past + new)
        if new > 1:
            scores[..., past:] += np.triu(np.full((new, new), -np.inf, np.float32), 1)
        probs = _softmax(scores).reshape(config.kv_heads, group * new, past + new)
        mixed = (probs @ values).reshape(config.heads, new, config.head_dim)
        rows: Array = mixed.transpose(1, 0, 2).reshape(new, config.heads * config.head_dim)
        return rows

    def _feed_forward(self, layer: _Layer, x: Array) -> Array:
        gate_up = layer.gate_up(_rms_norm(x, layer.post_norm, self.config.rms_norm_eps))
        gate, up = np.split(gate_up, 2, axis=1)
        return layer.down(_silu(gate) * up)

    def _layer(self, index: int) -> _Layer:
        at = f"model.layers.{index}."
        return _Layer(
            input_norm=self._take(at + "input_layernorm.weight"),
            qkv=self._linear(self.config.attention_bias, *(f"{at}self_attn.{name}_proj" for name in "qkv")),
            q_norm=self._take(at + "self_attn.q_norm.weight") if self.config.qk_norm else None,
            k_norm=self._take(at + "self_attn.k_norm.weight") if self.config.qk_norm else None,
            out=self._linear(self.config.output_bias, at + "self_attn.o_proj"),
            post_norm=self._take(at + "post_attention_layernorm.weight"),
            gate_up=self._linear(self.config.mlp_bias, at + "mlp.gate_proj", at + "mlp.up_proj"),
            down=self._linear(self.config.mlp_bias, at + "mlp.down_proj"),
        )

    def _linear(self, biased: bool, *names: str) -> _Linear:
        weight = np.concatenate([self._take(name + ".weight") for name in names])
        return _Linear(weight, np.concatenate([self._take(name + ".bias") for name in names]) if biased else None)

    def _take(self, name: str) -> Array:
        try:
            return self._tensors.pop(name).astype(np.float32)  # popped: the FP16 copy goes once the FP32 one is there
        except KeyError:
            raise ConfigError(f"the checkpoint has no tensor {name!r}: it is incomplete, fetch it again") from None


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    normed: Array = x * scale * weight
    return normed


def _softmax(scores: Array) -> Array:
    """Over the last axis, in place: the scores of a long prompt are the largest array here."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y
