"""Stand: a broker and two workers' worth of services on it, each with a FakeEngine of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import numpy as np

from pipeline.broker import channel, keys, stream
from pipeline.broker.address import Address
from pipeline.broker.channel import TokenEntry
from pipeline.broker.clock import BrokerClock
from pipeline.broker.connect import connect, connect_blocking
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.ledger import Ledger
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Role, Snapshot
from pipeline.broker.registry import Registry
from pipeline.broker.signals import Signals
from pipeline.handoff import State
from pipeline.page import Page
from pipeline.request import Request, Sampling
from pipeline.routing import Route
from pipeline.settings import BrokerSettings, HandoffSettings, Settings
from pipeline.stages import decode, prefill
from pipeline.stages.drain import Services
from tests.begun import begin
from tests.proxy import Proxy
from tests.stages.fake import CONTRACT, PAGE_BYTES, FakeEngine

PATIENCE_S = 60.0  # for a loaded machine; nothing here takes a second
OWNER = "api-1"
PAGES_PASSWORD = "geheim"  # of D's own page server, where a test gives it one
ROUTE = Route("fake", f"prefill.fake.{CONTRACT.digest[:8]}", "d-0", "decode.d-0", "fake")
LOCAL = Route(None, None, "d-0", "decode.d-0", "fake")
LIMITS = HandoffSettings(queue_s=30, accept_s=30, progress_s=30)
Outcome = dict[str, object]
THREE = Sampling(max_tokens=3, temperature=0.0)
FINISHED: Outcome = {"outcome": "finished", "tokens": 3}


def settings(url: str, limits: HandoffSettings = LIMITS) -> Settings:
    """A budget of eight pages: one handoff may have two in flight."""
    broker = BrokerSettings(url=url, budget_bytes=8 * PAGE_BYTES, pages_password=PAGES_PASSWORD)
    return Settings(broker=broker, handoff=limits)


def _services(
    url: str, worker: str, limits: HandoffSettings, stack: ExitStack, address: Address | None = None
) -> Services:
    """One worker process's, with connections of its own."""
    client, events = connect(url), connect_blocking(url)
    for one in (client, events):
        stack.callback(one.close)
    chosen, clock = settings(url, limits), BrokerClock(client)
    ledger = Ledger(client, PageServers(client, chosen.broker), clock, chosen)
    stack.callback(ledger.pages.close)
    signals = Signals(events, ledger)
    signals.start()
    dispatch = Dispatch(client, ledger, Registry(client), chosen)
    return Services(worker, CONTRACT, chosen, ledger, dispatch, signals, clock, ledger.pages, address)


