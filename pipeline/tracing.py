"""Tracing: spans of one handoff in every process that has a part in it, exported by OpenTelemetry where asked for.

The context crosses processes as a W3C `traceparent` in the handoff's record: P and D read the record before they touch
a frame, so frames need none (docs/decisions/0030-traces-through-the-record.md). All times are of the broker's clock:
spans of two hosts lie on one axis.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.errors import ConfigError
from pipeline.settings import ObserveSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

Attributes = Mapping[str, str | int | float]
TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # https://www.w3.org/TR/trace-context/
_current: ContextVar[str] = ContextVar("traceparent", default="")


def current() -> str:
    """The `traceparent` that this task works under; empty when it is not traced."""
    return _current.get()


@contextlib.contextmanager
def under(traceparent: str) -> Iterator[None]:
    """Work under a span of here or of another process. What is not a `traceparent` is none."""
    token = _current.set(traceparent if TRACEPARENT.fullmatch(traceparent) else "")
    try:
        yield
    finally:
        _current.reset(token)


class Span(Protocol):
    """Something that takes time. `traceparent` names it for its children; empty: nobody looks."""

    @property
    def traceparent(self) -> str: ...

    def end(self, attributes: Attributes | None = None, error: str | None = None, at_ms: float | None = None) -> None:
        """`error` is an error code."""
        ...


class Tracer(Protocol):
    def start(self, name: str, parent: str, attributes: Attributes, at_ms: float | None = None) -> Span:
        """A span under `parent` (a `traceparent`, empty: a trace of its own); `at_ms` by the broker's clock."""
        ...

    def close(self) -> None:
        """Export what is left."""
        ...


class Untraced:
    """The tracer and the span of a process that exports nothing. A client's trace still passes through it."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def start(self, name: str, parent: str, attributes: Attributes, at_ms: float | None = None) -> Untraced:
        return Untraced(parent)

    def end(self, attributes: Attributes | None = None, error: str | None = None, at_ms: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def connect(settings: ObserveSettings, process: str, now_ms: Callable[[], float]) -> Tracer:
    """The tracer that the settings ask for. `now_ms` is the broker's clock. Raises ConfigError."""
    if not settings.otlp_endpoint and not settings.trace_file:
        return Untraced()
    files = contextlib.ExitStack()
    try:
        return OtelTracer(_exporters(settings, files), files, process, now_ms, settings.trace_share)
    except ImportError as error:
        raise ConfigError(f"traces need `pip install 'crossfill[otel]'` ({error})") from error


def _exporters(settings: ObserveSettings, files: contextlib.ExitStack) -> list[SpanExporter]:
    """OTLP over HTTP, and a file of one JSON object a span: any number of processes may append to it."""
    found: list[SpanExporter] = []
    if settings.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        found.append(OTLPSpanExporter(endpoint=settings.otlp_endpoint))
    if settings.trace_file:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        try:
            file = files.enter_context(settings.trace_file.open("a", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"observe.trace_file: cannot write {settings.trace_file}: {error.strerror}") from error
        found.append(ConsoleSpanExporter(out=file, formatter=lambda span: f"{span.to_json(indent=None)}\n"))
    return found


class OtelTracer:
    """A provider of its own: nothing global is set, so an engine's own tracing is left alone. `files` close last."""

    def __init__(
        self,
        exporters: list[SpanExporter],
        files: contextlib.ExitStack,
        process: str,
        now_ms: Callable[[], float],
        share: float,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create({"service.name": "crossfill", "service.instance.id": process})
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(share)), shutdown_on_exit=False
        )
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("crossfill")
        self._files = files
        self._now_ms = now_ms

    def start(self, name: str, parent: str, attributes: Attributes, at_ms: float | None = None) -> OtelHandoffSpan:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
        start = _ns(self._now_ms() if at_ms is None else at_ms)
        made = self._tracer.start_span(name, context=context, attributes=dict(attributes), start_time=start)
        return OtelHandoffSpan(made, self._now_ms)

    def close(self) -> None:
        self._provider.shutdown()
        self._files.close()


class OtelHandoffSpan:
    """`Span` over OpenTelemetry's."""

    def __init__(self, inner: OtelSpan, now_ms: Callable[[], float]) -> None:
        self._inner = inner
        self._now_ms = now_ms

    @property
    def traceparent(self) -> str:
        context = self._inner.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, attributes: Attributes | None = None, error: str | None = None, at_ms: float | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._inner.set_attributes(dict[str, Any](attributes or {}))
        if error is not None:
            self._inner.set_status(Status(StatusCode.ERROR, error))
        self._inner.end(_ns(self._now_ms() if at_ms is None else at_ms))


def _ns(ms: float) -> int:
    return round(ms * 1_000_000)
