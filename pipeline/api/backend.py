"""BrokerBackend: the edge's backend over ledger, token channel, registry and routing.

What every request does goes over the hub's line, from the event loop: it begins by one script and is forgotten by one.
The rest is rare: the broker's other modules are synchronous and run in threads, one hop per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import anyio
from anyio import to_thread

from pipeline import routing
from pipeline.api.relay import Model
from pipeline.api.router import FRESH_S, Chosen, Router
from pipeline.broker import connect, keys, queue, stream
from pipeline.broker.clock import BrokerClock
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.hub import Listener, TokenHub, TokenReader
from pipeline.broker.janitor import Janitor
from pipeline.broker.ledger import Ledger
from pipeline.broker.operator import Operator
from pipeline.broker.page_server import PageServers
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.resp import Reply
from pipeline.broker.scripts import Step
from pipeline.errors import BrokerError, CrossfillError, OverloadedError
from pipeline.request import Request
from pipeline.routing import Route, Wish
from pipeline.settings import Settings

_OWNER_TTL_S = 10.0  # handoffs of an API process silent for this long are nobody's
_BEAT_S = 1.0
_BEGIN_S = 2.0  # a request is not begun later than this after it was sent: its client is refused then
_LATE_S = 0.5  # how much later we take a reply: the broker's clock and ours may differ
_SHORT_TOKENS = 4096
_log = logging.getLogger(__name__)


class BrokerBackend:
    """`close` ends its tasks; live handoffs are by then cancelled by the relays that own them."""

    def __init__(self, settings: Settings, models: Iterable[Model] = ()) -> None:
        """`models` are all that are served here: a replica of one of them is never a faulty replica of another."""
        self._settings = settings
        self._client = connect.connect(settings.broker.url)
        self._async_client = connect.connect_async(settings.broker.url)
        self._hub = TokenHub(self._async_client)
        clock = BrokerClock(self._client)
        self._pages = PageServers(self._client, settings.broker)
        self._ledger = Ledger(self._client, self._pages, clock, settings)
        self._registry = Registry(self._client)
        self._dispatch = Dispatch(self._client, self._ledger, self._registry, settings)
        self._janitor = Janitor(self._client, self._client, self._ledger, self._registry, clock, settings)
        self._clock = clock
        self.operator = Operator(self._client, settings, clock)
        self._owner = f"api-{uuid.uuid4().hex}"
        engines = {worker.engine for worker in settings.workers}
        digests = {model.contract.digest for model in models}
        self._router = Router(self._registry.list, settings.routing, engines, digests)
        self._unmet: tuple[Model, ...] = ()  # models whose needs of a broker that is away nobody could check
        self._limit = settings.api.max_live if settings.api else None  # handoffs alive at once
        self._count, self._counted_s = 0, -FRESH_S  # everybody's live handoffs, when they were counted last
        self._creating = 0  # submissions on their way; with the router's live ones all that are ours
        self._reading: asyncio.Task[list[Replica]] | None = None
        self._doubtful: dict[str, float] = {}  # handoffs that may have begun; monotonic s after which none begins
        self._tasks: list[asyncio.Task[None]] = []

    def require_broker(self, models: Iterable[Model]) -> None:
        """Refuse a broker that would lose or evict what we store. Raises BrokerError, ConfigError."""
        page_bytes = max(model.contract.page_shape.page_bytes for model in models)
        connect.require_ready(self._client, self._settings.broker.budget_bytes, page_bytes)

    def await_broker(self, models: Iterable[Model]) -> None:
        """The broker is away: ask `require_broker` again until that passes, and refuse what is asked meanwhile."""
        self._unmet = tuple(models)

    async def start(self) -> None:
        with contextlib.suppress(CrossfillError):  # a broker that is away may come back: the next beat looks
            await to_thread.run_sync(self._beat)
        await self._hub.start()
        # Each apart: a lease must be renewed however long the others take.
        steps = (self._beat, self._janitor.sweep_in_turn, self._pages.settle, self._settle_doubts)
        self._tasks = [asyncio.create_task(_every(_BEAT_S, step)) for step in steps]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hub.close()
        await self._async_client.aclose()
        self._pages.close()
        self._client.close()

    async def submit(self, request: Request, wish: Wish, model: Model) -> BrokerSubmission:
        self._require_met()
        self._require_room(self._router.live + self._creating)
        self._creating += 1
        try:
            return await self._submit(request, wish, model)
        finally:
            self._creating -= 1

    async def _submit(self, request: Request, wish: Wish, model: Model) -> BrokerSubmission:
        await self._require_room_for_all()
        chosen = await self._choose(request, wish, model)
        step = await self._opening(_fitted(request, chosen.decoder), chosen.route, model)
        reader = TokenReader(self._hub, request.handoff_id)
        reader.open()
        begin = asyncio.ensure_future(self._hub.run(step, _BEGIN_S + _LATE_S))
        try:
            if not await asyncio.shield(begin):
                raise BrokerError(f"the broker was too busy to take the request within {_BEGIN_S:g} s")
        except BaseException:
            reader.close()
            with anyio.CancelScope(shield=True):
                await self._undo(request.handoff_id, begin)
            raise
        self._router.began(chosen.route)
        return BrokerSubmission(self._ledger, self._hub, reader, request.handoff_id, chosen, self._router)

    async def _choose(self, request: Request, wish: Wish, model: Model) -> Chosen:
        """Where the prompt goes. A short one's way is found sooner than a thread is; a reading serves all who wait."""
        if not self._router.fresh:
            await self._read()
        if len(request.token_ids) <= _SHORT_TOKENS:
            with contextlib.suppress(CrossfillError):  # what is refused may have registered since: asked once more
                return self._router.route_seen(request, wish, model)
        return await to_thread.run_sync(self._router.route, request, wish, model)

    async def _read(self) -> None:
        """Raises BrokerError."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(to_thread.run_sync(self._router.fleet))
        await asyncio.shield(self._reading)

    async def _opening(self, request: Request, route: Route, model: Model) -> Step:
        """Raises BrokerError, and that only on the first request that goes this way."""
        make = partial(
            self._dispatch.opening,
            request,
            model.contract,
            route,
            self._owner,
            model.name,
            owner_ttl_s=_OWNER_TTL_S,
            within_s=_BEGIN_S,
        )
        return make() if self._dispatch.knows(route, model.name) else await to_thread.run_sync(make)

    def _require_room(self, live: int) -> None:
        """Raises OverloadedError when as many handoffs as may be are alive: ours exactly, everybody's about now."""
        if self._limit is not None and live >= self._limit:
            raise OverloadedError(
                f"{live} requests are being served, {self._limit} are the most: try again in a moment"
            )

    async def _require_room_for_all(self) -> None:
        """As `_require_room` for everybody's. Half full a moment ago, they are counted before each request."""
        crowd = max(self._count, self._router.live + self._creating)
        if self._limit is None or (time.monotonic() - self._counted_s < FRESH_S and 2 * crowd < self._limit):
            return
        count = await self._hub.ask("ZCARD", keys.LIVE)
        assert isinstance(count, int)
        self._count, self._counted_s = count, time.monotonic()
        self._require_room(self._count)

    def _require_met(self) -> None:
        if self._unmet:
            raise BrokerError("the broker has not been fit for use since this server started: see its log")

    async def require_ready(self, model: Model) -> None:
        self._require_met()
        candidates = await to_thread.run_sync(lambda: self._router.candidates(model, fresh=True))
        routing.choose(candidates, model.contract, 1, Wish())

    async def explain(self, model: Model, tokens: int) -> list[Mapping[str, object]]:
        return await to_thread.run_sync(self._router.explain, model, tokens)

    async def status(self) -> dict[str, Any]:
        return await to_thread.run_sync(self._status)

    async def handoffs(self, recent: int) -> list[dict[str, Any]]:
        return await to_thread.run_sync(self.operator.handoffs, recent)

    async def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        return await to_thread.run_sync(self.operator.handoff, handoff_id)

    def _beat(self) -> None:
        if self._unmet:
            self.require_broker(self._unmet)
            self._unmet = ()
            _log.info("the broker is there: serving")
        self._ledger.own(self._owner, _OWNER_TTL_S)
        self._clock.refresh()  # two hosts' quartz clocks part by seconds a day

    async def _undo(self, handoff_id: str, begin: asyncio.Future[Reply]) -> None:
        """It may have begun although nobody waits for it any more, or its reply was lost."""
        await asyncio.wait({begin})
        if begin.exception() is not None:
            self._doubtful[handoff_id] = time.monotonic() + _BEGIN_S + _LATE_S
        elif begin.result():
            try:
                await to_thread.run_sync(self._abandon, handoff_id)
            except CrossfillError:
                self._doubtful[handoff_id] = 0.0

    def _abandon(self, handoff_id: str) -> None:
        """Nothing happens where there is no such handoff. Raises BrokerError."""
        self._ledger.cancel(handoff_id, "client-gone")
        self._ledger.forget(handoff_id)

    def _settle_doubts(self) -> None:
        """Of requests that nobody waits for and that may have begun, those that can no longer begin. Raises
        BrokerError; what else is wrong with one keeps nobody from the others."""
        for handoff_id, late_s in tuple(self._doubtful.items()):
            if time.monotonic() >= late_s:
                try:
                    self._abandon(handoff_id)
                except BrokerError:
                    raise
                except Exception:
                    _log.exception("handoff %s cannot be ended", handoff_id)
                del self._doubtful[handoff_id]

    def _status(self) -> dict[str, Any]:
        replicas = self._registry.list()
        queues = {name for replica in replicas for name in routing.queues(replica)}
        budget = stream.gauges(self._client)._asdict()
        return {
            "replicas": [_shown(replica) for replica in replicas],
            "budget": {"budget_bytes": self._settings.broker.budget_bytes, **budget},
            "page_servers": [view.shown() for view in self.operator.pages(replicas)],
            "live": self._ledger.live(),
            "queues": queue.queue_lengths(self._client, sorted(queues)),
        }


