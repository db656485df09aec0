"""Contract: which fields must agree, the digest against hashlib over literal JSON, and the round trip."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest

from pipeline import contract
from pipeline.contract import Contract
from pipeline.errors import ContractMismatchError
from pipeline.page import PageShape

ONE = Contract("aa", "bb", "cc", layers=3, kv_heads=2, head_dim=32, vocab_size=1024, context_length=8192)
MUST_AGREE: dict[str, Any] = {
    "weights": "xx", "tokenizer": "xx", "config": "xx", "layers": 4, "kv_heads": 1, "head_dim": 64,
    "vocab_size": 1025, "dtype": "bfloat16", "page_tokens": 16, "wire_version": 2,
}  # fmt: skip


def test_the_digest_covers_what_must_agree() -> None:
    text = (
        '{"config": "cc", "dtype": "float16", "head_dim": 32, "kv_heads": 2, "layers": 3, "page_tokens": 64,'
        ' "tokenizer": "bb", "vocab_size": 1024, "weights": "aa", "wire_version": 1}'
    )
    assert ONE.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("field", "value"), MUST_AGREE.items())
def test_each_field_counts_and_is_named(field: str, value: Any) -> None:
    other = dataclasses.replace(ONE, **{field: value})
    assert other.digest != ONE.digest
    assert contract.differences(ONE, other) == {field: (getattr(ONE, field), value)}
    with pytest.raises(ContractMismatchError) as caught:
        contract.require_equal(ONE, other)
    assert caught.value.differences == {field: (getattr(ONE, field), value)}
    assert f"{field} ({getattr(ONE, field)} here, {value} there)" in str(caught.value)


def test_every_field_is_covered_by_these_tests() -> None:
    assert {each.name for each in dataclasses.fields(Contract)} == MUST_AGREE.keys() | {"context_length"}


def test_a_shorter_context_may_hand_over() -> None:
    other = dataclasses.replace(ONE, context_length=100)
    assert other.digest == ONE.digest
    contract.require_equal(ONE, other)
    assert contract.differences(ONE, other) == {}


def test_all_differences_are_named_at_once() -> None:
    other = dataclasses.replace(ONE, weights="xx", layers=9)
    assert contract.differences(ONE, other) == {"weights": ("aa", "xx"), "layers": (3, 9)}


def test_the_round_trip_keeps_every_field() -> None:
    text = contract.encode(ONE)
    assert json.loads(text) == dataclasses.asdict(ONE)
    assert contract.decode(text) == ONE
    assert contract.decode(text.encode()) == ONE


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"weights": "aa"}'])
def test_what_is_no_contract_is_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        contract.decode(text)


def test_a_field_of_a_later_version_is_refused() -> None:
    with pytest.raises(TypeError, match="later"):
        contract.decode(json.dumps(dataclasses.asdict(ONE) | {"later": 1}))


def test_the_page_shape_is_the_contract_s() -> None:
    assert ONE.page_shape == PageShape(layers=3, kv_heads=2, head_dim=32)
