"""Metrics: every family this package exposes, as one literal table, and the registry of one process.

Names follow Prometheus' conventions: base units, counters end in `_total`, no unit twice. `docs/metrics.md` is drawn
from the table. Nothing is global: a process makes one `Metrics` and passes it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.errors import ConfigError

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["api", "worker"]
SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)


class Family(NamedTuple):
    """One family. A counter's samples end in `_total`. `read`: its value is asked for when somebody scrapes."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SHORT_S
    read: bool = False

    @property
    def shown(self) -> str:
        """As it is written in a query."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


class Reading(NamedTuple):
    """A value of a family that is read at a scrape; `labels` in the table's order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


_ERRORS = Family("crossfill_broker_errors", "counter", "Steps that failed because the broker was away or refused.")

API: tuple[Family, ...] = (
    Family(
        "crossfill_requests",
        "counter",
        "Handoffs that this API process asked for, by how they ended: finished, failed, cancelled (by the client or an "
        "operator) or refused (never enqueued).",
        ("model", "outcome"),
    ),
    Family("crossfill_request_errors", "counter", "Those that failed or were refused, by error code.", ("code",)),
    Family(
        "crossfill_time_to_first_token_seconds",
        "histogram",
        "From asking to the first token here.",
        ("model",),
        SHORT_S,
    ),
    Family(
        "crossfill_time_per_output_token_seconds",
        "histogram",
        "Mean time between tokens of one answer, without the first.",
        ("model",),
        TOKEN_S,
    ),
    Family("crossfill_request_duration_seconds", "histogram", "From asking to the end of the answer.", ("model",)),
    Family("crossfill_prompt_tokens", "counter", "Prompt tokens of what was not refused.", ("model",)),
    Family("crossfill_output_tokens", "counter", "Tokens that decode engines sent here.", ("model",)),
    Family("crossfill_broker_up", "gauge", "1 when the broker answered this scrape, else 0.", read=True),
    Family("crossfill_budget_bytes", "gauge", "Cap on page bytes in flight on the control broker.", read=True),
    Family("crossfill_in_flight_bytes", "gauge", "Page bytes in flight on the control broker.", read=True),
    Family("crossfill_budget_waiters", "gauge", "Handoffs that wait for credit on the control broker.", read=True),
    Family(
        "crossfill_page_server_up", "gauge", "1 when a decode replica's page server answers.", ("server",), read=True
    ),
    Family("crossfill_page_server_budget_bytes", "gauge", "Cap on page bytes in flight there.", ("server",), read=True),
    Family("crossfill_page_server_in_flight_bytes", "gauge", "Page bytes in flight there.", ("server",), read=True),
    Family("crossfill_page_server_waiters", "gauge", "Handoffs that wait for credit there.", ("server",), read=True),
    Family("crossfill_live_handoffs", "gauge", "Handoffs not yet released, of all API processes.", read=True),
    Family("crossfill_queued_jobs", "gauge", "Jobs waiting in a queue.", ("queue",), read=True),
    Family(
        "crossfill_replicas",
        "gauge",
        "Replicas alive, by engine, role and state.",
        ("engine", "role", "state"),
        read=True,
    ),
    _ERRORS,
)

