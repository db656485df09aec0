"""How a request draws: what SGLang is told, the seeds of a batch, and the hash that its draws need on a CPU."""

from __future__ import annotations

import importlib
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.engines.sglang import order
from pipeline.request import Request, Sampling

pytest.importorskip("sglang", reason="SGLang is not in this environment")

import torch

from pipeline.engines.sglang.plugin.sampling import add_seeds
from pipeline.engines.sglang.sampling import _told, for_decode, for_prefill, sample


def test_every_field_is_told() -> None:
    made = _told(Sampling(max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, seed=3, stop_token_ids=(2,)), 4)
    assert made == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": True,
        "sampling_seed": 3,
    }


@pytest.mark.parametrize(
    ("seed", "told"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (-1, -1), (2**64 + 5, 5)]
)
def test_seeds_are_signed_numbers_of_64_bits(seed: int, told: int) -> None:
    assert _told(Sampling(1, seed=seed), 1)["sampling_seed"] == told


def test_without_a_seed_each_request_gets_its_own() -> None:
    assert len({_told(Sampling(1), 1)["sampling_seed"] for _ in range(20)}) == 20


def test_top_k_off_is_sglangs_word_for_it() -> None:
    assert _told(Sampling(1), 1)["top_k"] == -1


def test_what_sglang_must_not_draw_is_greedy_there_and_goes_along() -> None:
    request = Request("h", (5, 6), Sampling(9, temperature=0.7, frequency_penalty=0.5, seed=3), first_token=True)
    told = for_decode(request, 4)
    assert (told["temperature"], told["frequency_penalty"]) == (0.0, 0.0)
    assert order.read(told["custom_params"], [5, 6]) == request


@pytest.mark.parametrize(("logprobs", "goes_along"), [(None, False), (0, True)])
def test_sglang_draws_what_is_plain(logprobs: int | None, goes_along: bool) -> None:
    request = Request("h", (5, 6), Sampling(9, temperature=0.7, seed=3, logprobs=logprobs), first_token=True)
    told = for_decode(request, 4)
    assert (told["temperature"], told["sampling_seed"]) == (0.7, 3)
    assert (order.read(told.get("custom_params"), [5, 6]) == request) is goes_along


@pytest.mark.parametrize("first_token", [True, False])
def test_p_draws_as_asked_only_where_its_token_is_wanted(first_token: bool) -> None:
    request = Request("h", (5, 6), Sampling(9, temperature=0.7, n=2), first_token=first_token)
    told = for_prefill(request)
    assert (told["max_new_tokens"], told["temperature"]) == (1, 0.0)
    assert order.read(told.get("custom_params"), [5, 6]) == (request if first_token else None)


@pytest.mark.parametrize(("seed", "expected"), [(5, 8), (None, None), (-1, 2)])
def test_a_sample_is_a_request_of_its_own(seed: int | None, expected: int | None) -> None:
    made = sample(Request("h", (5, 6), Sampling(9, n=4, seed=seed, min_p=0.1)), 3)
    assert made == Request("h", (5, 6), Sampling(9, n=1, seed=expected, min_p=0.1))


@pytest.mark.parametrize("bound", [True, False])
def test_a_batch_gets_the_seeds_of_its_requests(bound: bool) -> None:
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in (7, -2, None)]
    batch = SimpleNamespace(reqs=requests, device="cpu")
    info = SimpleNamespace(sampling_seed=None)
    made: Any = add_seeds(info, *((object, batch) if bound else (batch,)), 1024)  # with or without the class
    assert made is info
    assert info.sampling_seed.tolist() == [7, -2, 0]
    assert info.sampling_seed.dtype == torch.int64


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32 with seed 0, for whole blocks of four bytes: Appleby's public-domain code, in Python."""
    mask, state = 0xFFFFFFFF, 0
    for (block,) in struct.iter_unpack("<I", data):
        mixed = block * 0xCC9E2D51 & mask
        mixed = (mixed << 15 | mixed >> 17) & mask
        state ^= mixed * 0x1B873593 & mask
        state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="sglang: the stub is never installed beside a GPU")
def test_the_hash_of_the_cpu_stub() -> None:
    importlib.import_module("sgl_kernel")
    seeds, positions = [7, 1 << 40, 2**64 - 1, 0], [3, 4, 8191, 0]
    signed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds])
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu(signed.view(torch.uint64), torch.tensor(positions), torch.arange(5))
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in range(5)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == expected
    assert murmur3(bytes(4)) == 0x2362F9DE  # a published test vector


@pytest.mark.skipif(torch.cuda.is_available(), reason="sglang: the stub is never installed beside a GPU")
def test_other_kernels_of_the_stub_say_that_they_are_missing() -> None:
    stub = importlib.import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.rmsnorm needs a GPU"):
        stub.rmsnorm(1, out=2)
