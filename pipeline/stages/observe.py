"""Observe: what one worker's part in a handoff adds to metrics, traces and log, read from the marks it notes anyway.

All marks are of the broker's clock. A stage whose two marks are not both there is not counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.broker.record import COUNTS
from pipeline.errors import BrokerError, HandoffCancelledError, StaleAttemptError
from pipeline.metrics import Metrics
from pipeline.page import page_count
from pipeline.tracing import Attributes, Span, Tracer, Untraced

if TYPE_CHECKING:
    from pipeline.stages.drain import Part

_log = logging.getLogger(__name__)
# histogram -> (from, to), of the marks of one role
STAGES = {
    "prefill": {
        "crossfill_prefill_seconds": ("prefill_started", "prefill_ended"),
        "crossfill_first_page_seconds": ("prefill_started", "first_page_out"),
        "crossfill_transfer_seconds": ("first_page_out", "last_page_out"),
    },
    "decode": {
        "crossfill_admission_seconds": ("decode_started", "admitted"),
        "crossfill_import_seconds": ("accepted", "last_page_in"),
        "crossfill_first_token_seconds": ("committed", "first_token"),
        "crossfill_decode_seconds": ("first_token", "finished"),
    },
}


class Observer:
    """What a worker process sees with; passed to every job in `Services`."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self.metrics = metrics
        self.tracer = tracer or Untraced()

    @contextlib.contextmanager
    def watching(self, part: Part) -> Iterator[None]:
        """Around the work of one part. Whatever ends it is counted and passes; log lines inside are about it."""
        error: BaseException | None = None
        with log.about(part.handoff_id):
            span = self._begin(part)
            try:
                yield
            except BaseException as raised:
                error = raised
                raise
            finally:
                count(self.metrics, part, error)
                self._end(part, span, error)
                _log.info("%s of handoff %s: %s", part.role, part.handoff_id, outcome(error))

    def _begin(self, part: Part) -> Span:
        attributes: Attributes = {
            "crossfill.handoff": part.handoff_id,
            "crossfill.replica": part.services.worker.rpartition("@")[0],
            "crossfill.attempt": part.attempt,
        }
        return self.tracer.start(part.role, part.record.fields.get("traceparent", ""), attributes, _at(part, "started"))

    def _end(self, part: Part, span: Span, error: BaseException | None) -> None:
        """The stages whose marks are there become spans below, then the part's own ends."""
        marks = _marks(part)
        for name, (start, end) in STAGES[part.role].items():
            if f"at_{start}" in marks and f"at_{end}" in marks:
                label = name.removeprefix("crossfill_").removesuffix("_seconds")
                below = self.tracer.start(label, span.traceparent, {}, marks[f"at_{start}"])
                below.end(at_ms=marks[f"at_{end}"])
        counts = {name: part.fields[name] for name in COUNTS if name in part.fields}
        failed = outcome(error) == "failed"
        code = getattr(error, "code", type(error).__name__) if failed else None
        span.end({f"crossfill.{name}": value for name, value in counts.items()}, code)


def count(metrics: Metrics, ended: Part, error: BaseException | None) -> None:
    """Count one part that has done its work; `error` is what ended it, None when all went well."""
    metrics.count("crossfill_parts", role=ended.role, outcome=outcome(error))
    if isinstance(error, BrokerError):
        metrics.count("crossfill_broker_errors")
    marks = _marks(ended)
    _span(metrics, "crossfill_queue_seconds", marks, ("created", f"{ended.role}_started"), role=ended.role)
    for name, ends in STAGES[ended.role].items():
        _span(metrics, name, marks, ends)
    if ended.role == "prefill":
        _sent(metrics, ended)
    else:
        _taken_in(metrics, ended)


def _marks(part: Part) -> dict[str, float]:
    """Broker ms by the fields' names."""
    return {name: float(value) for name, value in (part.record.fields | part.fields).items() if name[:3] == "at_"}


def _at(part: Part, mark: str) -> float | None:
    return _marks(part).get(f"at_{part.role}_{mark}")


def outcome(error: BaseException | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, HandoffCancelledError):
        return "cancelled"
    return "stale" if isinstance(error, StaleAttemptError) else "failed"


def _span(metrics: Metrics, name: str, marks: dict[str, float], ends: tuple[str, str], **labels: str) -> None:
    start, end = (marks.get(f"at_{mark}") for mark in ends)
    if start is not None and end is not None:
        metrics.observe(name, max(0.0, end - start) / 1000, **labels)


def _sent(metrics: Metrics, ended: Part) -> None:
    metrics.count("crossfill_sent_pages", _number(ended, "pages"))
    metrics.count("crossfill_sent_bytes", _number(ended, "bytes"))


def _taken_in(metrics: Metrics, ended: Part) -> None:
    for what in ("imported", "reused"):
        tokens = _number(ended, f"{what}_tokens")
        metrics.count(f"crossfill_{what}_tokens", tokens)
        metrics.count(f"crossfill_{what}_pages", page_count(tokens))
    for kind, happened in _recoveries(ended).items():
        if happened:
            metrics.count("crossfill_recoveries", kind=kind)


def _recoveries(ended: Part) -> dict[str, bool]:
    seen = ended.watch.snapshot or ended.record
    return {
        "recomputed": "recomputed" in ended.fields,
        "resumed": seen.number("prefill_attempt") > ended.attempt,  # a takeover counts for both
        "taken_over": ended.attempt > 1,
    }


def _number(ended: Part, name: str) -> int:
    return int(ended.fields.get(name, 0))
