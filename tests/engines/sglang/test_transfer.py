"""SGLang's side of a transfer, without SGLang's scheduler: what it is told, and that an abort drains first."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.flow import PATIENCE_S, Waiter

pytest.importorskip("sglang", reason="SGLang is not in this environment")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from pipeline.engines.sglang import order
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.order import First
from pipeline.engines.sglang.plugin.transfer import Manager, Receiver, Sender
from pipeline.logprob import TokenLogprob
from pipeline.request import Sampling

TOKEN = 417


class FakeManager:
    """A pool whose copies a test can hold up, and a station that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.rooms: dict[int, Any] = {}
        self.moved: list[tuple[str, int]] = []
        self.fences: list[str] = []  # what each copy waited for
        self.recorded = 0
        self.committed: list[tuple[int, int, int]] = []
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.station = SimpleNamespace(add=self.rooms.__setitem__, remove=self.rooms.pop, say=self.said.append)
        self.pool = SimpleNamespace(read=self._mover("read"), write=self._mover("write"), fence=self._fence)

    def _mover(self, way: str) -> Any:
        def move(blocks: list[int], pages: Any, after: Any) -> None:
            self.began.set()
            assert self.go_on.wait(PATIENCE_S)
            assert len(pages) == len(blocks)
            self.fences.append(after)
            self.moved += [(way, block) for block in blocks]

        return move

    def _fence(self) -> str:
        self.recorded += 1
        return f"fence {self.recorded}"

    def first_token(self, index: int) -> int:
        return TOKEN + index

    def commit(self, index: int, room: int, token: int) -> None:
        self.committed.append((index, room, token))

    def held_slots(self, receiver: object, tokens: int) -> Any:
        """Page i of a prompt lies in block 30 + i."""
        return (np.arange(tokens // 64) + 30) * 64 if tokens else None

    def breathe(self) -> None:
        pass


SLOT: Any = np.zeros(1, np.float16)


def sender(manager: FakeManager, pages: int = 5) -> Any:
    made = Sender(manager, "anywhere", 9, [0], 0, False)  # type: ignore[arg-type]  # 0.5.17 passes two arguments more
    made.init(pages, 2)
    return made


def receiver(manager: FakeManager, blocks: list[int], held_tokens: int) -> Any:
    made = Receiver(manager, "anywhere", 9)  # type: ignore[arg-type]
    assert made.poll() == KVPoll.Bootstrapping
    made.init(0)
    assert made.poll() == KVPoll.WaitingForInput
    made.send_metadata(np.array(blocks, np.int32), 3, None, decode_prefix_len=held_tokens)
    assert made.poll() == KVPoll.Transferring
    return made


def test_p_says_what_is_ready_after_each_chunk_and_the_token_before_the_last() -> None:
    manager = FakeManager()
    sending = sender(manager)
    sending.send(np.array([7, 8]), None)
    sending.send(np.array([4, 5]), num_kv_tokens=128)
    sending.send(np.array([1]))
    assert manager.said == [
        Message(Kind.READY, 9, 2),
        Message(Kind.READY, 9, 4),
        Message(Kind.FIRST, 9, value=TOKEN + 2),
        Message(Kind.READY, 9, 5),
    ]
    assert sending.poll() == KVPoll.WaitingForInput
    assert [sending.read(page, SLOT) for page in (0, 3, 4)] == [True] * 3
    assert manager.moved == [("read", 7), ("read", 5), ("read", 1)]


def test_p_says_what_was_drawn_last_in_place_of_sglangs_token() -> None:
    manager = FakeManager()
    sending = sender(manager, 2)
    drawn = [First((7, 9), (TokenLogprob(7, -0.5), TokenLogprob(9, -1.5))) for _ in range(2)]
    sending.draw(First((1, 1)))  # behind a chunk that is not the last
    sending.send(np.array([7]))
    sending.draw(drawn[0])
    sending.send(np.array([8]))
    first = next(message for message in manager.said if message.kind is Kind.FIRST)
    assert order.unpack(first.data, Sampling(8, n=2, logprobs=0)) == drawn[1]


def test_p_keeps_its_blocks_until_it_is_released_and_copies_no_more_then() -> None:
    manager = FakeManager()
    sending = sender(manager, 1)
    sending.send(np.array([7]))
    sending.obey(Message(Kind.COMMIT, 9))  # not for P
    assert sending.poll() == KVPoll.WaitingForInput
    sending.obey(Message(Kind.RELEASE, 9))
    assert sending.poll() == KVPoll.Success
    assert not sending.read(0, SLOT)
    assert manager.moved == []
    sending.clear()
    assert manager.rooms == {}


@pytest.mark.parametrize(("pages", "last", "sends"), [(0, False, False), (0, True, True), (3, False, True)])
def test_a_last_chunk_without_a_page_is_sent_too(pages: int, last: bool, sends: bool) -> None:
    assert sender(FakeManager()).should_send_kv_chunk(pages, last) is sends


def test_pages_that_are_not_there_are_refused() -> None:
    manager = FakeManager()
    sending, receiving = sender(manager), receiver(manager, [20, 21], held_tokens=128)
    assert not sending.read(0, SLOT)
    assert [receiving.write(page, SLOT) for page in (0, 1, 2, 3, 4)] == [False, False, True, True, False]
    assert manager.moved == [("write", 20), ("write", 21)]


def test_a_run_of_pages_moves_at_once_and_none_of_it_where_one_is_not_there() -> None:
    manager = FakeManager()
    sending, receiving = sender(manager), receiver(manager, [20, 21, 22], held_tokens=128)
    sending.send(np.array([7, 8, 4]))
    assert sending.read(1, np.zeros(2, np.float16))
    assert receiving.write(2, np.zeros(3, np.float16))
    assert not sending.read(1, np.zeros(3, np.float16))
    assert not receiving.write(1, np.zeros(2, np.float16))
    assert not receiving.write(4, np.zeros(2, np.float16))
    assert manager.moved == [("read", 8), ("read", 4), ("write", 20), ("write", 21), ("write", 22)]


def test_d_gives_out_what_it_held_and_what_came() -> None:
    """For captures, before it is committed: from the first page on, though only what it lacks is written."""
    manager = FakeManager()
    receiving = receiver(manager, [20, 21], held_tokens=128)
    assert receiving.read(0, np.zeros(3, np.float16))
    assert receiving.read(3, SLOT)
    assert not receiving.read(3, np.zeros(2, np.float16))
    assert manager.moved == [("read", 30), ("read", 31), ("read", 20), ("read", 21)]
    receiving.obey(Message(Kind.COMMIT, 9, value=TOKEN))
    assert not receiving.read(0, SLOT)


@pytest.mark.parametrize("request_of", ["0.5.17", "0.5.23"])
def test_held_pages_are_found_through_sglangs_table(request_of: str) -> None:
    """A row per request, a slot per token; two pages of 64 are held, in blocks 9 and 4."""
    slots = torch.zeros((3, 300), dtype=torch.int32)
    slots[2, :64] = torch.arange(64) + 9 * 64
    slots[2, 64:128] = torch.arange(64) + 4 * 64
    ours, others = object(), object()
    row = SimpleNamespace(req_pool_idx=2)
    found = SimpleNamespace(req_pool_idx=2, kv=None) if request_of == "0.5.17" else SimpleNamespace(kv=row)
    queue = [SimpleNamespace(kv_receiver=others, req=None), SimpleNamespace(kv_receiver=ours, req=found)]
    scheduler = SimpleNamespace(
        disagg_decode_prealloc_queue=SimpleNamespace(queue=queue),
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
    )
    manager: Any = SimpleNamespace(_scheduler=scheduler)
    assert Manager.held_slots(manager, ours, 128).tolist() == [9 * 64, 4 * 64]
    assert Manager.held_slots(manager, ours, 0) is None


def test_nothing_is_written_into_ps_pool() -> None:
    manager = FakeManager()
    sending = sender(manager, 1)
    sending.send(np.array([7]))
    assert not sending.write(0, SLOT)
    assert manager.moved == []


def test_copies_wait_for_what_was_queued_when_the_blocks_were_told() -> None:
    manager = FakeManager()
    sending, receiving = sender(manager), receiver(manager, [20], 0)
    sending.send(np.array([7]))
    sending.read(0, SLOT)
    receiving.write(0, SLOT)
    sending.send(np.array([8]))
    sending.read(1, SLOT)
    assert manager.fences == ["fence 2", "fence 1", "fence 3"]


def test_d_says_what_it_holds_and_commits() -> None:
    manager = FakeManager()
    receiving = receiver(manager, [20], held_tokens=704)
    assert manager.said == [Message(Kind.ADMITTED, 9, 11)]
    receiving.obey(Message(Kind.RELEASE, 9))  # not for D
    assert receiving.poll() == KVPoll.Transferring
    receiving.obey(Message(Kind.COMMIT, 9, value=TOKEN))
    receiving.obey(Message(Kind.COMMIT, 9, value=TOKEN + 1))
    assert manager.committed == [(3, 9, TOKEN)]
    assert receiving.poll() == KVPoll.Success


def test_d_that_holds_every_page_still_commits() -> None:
    manager = FakeManager()
    receiving = receiver(manager, [], held_tokens=128)
    assert manager.said == [Message(Kind.ADMITTED, 9, 2)]
    receiving.obey(Message(Kind.COMMIT, 9, value=TOKEN))
    assert receiving.poll() == KVPoll.Success


@pytest.mark.parametrize("way", ["out", "in"])
def test_abort_waits_for_the_copy_that_runs(way: str) -> None:
    manager = FakeManager()
    manager.go_on.clear()
    transfer = sender(manager) if way == "out" else receiver(manager, [20, 21, 22, 23, 24], 0)
    if way == "out":
        transfer.send(np.array([20, 21, 22, 23, 24]))
    copy = transfer.read if way == "out" else transfer.write
    copying = Waiter(lambda: copy(1, SLOT))
    assert manager.began.wait(PATIENCE_S)
    events: list[str] = []

    def abort() -> None:
        transfer.abort()
        events.append(f"aborted after {manager.moved}")

    aborting = Waiter(abort)
    while transfer.poll() != KVPoll.Failed:  # wanted at once, so that no further copy begins
        pass
    assert not copy(2, SLOT)
    assert events == []
    manager.go_on.set()
    copying.join()
    aborting.join()
    assert copying.value is True
    assert events == [f"aborted after {[('read' if way == 'out' else 'write', 21)]}"]
    assert manager.rooms == {}
    transfer.obey(Message(Kind.COMMIT, 9))
    transfer.obey(Message(Kind.RELEASE, 9))
    assert transfer.poll() == KVPoll.Failed
    assert manager.committed == []


def test_a_lost_worker_ends_a_transfer() -> None:
    manager = FakeManager()
    sending = sender(manager)
    sending.lose()
    assert sending.poll() == KVPoll.Failed
    with pytest.raises(RuntimeError):
        sending.failure_exception()
