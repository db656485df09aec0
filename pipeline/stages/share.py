"""Share: how much of an engine's KV pool prompts may hold that are still coming in.

A replica of both roles computes prompts in the pool it decodes in. Two of them whose pools are full of prompts that
wait for each other's pages would both wait for a deadline: half a pool each is what keeps room for the other half's
work. See docs/decisions/0008.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.engines.base import WAIT_SLICE_S
from pipeline.errors import DeadlineError


class ImportShare:
    """First come, first served. `limit_tokens` 0: no bound. Thread safe."""

    def __init__(self, limit_tokens: int = 0) -> None:
        self._limit = limit_tokens
        self._held = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def held_tokens(self) -> int:
        """Of all who are inside now."""
        return self._held

    @contextmanager
    def holding(self, tokens: int, timeout_s: float, check: Callable[[], None]) -> Iterator[None]:
        """Inside, `tokens` count. One that is larger than the whole share enters when it is alone.

        Blocks up to `timeout_s` (then DeadlineError), calling `check` every WAIT_SLICE_S; what it raises ends the wait.
        """
        place = object()
        with self._changed:
            self._line.append(place)
            try:
                self._await_turn(place, tokens, time.monotonic() + timeout_s, check)
                self._held += tokens
            finally:
                self._line.remove(place)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= tokens
                self._changed.notify_all()

    def _await_turn(self, place: object, tokens: int, deadline: float, check: Callable[[], None]) -> None:
        while not (self._line[0] is place and self._fits(tokens)):
            if time.monotonic() >= deadline:
                raise DeadlineError("prompts that are coming in hold all of their share of the KV pool")
            self._changed.wait(WAIT_SLICE_S)
            self._changed.release()  # it may ask the broker, for seconds: those inside must be able to leave
            try:
                check()
            finally:
                self._changed.acquire()

    def _fits(self, tokens: int) -> bool:
        return not self._limit or not self._held or self._held + tokens <= self._limit
