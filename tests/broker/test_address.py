"""Addresses that may stand in a record: what is taken, and that no secret ever is."""

from __future__ import annotations

import pytest

from pipeline.broker.address import Address
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    "url", ["redis://box:6379/0", "rediss://box.example:6380/1", "redis://[::1]:6379/0", "redis://box"]
)
def test_an_address_keeps_its_words(url: str) -> None:
    address = Address.public(url, 1 << 28)
    assert address == (url, 1 << 28)
    assert str(address) == f"{url} 268435456"
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "url",
    ["", "box:6379", "http://box:1", "unix:///tmp/sock", "redis://", "redis:///0", "redis://box:0/0", "redis://b:x/0"],
)
def test_what_others_cannot_reach_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a redis:// or rediss:// URL that other hosts can reach"):
        Address.public(url, 1)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:geheim@box:1/0",
        "redis://u:geheim@box:1",
        "redis://u@box:1",
        "redis://box:1/0?password=geheim",
        "redis://box#geheim",
    ],
)
def test_what_is_nobody_elses_business_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"broker\.pages_user and broker\.pages_password") as caught:
        Address.public(url, 1)
    assert "geheim" not in str(caught.value).partition("?")[0].partition("#")[0]


@pytest.mark.parametrize("text", ["", "redis://box:1/0", "redis://box:1/0 many"])
def test_what_is_no_address_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(text)
