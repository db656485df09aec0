"""Light: checkpoints with which an engine has next to nothing to compute, so that what a link and Crossfill add shows.

On a few shared cores a prefill of a second varies by more than a handoff costs. These are seeded random Llamas; the
engines, and all that a handoff does, are the same as with a real one. Each of their tokens is text of its own: a token
that is part of a character, or a special one, would be no text, and the time to the first text not that of the first
token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pipeline.sample import tiny, weight
from pipeline.sample.tiny import Dims

WIDE = Dims(layers=5, head_dim=64, hidden=144, intermediate=64, heads=18, kv_heads=18)  # pages of SmolLM2-135M's size
NARROW = Dims(layers=5, head_dim=64, hidden=96, intermediate=64, heads=3, kv_heads=3)  # a sixth of that
# Layers a thirtieth of SmolLM2's, and as many words, which a token costs D and a prompt's prefill nothing.
SMALL = Dims(layers=4, head_dim=64, hidden=256, intermediate=768, heads=4, kv_heads=2, vocab=49_152)


def write(target: Path, dims: Dims) -> Path:
    """Returns `target`. For greedy text: what is no text of its own has a logit of 0, which is never the best."""
    tiny.write("llama", target, dims=dims)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tensors = load_file(target / "model.safetensors")
    head = np.array(tensors[tiny.HEAD])
    head[[token for token in range(len(head)) if not is_text(tokenizer, token)]] = 0
    weight.save(tensors | {tiny.HEAD: head}, target / "model.safetensors")
    return target


def is_text(tokenizer: Tokenizer, token: int) -> bool:
    text = tokenizer.decode([token])
    return bool(text) and "\ufffd" not in text
