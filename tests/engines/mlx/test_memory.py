from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import EngineError, HandoffCancelledError, InvalidParameterError

pytest.importorskip("mlx.core", exc_type=ImportError)

from pipeline.engines.mlx.memory import Memory, Share
from tests.engines.flow import Waiter


def memory(cap_tokens: int, slots: int = 8) -> Memory:
    return Memory(cap_tokens * 10, 10, slots, lambda: None)


def test_a_batched_share_takes_what_the_longest_takes() -> None:
    room = memory(1000)
    room.ask(100, rows=1)
    assert room.free_bytes == 9000
    room.ask(300, rows=1)
    assert room.free_bytes == 4000  # 2 x 300 tokens
    room.ask(150, rows=0)
    assert room.free_bytes == 2500


def test_release_is_idempotent_and_grants_in_order() -> None:
    granted = []
    room = Memory(1000, 1, 8, lambda: granted.append("call"))
    first = room.ask(800, rows=0)
    large, small = room.ask(900, rows=0), room.ask(100, rows=0)
    assert (first.granted, large.granted, small.granted) == (True, False, False)
    room.release(first)
    room.release(first)
    assert (large.granted, small.granted) == (True, True)
    assert room.free_bytes == 0
    assert granted == ["call", "call"]


def test_a_place_in_the_line_can_be_given_back() -> None:
    room = memory(1000)
    room.ask(800, rows=0)
    large, small = room.ask(900, rows=0), room.ask(100, rows=0)
    assert not small.granted
    room.release(large)
    assert small.granted


def test_slots_bound_the_batch_only() -> None:
    room = memory(1000, slots=1)
    first, second, prompt = room.ask(10, rows=1), room.ask(10, rows=1), Share(10, rows=0)
    assert (first.granted, second.granted) == (True, False)
    assert not room.wait(second, 0.0)
    room.release(first)
    assert room.wait(second, 0.0)
    assert not prompt.granted


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(EngineError, match="set kv_cache_bytes to 10010 or more"):
        memory(1000).ask(1001, rows=1)


def test_more_samples_than_ever_fit_are_the_clients_to_change() -> None:
    room = memory(100, slots=8)
    with pytest.raises(
        InvalidParameterError, match=r"`n` = 4 samples .* 120 tokens and the engine has it for 100"
    ) as told:
        room.ask(30, rows=4)
    assert (told.value.param, told.value.http_status, told.value.retryable) == ("n", 400, False)
    assert room.ask(30, rows=3).granted


def test_every_sample_takes_a_row() -> None:
    room = memory(100, slots=3)
    share = room.ask(30, rows=3)
    assert room.free_bytes == 100
    waiting = room.ask(1, rows=1)
    assert (share.granted, waiting.granted) == (True, False)
    room.release(share)
    assert room.wait(waiting, 0.0)
    with pytest.raises(EngineError, match="max_running is 3"):
        room.ask(1, rows=4)


def test_close_wakes_who_waits() -> None:
    room = memory(100)
    room.ask(100, rows=0)
    share = room.ask(100, rows=0)
    waiter = Waiter(lambda: room.wait(share, 60.0))
    room.close()
    waiter.join()
    assert isinstance(waiter.error, HandoffCancelledError)


ASKS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(0, 9)), max_size=40)


@given(ASKS)
def test_the_cap_holds_and_nobody_waits_beside_free_memory(asks: list[tuple[int, int, int]]) -> None:
    room, live = memory(100, slots=3), []
    for tokens, rows, drop in asks:
        live.append(room.ask(tokens, rows=rows))
        if drop < len(live):
            room.release(live.pop(drop))
        granted = [share for share in live if share.granted]
        batch = [share.tokens for share in granted for _ in range(share.rows)]
        used = sum(share.tokens for share in granted if not share.rows) + len(batch) * max(batch, default=0)
        assert room.free_bytes == (100 - used) * 10 >= 0
        assert len(batch) <= 3
        assert granted or not live
    for share in live:
        room.release(share)
    assert room.free_bytes == 1000