WORKER: tuple[Family, ...] = (
    Family(
        "crossfill_parts",
        "counter",
        "This replica's parts in handoffs, by role and end: done, cancelled, stale or failed.",
        ("role", "outcome"),
    ),
    Family("crossfill_queue_seconds", "histogram", "From a handoff's creation until its job began here.", ("role",)),
    Family("crossfill_prefill_seconds", "histogram", "P: from begin to the last chunk computed."),
    Family("crossfill_first_page_seconds", "histogram", "P: from begin until the first page was out."),
    Family("crossfill_transfer_seconds", "histogram", "P: from the first page out to the last."),
    Family("crossfill_admission_seconds", "histogram", "D: from begin until its engine had room."),
    Family("crossfill_import_seconds", "histogram", "D: from accept to the last page verified and imported."),
    Family("crossfill_first_token_seconds", "histogram", "D: from commit to the first token."),
    Family("crossfill_decode_seconds", "histogram", "D: from the first token to the last."),
    Family("crossfill_sent_pages", "counter", "P: pages sent."),
    Family("crossfill_sent_bytes", "counter", "P: payload bytes sent, after the codec."),
    Family("crossfill_imported_tokens", "counter", "D: prompt tokens whose KV came from a prefill engine."),
    Family("crossfill_imported_pages", "counter", "D: pages imported."),
    Family("crossfill_reused_tokens", "counter", "D: prompt tokens whose KV it held already."),
    Family("crossfill_reused_pages", "counter", "D: pages that did not have to travel."),
    Family(
        "crossfill_recoveries",
        "counter",
        "Handoffs that got over a fault, by how: recomputed (D computed the prompt itself), resumed (another attempt "
        "of P) or taken_over (another attempt of D).",
        ("kind",),
    ),
    _ERRORS,
    Family("crossfill_running_jobs", "gauge", "Jobs in a handler.", ("role",), read=True),
    Family("crossfill_draining", "gauge", "1 while this replica takes nothing new.", read=True),
    Family(
        "crossfill_own_page_server_up", "gauge", "D: 1 while its own page server answers, where it has one.", read=True
    ),
    Family("crossfill_engine_running_requests", "gauge", "Requests inside the engine, both roles.", read=True),
    Family("crossfill_engine_held_pages", "gauge", "Pages kept for export or import of live requests.", read=True),
    Family("crossfill_engine_cached_pages", "gauge", "Pages in the prefix cache.", read=True),
    Family("crossfill_engine_free_pages", "gauge", "Pages a new request could use.", read=True),
    Family(
        "crossfill_engine_prompt_tokens_computed",
        "counter",
        "Prompt tokens the engine ran through the model.",
        read=True,
    ),
    Family("crossfill_engine_tokens_sampled", "counter", "Tokens the engine sampled.", read=True),
    Family(
        "crossfill_replica_info",
        "gauge",
        "1, with who this replica is as labels.",
        ("replica", "engine", "role", "model"),
        read=True,
    ),
)

FAMILIES: Mapping[Process, tuple[Family, ...]] = {"api": API, "worker": WORKER}


class Metrics:
    """The families of one process. A name or label that is not in the table raises KeyError or ValueError."""

    def __init__(self, process: Process) -> None:
        self._families = {family.name: family for family in FAMILIES[process]}
        self._registry = CollectorRegistry()
        self._made = {f.name: _make(f, self._registry) for f in self._families.values() if not f.read}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        found = self._labelled(name, labels)
        assert isinstance(found, Counter), f"{name} is not a counter"
        found.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        found = self._labelled(name, labels)
        assert isinstance(found, Histogram), f"{name} is not a histogram"
        found.observe(value)

    def add_source(self, read: Callable[[], Iterable[Reading]]) -> None:
        """`read` is called at every scrape, from the scraper's thread. It must not raise."""
        self._registry.register(_Source(read, self._families))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text for a scraper that accepts `accept`, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answer scrapes on `port` from a thread of its own; returns how to end that. Raises ConfigError."""
        try:
            server, thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror}") from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

    def _labelled(self, name: str, labels: Mapping[str, str]) -> Counter | Histogram:
        made = self._made[name]
        return made.labels(**labels) if labels else made


def _make(family: Family, registry: CollectorRegistry) -> Counter | Histogram:
    if family.kind == "counter":
        return Counter(family.name, family.help, family.labels, registry=registry)
    return Histogram(family.name, family.help, family.labels, registry=registry, buckets=family.buckets)


class _Source(Collector):
    """Readings grouped into their families."""

    def __init__(self, read: Callable[[], Iterable[Reading]], families: Mapping[str, Family]) -> None:
        self._read = read
        self._families = families

    def describe(self) -> Iterable[Metric]:
        """Empty: the registry would call `collect` at registration otherwise."""
        return []

    def collect(self) -> Iterator[Metric]:
        found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for reading in self._read():
            family = self._families[reading.name]
            if family.name not in found:
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                found[family.name] = kind(family.name, family.help, labels=family.labels)
            found[family.name].add_metric(reading.labels, reading.value)
        yield from found.values()
