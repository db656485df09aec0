"""Prefix: the chain against a second implementation with struct and hashlib, and what a key may and may not share."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import page, prefix

START = prefix.seed("digest", "salt")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def slow_chain(start: bytes, token_ids: list[int]) -> list[bytes]:
    """One token at a time."""
    keys, link, hasher = [], start, hashlib.sha256(start)
    for number, token in enumerate(token_ids, 1):
        hasher.update(struct.pack("<I", token))
        if number % 64 == 0 or number == len(token_ids):
            link = hasher.digest()
            keys.append(link)
            hasher = hashlib.sha256(link)
    return keys


@settings(deadline=None)
@given(TOKENS)
def test_the_chain_equals_the_slow_one(token_ids: list[int]) -> None:
    assert prefix.chain(START, token_ids) == slow_chain(START, token_ids)


def test_golden_keys() -> None:
    """The wire and the prefix caches of running replicas depend on these bytes."""
    assert hashlib.sha256(b"crossfill/1\0digest\0salt").digest() == START
    assert [key.hex()[:16] for key in prefix.chain(START, range(130))] == [
        "56f3af9800209eeb",
        "ac35e2b78214ef92",
        "a0db611e709eed1a",
    ]


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_keys_agree_exactly_as_long_as_whole_pages_do(a: list[int], b: list[int]) -> None:
    pages_a, pages_b = ([ids[at : at + 64] for at in range(0, len(ids), 64)] for ids in (a, b))
    same = True
    for key_a, key_b, page_a, page_b in zip(
        prefix.chain(START, a), prefix.chain(START, b), pages_a, pages_b, strict=False
    ):
        same = same and page_a == page_b
        assert (key_a == key_b) == same


@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_one_key_a_page(tokens: int, keys: int) -> None:
    assert len(prefix.chain(START, [7] * tokens)) == keys == page.page_count(tokens)


def test_a_partial_tail_has_its_own_key() -> None:
    full, partial = prefix.chain(START, [5] * 128), prefix.chain(START, [5] * 127)
    assert full[0] == partial[0]
    assert full[1] != partial[1]
    assert len({prefix.chain(START, [5] * n)[-1] for n in range(1, 65)}) == 64


def test_models_and_tenants_share_no_key() -> None:
    starts = [prefix.seed(digest, salt) for digest in ("a", "b") for salt in ("", "x", "y")]
    assert len({prefix.chain(start, [1])[0] for start in starts}) == 6


def test_the_prompt_digest_is_the_last_link() -> None:
    assert prefix.prompt_digest(START, list(range(100))) == slow_chain(START, list(range(100)))[1]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        prefix.chain(START, [token])


def test_both_modules_mean_the_same_page() -> None:
    assert page.PAGE_TOKENS == 64
    assert [len(prefix.chain(START, [1] * tokens)) for tokens in (64, 65, 128, 129)] == [1, 2, 2, 3]