class BrokerSubmission:
    """One handoff of ours: its tokens, and what the edge may do to it."""

    def __init__(
        self, ledger: Ledger, hub: TokenHub, reader: TokenReader, handoff_id: str, chosen: Chosen, router: Router
    ) -> None:
        self._ledger = ledger
        self._hub = hub
        self._reader = reader
        self._id = handoff_id
        self._chosen = chosen
        self._router = router
        self._stopped = False

    def listen(self, listener: Listener) -> None:
        self._reader.listen(listener)

    async def cancel(self, reason: str) -> None:
        await to_thread.run_sync(self._ledger.cancel, self._id, reason)

    async def stop(self) -> bool:
        self._stopped = await to_thread.run_sync(self._ledger.stop, self._id)
        return self._stopped

    async def trace(self) -> dict[str, Any] | None:
        trace = await to_thread.run_sync(self._ledger.trace, self._id)
        return trace and trace | {"routing": self._chosen.explain()}

    async def close(self) -> None:
        """It is forgotten; what has ended well teaches the router."""
        self._router.ended(self._chosen.route)
        self._reader.close()
        wanted = (self._stopped or self._reader.finished) and self._router.learns
        reply = await self._hub.run(self._ledger.settling(self._id, shown=wanted))
        assert isinstance(reply, bytes)
        if trace := self._ledger.settled(self._id, reply):
            self._router.learn(self._chosen, trace)


def _fitted(request: Request, decoder: Replica) -> Request:
    """A replica may hold fewer tokens than the checkpoint allows, and may need the first token from P."""
    room, sampling = routing.room(decoder) - len(request.token_ids), request.sampling
    if sampling.max_tokens > room:
        sampling = replace(sampling, max_tokens=room)
    elif not decoder.needs_first_token:
        return request
    return replace(request, sampling=sampling, first_token=decoder.needs_first_token)


def _shown(replica: Replica) -> dict[str, Any]:
    contract = {"digest": replica.contract.digest, "context_length": replica.contract.context_length}
    pages = replica.pages and replica.pages._asdict()
    return {**asdict(replica), "contract": contract, "features": sorted(replica.features), "pages": pages}


async def _every(seconds: float, step: Callable[[], object]) -> None:
    """A step that fails is tried again: the broker may be back by then.

    Its thread is none of those that requests share: where these have all of them, this process still lives.
    """
    own = anyio.CapacityLimiter(1)
    while True:
        try:
            await to_thread.run_sync(step, limiter=own)
        except CrossfillError as error:
            _log.warning("%s", error)
        except Exception:
            _log.exception("a periodic step broke")
        await asyncio.sleep(seconds)