class Stand:
    """`p` and `d` are the engines. Workers reach the broker through `hop`, the test itself does not."""

    def __init__(
        self,
        url: str,
        p_limits: HandoffSettings = LIMITS,
        d_limits: HandoffSettings = LIMITS,
        address: Address | None = None,
    ) -> None:
        """`address`: of D's own page server."""
        self._stack = ExitStack()
        port = urlsplit(url).port
        assert port is not None
        self.hop = self._stack.enter_context(Proxy(port))
        self.client = connect(url)
        self._stack.callback(self.client.close)
        self.settings = settings(url, d_limits)
        self.ledger = Ledger(
            self.client, PageServers(self.client, self.settings.broker), BrokerClock(self.client), self.settings
        )
        self._stack.callback(self.ledger.pages.close)
        self.p, self.d = FakeEngine(), FakeEngine()
        self.p_services = _services(self.hop.url, "p-0@1", p_limits, self._stack)
        self.d_services = _services(self.hop.url, "d-0@1", d_limits, self._stack, address)
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="job")
        self._jobs: list[Future[Outcome]] = []
        self._made: list[Request] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever a failed test left running ends here."""
        self.hop.mend()
        for request in self._made:
            self.ledger.cancel(request.handoff_id, "teardown")
        self.p.close()
        self.d.close()
        closing = [self._pool.submit(part.signals.close) for part in (self.p_services, self.d_services)]
        self.client.publish(keys.HandoffKeys("").events, "wake")  # whoever listens need not sit out its slice
        self._pool.shutdown()
        for closed in closing:
            closed.result()
        self._stack.close()

    def open(
        self,
        tokens: int = 200,
        *,
        local: bool = False,
        first_token: bool = False,
        owned: bool = True,
        sampling: Sampling = THREE,
    ) -> Request:
        """A request of `tokens` random tokens (200: four pages) in the ledger; its text has three tokens."""
        ids = np.random.default_rng(len(self._made)).integers(3, CONTRACT.vocab_size, tokens)
        request = Request(secrets.token_hex(16), tuple(int(i) for i in ids), sampling, first_token=first_token)
        if owned:
            self.ledger.own(OWNER, 600)
        begin(self.ledger, request, CONTRACT, asdict(LOCAL if local else ROUTE), OWNER)
        self._made.append(request)
        return request

    def services(self, role: Role) -> Services:
        """Of the worker that the route has for `role`."""
        return self.p_services if role == "prefill" else self.d_services

    def supersede(self, request: Request, role: Role, worker: str = "") -> int:
        """Another attempt of `role` is dispatched, and begun by `worker`; returns it."""
        attempt = self.seen(request).attempt(role) + 1
        self.write(request, f"{role}_attempt", str(attempt))
        if worker:
            self.ledger.enter(request.handoff_id, role, worker)
        return attempt

    def prefill(self, request: Request) -> Future[Outcome]:
        """P's job, on a thread of its own."""
        return self._start(prefill.run, self.p_services, self.p, request.handoff_id)

    def decode(self, request: Request) -> Future[Outcome]:
        return self._start(decode.run, self.d_services, self.d, request.handoff_id)

    def _start(self, job: Callable[..., Outcome], *args: object) -> Future[Outcome]:
        self._jobs.append(self._pool.submit(job, *args))
        return self._jobs[-1]

    def begin(self, request: Request) -> tuple[Future[Outcome], Future[Outcome]]:
        """Both jobs."""
        return self.prefill(request), self.decode(request)

    def cancel(self, request: Request, *, told: bool = True) -> None:
        """Cancel it; not `told`: the notification gets lost, only the record says so."""
        if told:
            assert self.ledger.cancel(request.handoff_id, "client") is State.CANCELLING
        else:
            self.write(request, "state", State.CANCELLING)

    def write(self, request: Request, name: str, value: str) -> None:
        """Change the record behind everybody's back."""
        self.client.hset(keys.HandoffKeys(request.handoff_id).record, name, value)

    def seen(self, request: Request) -> Snapshot:
        snapshot = self.ledger.peek(request.handoff_id)
        assert snapshot is not None
        return snapshot

    def state(self, request: Request) -> State:
        return self.seen(request).state

    def await_state(self, request: Request, state: State) -> None:
        eventually(lambda: self.state(request) is state, f"state {state}")

    def field(self, request: Request, name: str) -> str | None:
        value = self.client.hget(keys.HandoffKeys(request.handoff_id).record, name)
        return value.decode() if isinstance(value, bytes) else value

    def said(self, request: Request) -> list[int]:
        """Token ids in the log, error entries left out."""
        return [token for entry in self.log(request) for token in entry.token_ids]

    def log(self, request: Request) -> list[TokenEntry]:
        raw = self.client.lrange(keys.HandoffKeys(request.handoff_id).tokens, 0, -1)
        return [channel.decode(entry) for entry in raw]

    def remains(self, request: Request) -> list[str]:
        """What is left in broker and engines once all jobs are over and the client has read everything."""
        for job in self._jobs:
            failure(job)
        self.ledger.forget(request.handoff_id)
        found = [key.decode() for key in self.client.scan_iter(f"cf:{{{request.handoff_id}}}:*")]
        found += [f"live {handoff_id}" for handoff_id in self.ledger.live()]
        found += [f"{name} {value}" for name, value in stream.gauges(self.client)._asdict().items() if value]
        return found + [f"{type(work).__name__} is open" for work in (*self.p.live, *self.d.live)]


def outcome(job: Future[Outcome]) -> Outcome:
    """What a job returned; raises what it raised."""
    return job.result(PATIENCE_S)


def failure(job: Future[Outcome]) -> BaseException | None:
    return job.exception(PATIENCE_S)


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never saw {what}"
        time.sleep(0.01)


def same(ours: list[Page], theirs: list[Page]) -> bool:
    """Equal to the last bit."""
    return [(p.index, p.tokens, p.data.tobytes()) for p in ours] == [
        (p.index, p.tokens, p.data.tobytes()) for p in theirs
    ]


def quiet(stand: Stand, request: Request) -> None:
    """D has closed its engine's part and left; when P has too, nothing but the record waits for the API."""
    assert stand.d.live == []
    assert stand.seen(request).worker("decode") is None
    assert stand.remains(request) == []
