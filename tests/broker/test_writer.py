"""What the sender tells the choice of a codec: how long pages took that could have gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import fakeredis
import pytest

from pipeline import prefix
from pipeline.broker import writer
from pipeline.broker.credit import Credit, Grant, Outgoing, Sent
from pipeline.budget import Answer
from pipeline.codec import Choice
from pipeline.frame import FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import PageShape

WAIT_S = 0.05
SHAPE = PageShape(layers=1, kv_heads=1, head_dim=8)
CHAIN = prefix.chain(prefix.seed("d" * 64, "salt"), range(64))


class Stingy(Credit):
    """A server that grants nothing until it was waited for."""

    def __init__(self) -> None:
        self.waited = False

    def exchange(self, frames: Sequence[Outgoing], wanted: Sequence[int], size: int) -> tuple[Sent, Grant]:
        refused = wanted and not self.waited
        return Sent(len(frames), None), Grant(0, Answer.WAIT) if refused else Grant(len(wanted), None)

    def await_wake(self, timeout_s: float) -> None:
        time.sleep(WAIT_S)
        self.waited = True


def test_waiting_for_credit_counts_and_waiting_for_pages_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, float]] = []
    monkeypatch.setattr(Choice, "observe", lambda _, pages, sent, seconds: told.append((pages, sent, seconds)))
    frames = FrameWriter("f" * 32, Attempts(1, 1), SHAPE, CHAIN, b"p" * 32)
    sender = writer._Sender(fakeredis.FakeRedis(), Stingy(), frames, 1.0, lambda: None)
    begin, page = time.monotonic(), Outgoing(1, b"header", bytes(100))
    sender.waiting.append(Outgoing(0, b"open", b""))
    sender.deliver(list(sender.waiting))
    time.sleep(WAIT_S)  # P computes
    sender.waiting.append(page)
    for _ in range(3):  # no credit; credit; the page goes
        sender.deliver(list(sender.waiting))
    whole = time.monotonic() - begin
    ((pages, sent, seconds),) = told
    assert (pages, sent) == (SHAPE.page_bytes, 100)
    assert WAIT_S <= seconds <= whole - WAIT_S
    assert not sender.waiting
