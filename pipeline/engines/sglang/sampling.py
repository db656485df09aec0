"""Sampling: our request as SGLang's sampling parameters. What it must not draw itself goes along as an `order`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from pipeline.engines.sglang import order
from pipeline.request import Request, Sampling

_SEED_SPACE = 1 << 64


def sample(request: Request, index: int) -> Request:
    """The `index`-th sample of `request` as a request of its own."""
    sampling = request.sampling
    seed = None if sampling.seed is None else sampling.seed + index
    return replace(request, sampling=replace(sampling, n=1, seed=seed), again=request.again[index : index + 1])


def for_prefill(request: Request) -> dict[str, Any]:
    """P draws what the request asks for where D wants it, else a token that nobody reads."""
    return _told(Sampling(1, temperature=0.0), 1) | (
        {"custom_params": order.write(request)} if request.first_token else {}
    )


def for_decode(request: Request, max_tokens: int) -> dict[str, Any]:
    sampling = request.sampling
    ours = order.drawn_by_us(request)
    told = _told(replace(sampling, temperature=0.0) if ours else sampling, max_tokens)
    ordered = ours or sampling.logprobs is not None
    return told | ({"custom_params": order.write(request)} if ordered else {})


def _told(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """Every field explicit, so that no default of SGLang or of a `generation_config.json` leaks in.

    Stop ids are not SGLang's business: it would add the checkpoint's own. A seed is always given: see the plug-in.
    """
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % _SEED_SPACE
    return {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": max(sampling.top_p, 1e-6),  # SGLang refuses 0; the best token stays either way
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": True,
        "sampling_seed": seed - _SEED_SPACE if seed >= _SEED_SPACE >> 1 else seed,  # as a signed 64-bit number
    }
