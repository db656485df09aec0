"""Crowd: prompts that come in at the same time and begin alike. The common pages travel once, with the first of them.

An engine lends others only pages of prompts that are whole. So who comes second waits, before it asks the engine for
room, until the first has its first token; then the engine holds the common pages for it, and D's accept leaves them
out. Nothing is shared on the page server: no page there has two owners. See docs/decisions/0050.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pipeline import prefix
from pipeline.engines.base import WAIT_SLICE_S, Admission, Check, Engine, TokenStep
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page
from pipeline.request import Request
from pipeline.stages.wrapped import WrappedAdmission, WrappedEngine

PATIENCE_S = 5.0  # without a page of the one that is waited for
VAIN_S = 60.0  # no more waiting for so long once it was in vain: this engine keeps no pages, or has no room for them


class Lead:
    """One prompt that is coming in. `keys`: the addresses of its full pages; `next` the page it has not got yet."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.held: int | None = None  # pages the engine had for it; None: it waits for room
        self.next = 0
        self.moved_s = 0.0
        self.whole = False  # it has its first token: others find its pages


class Crowd:
    """The prompts that come in to one engine. Thread safe."""

    def __init__(self, patience_s: float = PATIENCE_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._now_s = now_s
        self._changed = threading.Condition()
        self._leads: list[Lead] = []
        self._vain_until_s = float("-inf")

    @property
    def size(self) -> int:
        return len(self._leads)

    def join(self, keys: Sequence[bytes], timeout_s: float, check: Check) -> tuple[Lead, int]:
        """Wait while another one brings enough of `keys`; then this one is coming in, too, until it `leave`s.

        Returns it, and how many pages it has been waiting for and should find in the engine. Blocks for `timeout_s` at
        most, calling `check` every WAIT_SLICE_S; what that raises ends the wait.
        """
        mine, deadline_s, expected = Lead(keys), self._now_s() + timeout_s, 0
        with self._changed:
            while (first := self._bringing(keys)) is not None and self._now_s() < deadline_s:
                self._changed.wait(WAIT_SLICE_S)
                check()
                expected = _common(first.keys, keys) if first.whole else 0
            self._leads.append(mine)
        return mine, expected

    def admitted(self, lead: Lead, held: int, expected: int) -> None:
        """The engine has room for it, and holds `held` of its pages."""
        with self._changed:
            lead.held = lead.next = held
            lead.moved_s = self._now_s()
            if held < expected:
                self._vain_until_s = self._now_s() + VAIN_S
            self._changed.notify_all()

    def moved(self, lead: Lead) -> None:
        """One more page is in the engine."""
        lead.next += 1
        lead.moved_s = self._now_s()

    def leave(self, lead: Lead, *, whole: bool) -> None:
        """It is in, or it will not be. Idempotent."""
        with self._changed:
            if lead in self._leads:
                lead.whole = whole
                self._leads.remove(lead)
                self._changed.notify_all()

    def _bringing(self, keys: Sequence[bytes]) -> Lead | None:
        """Whom it is worth waiting for."""
        if self._now_s() < self._vain_until_s:
            return None
        return next((lead for lead in self._leads if self._worth(lead, keys)), None)

    def _worth(self, lead: Lead, keys: Sequence[bytes]) -> bool:
        """It brings pages of ours, has at most twice as many before it as it saves us, and does not stand still.

        Twice: both cross one link, so who does not wait slows the other down by as much as it sends.
        """
        if lead.held is not None and self._now_s() - lead.moved_s >= self._patience_s:
            return False
        saved = _common(lead.keys, keys) - (lead.held or 0)
        return saved > 0 and len(lead.keys) - lead.next <= 2 * saved


class CrowdEngine(WrappedEngine):
    """An engine whose imports wait for one another where they begin alike."""

    def __init__(self, engine: Engine, crowd: Crowd) -> None:
        super().__init__(engine)
        self._crowd = crowd

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> Admission:
        if local:
            return super().admit(request, local=local, timeout_s=timeout_s, check=check)
        began_s = time.monotonic()
        lead, expected = self._crowd.join(self._keys(request), timeout_s / 2, check)
        try:
            left_s = timeout_s - (time.monotonic() - began_s)
            admission = super().admit(request, timeout_s=left_s, check=check)
        except BaseException:
            self._crowd.leave(lead, whole=False)
            raise
        self._crowd.admitted(lead, admission.held_pages, expected)
        return CrowdAdmission(admission, self._crowd, lead)

    def _keys(self, request: Request) -> list[bytes]:
        full = request.transfer_tokens // PAGE_TOKENS * PAGE_TOKENS
        return prefix.chain(prefix.seed(self.contract.digest, request.salt), request.token_ids[:full])


class CrowdAdmission(WrappedAdmission):
    """It leaves the crowd with its first token, or when it is closed."""

    def __init__(self, admission: Admission, crowd: Crowd, lead: Lead) -> None:
        super().__init__(admission)
        self._crowd = crowd
        self._lead = lead

    def import_page(self, page: Page) -> None:
        super().import_page(page)
        self._crowd.moved(self._lead)

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        return self._until_whole(super().decode(first_tokens, first_logprobs))

    def close(self) -> None:
        self._crowd.leave(self._lead, whole=False)
        super().close()

    def _until_whole(self, steps: Iterator[TokenStep]) -> Iterator[TokenStep]:
        """The first step says that the engine has begun with the whole prompt."""
        for number, step in enumerate(steps):
            if not number:
                self._crowd.leave(self._lead, whole=True)
            yield step


def _common(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """Pages that both begin with: chained addresses that are equal mean an equal prefix."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ours[middle - 1] == theirs[middle - 1] else (low, middle - 1)
    return low
