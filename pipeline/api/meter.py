"""Meter: a backend that counts and times what passes through it. It changes nothing of what it hands on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from anyio import to_thread

from pipeline import log, tracing
from pipeline.api.relay import Backend, Entry, Listener, Model, Submission
from pipeline.errors import BrokerError, CrossfillError
from pipeline.metrics import Metrics
from pipeline.request import Request
from pipeline.routing import Wish
from pipeline.tracing import Attributes, Span, Tracer, Untraced


class MeteredBackend:
    """`inner` with every submission metered; the rest of it as it is."""

    def __init__(
        self,
        inner: Backend,
        metrics: Metrics,
        tracer: Tracer | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._metrics = metrics
        self._tracer = tracer or Untraced()
        self._now_s = now_s

    async def start(self) -> None:
        await self._inner.start()

    async def close(self) -> None:
        await self._inner.close()
        await to_thread.run_sync(self._tracer.close)

    async def require_ready(self, model: Model) -> None:
        await self._inner.require_ready(model)

    async def explain(self, model: Model, tokens: int) -> list[Mapping[str, object]]:
        return await self._inner.explain(model, tokens)

    async def status(self) -> dict[str, Any]:
        return await self._inner.status()

    async def handoffs(self, recent: int) -> list[dict[str, Any]]:
        return await self._inner.handoffs(recent)

    async def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        return await self._inner.handoff(handoff_id)

    async def submit(self, request: Request, wish: Wish, model: Model) -> Submission:
        span = self._begin(request, model)
        watch = Stopwatch(self._metrics, model.name, span, self._now_s)
        try:
            with tracing.under(span.traceparent):
                inner = await self._inner.submit(request, wish, model)
            self._metrics.count("crossfill_prompt_tokens", len(request.token_ids), model=model.name)
            return MeteredSubmission(inner, watch, request.handoff_id)
        except CrossfillError as error:
            if isinstance(error, BrokerError):
                self._metrics.count("crossfill_broker_errors")
            watch.end("refused", error.code)
            raise
        except BaseException:  # the client left while it was enqueued
            watch.end("cancelled")
            raise

    def _begin(self, request: Request, model: Model) -> Span:
        attributes: Attributes = {
            "crossfill.handoff": request.handoff_id,
            "crossfill.model": model.name,
            "crossfill.prompt_tokens": len(request.token_ids),
        }
        return self._tracer.start("handoff", tracing.current(), attributes)


class MeteredSubmission:
    """One handoff in flight, counted once when it ends: by its last entry, a stop string, a cancel or its close.

    Whoever stops, cancels or closes does so in a task for this handoff alone: its log lines are about it.
    """

    def __init__(self, inner: Submission, watch: Stopwatch, handoff_id: str) -> None:
        self._inner = inner
        self._watch = watch
        self._id = handoff_id

    def listen(self, listener: Listener) -> None:
        def hear(heard: Entry | Exception) -> None:
            if not isinstance(heard, Exception):
                self._watch.see(heard)
            listener(heard)

        self._inner.listen(hear)

    async def cancel(self, reason: str) -> None:
        log.now_about(self._id)
        self._watch.end("cancelled")
        await self._inner.cancel(reason)

    async def stop(self) -> bool:
        log.now_about(self._id)
        self._watch.end("finished")
        return await self._inner.stop()

    async def trace(self) -> dict[str, Any] | None:
        log.now_about(self._id)
        return await self._inner.trace()

    async def close(self) -> None:
        log.now_about(self._id)
        self._watch.end("cancelled")  # it has ended long before, unless nobody wanted the rest
        await self._inner.close()


class Stopwatch:
    """The times of one handoff by the local monotonic clock. Only the first end counts."""

    def __init__(self, metrics: Metrics, model: str, span: Span, now_s: Callable[[], float]) -> None:
        self._metrics = metrics
        self._span = span
        self._model = model
        self._now_s = now_s
        self._start_s = now_s()
        self._first_s = self._last_s = 0.0
        self._tokens = 0
        self._ended = False

    def see(self, entry: Entry) -> None:
        if entry.token_ids:
            self._last_s = self._now_s()
            if not self._tokens:
                self._first_s = self._last_s
                self._observe("crossfill_time_to_first_token_seconds", self._first_s - self._start_s)
            self._tokens += len(entry.token_ids)
        if entry.error is not None:
            cancelled = entry.error.code == "cancelled"
            self.end("cancelled" if cancelled else "failed", None if cancelled else entry.error.code)
        elif entry.finish is not None:
            self.end("finished")

    def end(self, outcome: str, code: str | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self._span.end({"crossfill.outcome": outcome, "crossfill.tokens": self._tokens}, code)
        self._metrics.count("crossfill_requests", model=self._model, outcome=outcome)
        if code is not None:
            self._metrics.count("crossfill_request_errors", code=code)
        if outcome != "refused":
            self._observe("crossfill_request_duration_seconds", self._now_s() - self._start_s)
        self._metrics.count("crossfill_output_tokens", self._tokens, model=self._model)
        if self._tokens > 1:
            mean_s = (self._last_s - self._first_s) / (self._tokens - 1)
            self._observe("crossfill_time_per_output_token_seconds", mean_s)

    def _observe(self, name: str, seconds: float) -> None:
        self._metrics.observe(name, seconds, model=self._model)
