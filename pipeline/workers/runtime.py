"""Runtime: one replica. Loads the engine, warms it, registers, and takes jobs until told to stop.

The lease is taken after warm-up only: a model load or a first compile of a minute is not death. Heartbeats come
from a thread of their own, so a long engine step is not death either.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline import engines, heap, tracing
from pipeline.broker import keys, stream
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect, connect_blocking, require_ready
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.janitor import Janitor
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.queue import DECODE_JOB, PREFILL_JOB
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.signals import Signals
from pipeline.broker.worker import ConcurrentWorker
from pipeline.checkpoint import read_contract
from pipeline.engines.base import Engine
from pipeline.errors import BrokerError, StaleAttemptError
from pipeline.metrics import Metrics, Reading
from pipeline.page import Page, page_count, page_tokens
from pipeline.request import Request, Sampling
from pipeline.settings import Settings, WorkerSettings
from pipeline.stages import decode, prefill
from pipeline.stages.archive import Archive
from pipeline.stages.crowd import Crowd, CrowdEngine
from pipeline.stages.drain import Services
from pipeline.stages.observe import Observer
from pipeline.stages.recording import RecordedEngine, Recorder
from pipeline.stages.share import ImportShare
from pipeline.workers.page_keeper import PageKeeper, own_address

if TYPE_CHECKING:
    from redis import Redis

_log = logging.getLogger(__name__)
_BEAT_S = 0.5
_GAUGES = {"running": "running_requests"}  # an engine's gauge whose metric has another name
_WARM_TOKENS = 80  # more than one page, so that export and import are warm too


def run(settings: Settings, worker: WorkerSettings) -> None:
    """Serve as one replica until SIGTERM or SIGINT. Raises ConfigError, UnsupportedModelError, BrokerError at start;
    what ended the engine, where it ends by itself."""
    client = connect(settings.broker.url)
    own_address(settings, worker)  # before a model is loaded for nothing
    with ExitStack() as stack:
        chosen = worker.engine_settings.model_copy(update={"role": worker.role, "held_pages": _held_pages(worker)})
        engine = stack.enter_context(closing(engines.load(worker.engine, worker.model, chosen)))
        require_ready(client, settings.broker.budget_bytes, engine.contract.page_shape.page_bytes)
        warm_up(engine, worker.role)
        heap.settle()
        replica = Runtime(settings, worker, engine, client)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        replica.start()
        _log.info("replica %s is ready (%s, %s)", worker.name, worker.engine, worker.role)
        while not stop.wait(_BEAT_S) and not replica.broken:
            pass
        _log.info("replica %s drains", worker.name)
        ended = engine.failure
        replica.close()
    if ended is not None:
        raise ended


def _held_pages(worker: WorkerSettings) -> int:
    """Pages that may wait for export: beside decoding at most half of the KV pool, where a page may be FP32."""
    chosen = worker.engine_settings
    if worker.role != "both":
        return chosen.held_pages
    page_bytes = read_contract(worker.model).page_shape.page_bytes
    return max(1, min(chosen.held_pages, chosen.kv_cache_bytes // page_bytes // 4))


def warm_up(engine: Engine, role: str) -> None:
    """Run every path of `role` once: prefill and export, import and decode. Leaves no cached prefix."""
    needs = engine.capabilities
    sampling = Sampling(max_tokens=3, temperature=1.0, top_p=0.9, seed=1)  # a seeded draw may be compiled at first use
    request = Request(secrets.token_hex(16), (1,) * _WARM_TOKENS, sampling, first_token=needs.needs_first_token)
    pages = _computed(engine, request) if needs.can_prefill else _blank(engine, request)
    if role != "prefill":
        with closing(engine.admit(replace(request, handoff_id=secrets.token_hex(16)))) as admission:
            for page in pages[admission.held_pages :]:
                admission.import_page(page)
            for _ in admission.decode((1,) if request.first_token else ()):
                pass
    engine.reset_prefix_cache()


def _computed(engine: Engine, request: Request) -> list[Page]:
    with closing(engine.prefill(request)) as work:
        pages = [work.read(index) for index in range(page_count(request.transfer_tokens))]
    engine.reset_prefix_cache()
    return pages


def _blank(engine: Engine, request: Request) -> list[Page]:
    """Zeros are good enough to warm an engine that computes no pages; nobody sees what it says."""
    shape, tokens = engine.contract.page_shape, request.transfer_tokens
    return [Page(index, page_tokens(index, tokens), shape.empty()) for index in range(page_count(tokens))]


def _last_trace(ledger: Ledger, handoff_id: str) -> dict[str, Any] | None:
    """Of a live handoff, or of one that has ended and is remembered."""
    return ledger.trace(handoff_id) or ledger.ended(handoff_id)


class Runtime:
    """A loaded engine and its RQ workers, one per role. `start` returns at once; `close` drains."""

    def __init__(self, settings: Settings, worker: WorkerSettings, engine: Engine, client: Redis) -> None:
        self._settings = settings
        self._worker = worker
        self._engine = engine
        self._client = client
        clock, metrics = BrokerClock(client), Metrics("worker")
        self._own_pages = own_address(settings, worker)
        self._pages = PageServers(connect(settings.broker.url), settings.broker)
        ledger = Ledger(client, self._pages, clock, settings)
        self._clock = clock
        self._registry = Registry(client)
        self._signals = Signals(connect_blocking(settings.broker.url), ledger)
        self._archive = Archive(settings.capture)
        self._recorder = Recorder(settings.capture, self._archive, self._signals.seen, partial(_last_trace, ledger))
        self._janitor = Janitor(client, client, ledger, Registry(client), clock, settings)
        self._services = Services(
            worker=f"{worker.name}@{self._registry.incarnation}",
            contract=engine.contract,
            settings=settings,
            ledger=ledger,
            dispatch=Dispatch(client, ledger, self._registry, settings),
            signals=self._signals,
            clock=clock,
            pages=self._pages,
            address=self._own_pages,
            observer=Observer(metrics, tracing.connect(settings.observe, worker.name, clock.now_ms)),
            # Prompts that are computed here need the other half (and `held_pages` keeps those to it).
            share=ImportShare(engine.capabilities.kv_tokens // 2 if worker.role == "both" else 0),
            resigned=self._resigned,
        )
        self._page_keeper = PageKeeper(
            self._pages, self._own_pages, self._signals.active, self._signals.seen, ledger.peek, settings.broker
        )
        metrics.add_source(self._readings)
        self._end_metrics: Callable[[], None] = lambda: None
        self._lost = threading.Event()  # another process took our name: stop serving under it
        self._lease = threading.Lock()  # whoever renews our lease, or gives it up
        self._holds_lease = False
        self._draining = False
        self._unwanted = False  # an operator wants this replica to take nothing new
        self._stop = threading.Event()
        self._takers = self._make_takers()
        self._threads = [
            threading.Thread(target=taker.run, name=f"rq-{role}", daemon=True) for role, taker in self._takers.items()
        ]
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._keeper = threading.Thread(target=self._keep_house, name="janitor", daemon=True)

    def start(self) -> None:
        """Raises ConfigError, BrokerError."""
        if self._worker.metrics_port:
            serve = self._services.observer.metrics.serve
            self._end_metrics = serve(self._worker.metrics_host, self._worker.metrics_port)
        self._page_keeper.start(self._engine.contract.page_shape.page_bytes)
        self._registry.register(self._replica(), self._worker.lease_s)
        self._holds_lease = True
        self._signals.start()
        self._heart.start()
        self._keeper.start()
        for thread in self._threads:
            thread.start()

    @property
    def broken(self) -> bool:
        """It can serve no more: another process took its name, its engine has ended, or a taker has."""
        engine = self._engine.failure
        if engine is not None:
            _log.error("the engine has ended: %s", engine)
        return self._lost.is_set() or engine is not None or not all(thread.is_alive() for thread in self._threads)

    def _resigned(self) -> bool:
        """Whether the engine has ended. Then we take nothing more and our lease ends here and now: what we had is taken
        out of our hands by whoever sees that, as it is of the dead."""
        if self._engine.failure is None:
            return False
        for taker in self._takers.values():
            taker.request_stop()
        with self._lease, contextlib.suppress(BrokerError):  # else it ends by itself: nobody renews it
            if self._holds_lease:
                self._holds_lease = False
                self._registry.withdraw(self._worker.name)
        return True

    def close(self) -> None:
        """Take nothing new, finish what runs within the grace, leave the rest to others, then leave the registry."""
        self._draining = True
        try:
            self._renew()  # the routers look elsewhere from now on
        except Exception as error:  # of the broker, or of an engine that has ended: what runs must end all the same
            _log.warning("replica %s cannot say that it drains: %s", self._worker.name, error)
        for taker in self._takers.values():
            taker.request_stop()
        self._join(self._worker.grace_s)
        self._signals.abandon()
        self._join(None)
        self._archive.close()
        self._stop.set()
        self._heart.join()
        self._keeper.join()
        self._page_keeper.close()
        with contextlib.suppress(BrokerError):  # else the lease ends by itself
            self._registry.withdraw(self._worker.name)
        self._signals.close()
        self._pages.close()
        self._end_metrics()
        self._services.observer.tracer.close()

    def _join(self, timeout_s: float | None) -> None:
        """Wait until every running job has ended, or `timeout_s` is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _make_takers(self) -> dict[str, ConcurrentWorker]:
        together = CrowdEngine(self._engine, Crowd())
        roles: dict[str, tuple[str, str, Callable[[str], dict[str, Any]]]] = {
            "prefill": (
                keys.prefill_queue(self._worker.engine, self._engine.contract.digest),
                PREFILL_JOB,
                partial(prefill.run, self._services, self._engine),
            ),
            "decode": (
                keys.decode_queue(self._worker.name),
                DECODE_JOB,
                partial(decode.run, self._services, RecordedEngine(together, self._recorder)),
            ),
        }
        wanted = roles if self._worker.role == "both" else {self._worker.role: roles[self._worker.role]}
        return {
            role: ConcurrentWorker(
                queue,
                connect_blocking(self._settings.broker.url),
                handlers={job: handler},
                slots=self._worker.slots,
                name=f"{self._worker.name}.{role}",
                settings=self._settings.broker,
                on_stop=partial(self._services.ledger.cancel, reason="stop-job"),
            )
            for role, (queue, job, handler) in wanted.items()
        }

    def _replica(self) -> Replica:
        return Replica(
            name=self._worker.name,
            engine=self._worker.engine,
            role=self._worker.role,
            model=self._worker.model.name,
            contract=self._engine.contract,
            slots=self._worker.slots,
            pages=self._own_pages,
            stats=self._stats(),
            load=self._load(),
            started_ms=int(self._clock.now_ms()),
            **asdict(self._engine.capabilities),
        )

    def _stats(self) -> dict[str, int]:
        return asdict(self._engine.stats())

    def _load(self) -> dict[str, int]:
        running = {f"{role}_running": taker.running for role, taker in self._takers.items()}
        stopping = {"stopping": 1} if self._draining else {}
        lame = {} if self._page_keeper.up else {"page_server_down": 1}
        return running | stopping | lame | ({"draining": 1} if self._draining or self._unwanted or lame else {})

    def _readings(self) -> Iterator[Reading]:
        """For a scrape. An engine that has ended has no gauges; the rest is told all the same."""
        load = self._load()
        for role in self._takers:
            yield Reading("crossfill_running_jobs", load[f"{role}_running"], (role,))
        yield Reading("crossfill_draining", load.get("draining", 0))
        if self._own_pages is not None:
            yield Reading("crossfill_own_page_server_up", int(self._page_keeper.up))
        worker = self._worker
        yield Reading("crossfill_replica_info", 1, (worker.name, worker.engine, worker.role, worker.model.name))
        try:
            stats = self._stats()
        except Exception as error:
            _log.warning("no gauges of the engine: %s: %s", type(error).__name__, error)
            return
        for name, value in stats.items():
            yield Reading(f"crossfill_engine_{_GAUGES.get(name, name)}", value)

    def _beat(self) -> None:
        """Publish gauges and renew leases. Only a lost name ends it early."""
        while not self._stop.wait(_BEAT_S):
            try:
                self._renew()
            except StaleAttemptError as error:
                _log.error("heartbeat: %s", error)
                self._lost.set()
                return
            except BrokerError as error:
                self._services.observer.metrics.count("crossfill_broker_errors")
                _log.warning("heartbeat: %s", error)
            except Exception:
                _log.exception("heartbeat")  # a lease that ends by a bug of ours would look like death

    def _keep_house(self) -> None:
        """Sweep in turn, three times a lease. Beside the heartbeat: over a slow link a sweep outlasts a lease."""
        while not self._stop.wait(self._worker.lease_s / 3):
            try:
                self._clock.refresh()
                self._janitor.sweep_in_turn()
            except BrokerError as error:
                _log.warning("janitor: %s", error)
            except Exception:
                _log.exception("janitor")

    def _heed(self, unwanted: bool) -> None:
        """Routers look elsewhere while `draining` is in our load. Decode jobs in the queue are ours alone and are done;
        prefill jobs are left to others where there are any."""
        if unwanted != self._unwanted:
            _log.info("replica %s %s", self._worker.name, "drains: an operator asked" if unwanted else "serves again")
        self._unwanted = unwanted
        if prefill := self._takers.get("prefill"):
            prefill.pause(unwanted and self._others_prefill())

    def _others_prefill(self) -> bool:
        return any(
            other.name != self._worker.name
            and other.role != "decode"
            and not other.load.get("draining")
            and (other.engine, other.contract.digest) == (self._worker.engine, self._engine.contract.digest)
            for other in self._registry.list()
        )

    def _renew(self) -> None:
        with self._lease:
            if not self._holds_lease:
                return
            unwanted = self._registry.heartbeat(self._worker.name, self._stats(), self._load(), self._worker.lease_s)
        if unwanted or self._unwanted:
            self._heed(unwanted)
        ours = [i for i in self._signals.active() if not ((seen := self._signals.seen(i)) and seen.page_server)]
        stream.heartbeat(self._client, ours, self._settings.broker)  # the others' leases are the page keeper's
