"""The packets between worker and plug-in."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.sglang import message
from pipeline.engines.sglang.message import Kind, Message

MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    room=st.integers(0, 2**64 - 1),
    page=st.integers(0, 2**32 - 1),
    value=st.integers(-(2**63), 2**63 - 1),
    run=st.integers(0, 255),
    data=st.binary(max_size=message.MAX_SIZE - message.SIZE),
)


@given(MESSAGES)
def test_the_round_trip_is_exact(made: Message) -> None:
    assert message.decode(message.encode(made)) == made
    assert len(message.encode(made)) == message.SIZE + len(made.data) <= message.MAX_SIZE


def test_the_bytes() -> None:
    assert message.encode(Message(Kind.READ, room=0x0102, page=3, value=16, run=7)).hex() == (
        "01070000" "03000000" "0201000000000000" "1000000000000000"
    )  # fmt: skip
    assert message.encode(Message(Kind.FAILED, room=1, data=b"why"))[message.SIZE :] == b"why"


@pytest.mark.parametrize("packet", [b"", bytes(message.SIZE - 1)])
def test_a_packet_that_is_too_short_is_refused(packet: bytes) -> None:
    with pytest.raises(struct.error):
        message.decode(packet)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="99 is not a valid Kind"):
        message.decode(bytes([99]) + bytes(message.SIZE - 1))
