"""BrokerBackend: the edge's backend over ledger, token channel, registry and routing.

The broker's modules are synchronous: they run in threads, one hop per step. Only the token channel is asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import anyio
from anyio import to_thread

from pipeline import routing
from pipeline.api.relay import Model
from pipeline.broker import connect, queue, stream
from pipeline.broker.channel import TokenEntry, TokenHub, TokenReader
from pipeline.broker.clock import BrokerClock
from pipeline.broker.dispatch import Dispatch
from pipeline.broker.janitor import Janitor
from pipeline.broker.ledger import Ledger
from pipeline.broker.operator import Operator
from pipeline.broker.registry import Registry, Replica
from pipeline.errors import CrossfillError
from pipeline.request import Request
from pipeline.routing import Route, Wish
from pipeline.settings import Settings

_OWNER_TTL_S = 10.0  # handoffs of an API process silent for this long are nobody's
_BEAT_S = 1.0
_log = logging.getLogger(__name__)


class BrokerBackend:
    """`close` ends its tasks; live handoffs are by then cancelled by the relays that own them."""

    def __init__(self, settings: Settings, models: Iterable[Model] = ()) -> None:
        """`models` are all that are served here: a replica of one of them is never a faulty replica of another."""
        self._settings = settings
        self._digests = {model.contract.digest for model in models}
        self._client = connect.connect(settings.broker.url)
        self._async_client = connect.connect_async(settings.broker.url)
        self._hub = TokenHub(self._async_client)
        clock = BrokerClock(self._client)
        self._ledger = Ledger(self._client, self._client, clock, settings)
        self._registry = Registry(self._client)
        self._dispatch = Dispatch(self._client, self._ledger, self._registry, settings)
        self._janitor = Janitor(self._client, self._client, self._ledger, self._registry, clock, settings)
        self._clock = clock
        self.operator = Operator(self._client, settings, clock)
        self._owner = f"api-{uuid.uuid4().hex}"
        self._pending: Counter[str] = Counter()  # decode replica -> handoffs of ours that have not ended
        self._engines = {worker.engine for worker in settings.workers}  # configured, or once seen
        self._tasks: list[asyncio.Task[None]] = []

    def require_broker(self, models: Iterable[Model]) -> None:
        """Refuse a broker that would lose or evict what we store. Raises BrokerError, ConfigError."""
        page_bytes = max(model.contract.page_shape.page_bytes for model in models)
        connect.require_ready(self._client, self._settings.broker.budget_bytes, page_bytes)

    async def start(self) -> None:
        await to_thread.run_sync(self._beat)
        await self._hub.start()
        self._tasks = [asyncio.create_task(_every(_BEAT_S, step)) for step in (self._beat, self._janitor.sweep)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hub.close()
        await self._async_client.aclose()
        self._client.close()

    async def submit(self, request: Request, wish: Wish, model: Model) -> BrokerSubmission:
        reader = TokenReader(self._hub, request.handoff_id)
        await reader.__aenter__()
        create = asyncio.create_task(to_thread.run_sync(self._create, request, wish, model))
        try:
            route = await asyncio.shield(create)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._undo(request.handoff_id, reader, create)
            raise
        self._pending[route.decode_replica] += 1
        return BrokerSubmission(self._ledger, reader, request.handoff_id, lambda: self._ended(route))

    async def require_ready(self, model: Model) -> None:
        replicas = await to_thread.run_sync(self._registry.list)
        candidates = [replica for replica in replicas if not self._serves_another(replica, model)]
        routing.choose(candidates, model.contract, 1, Wish())

    async def status(self) -> dict[str, Any]:
        return await to_thread.run_sync(self._status)

    async def handoffs(self, recent: int) -> list[dict[str, Any]]:
        return await to_thread.run_sync(self.operator.handoffs, recent)

    async def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        return await to_thread.run_sync(self.operator.handoff, handoff_id)

    def _beat(self) -> None:
        self._ledger.own(self._owner, _OWNER_TTL_S)
        self._clock.refresh()  # two hosts' quartz clocks part by seconds a day

    def _ended(self, route: Route) -> None:
        self._pending[route.decode_replica] -= 1

    async def _undo(self, handoff_id: str, reader: TokenReader, create: asyncio.Task[Route]) -> None:
        """The record may have been written although nobody waits for it any more."""
        await asyncio.wait({create})
        await reader.__aexit__(None, None, None)
        if not create.cancelled() and create.exception() is None:
            with contextlib.suppress(CrossfillError):
                await to_thread.run_sync(self._ledger.cancel, handoff_id, "client-gone")
                await to_thread.run_sync(self._ledger.forget, handoff_id)

    def _create(self, request: Request, wish: Wish, model: Model) -> Route:
        replicas = self._registry.list()
        route = self._route(replicas, request, wish, model)
        request = _fitted(request, next(r for r in replicas if r.name == route.decode_replica))
        self._dispatch.begin(request, model.contract, route, self._owner, model.name)
        return route

    def _route(self, replicas: list[Replica], request: Request, wish: Wish, model: Model) -> Route:
        self._engines |= {replica.engine for replica in replicas}
        return routing.choose(
            [replica for replica in replicas if not self._serves_another(replica, model)],
            model.contract,
            len(request.token_ids),
            wish,
            known=self._engines,
            pending=self._pending,
            needs=request.sampling.needs,
        )

    def _serves_another(self, replica: Replica, model: Model) -> bool:
        return replica.contract.digest in self._digests - {model.contract.digest}

    def _status(self) -> dict[str, Any]:
        replicas = self._registry.list()
        queues = {name for replica in replicas for name in routing.queues(replica)}
        budget = stream.gauges(self._client)._asdict()
        return {
            "replicas": [_shown(replica) for replica in replicas],
            "budget": {"budget_bytes": self._settings.broker.budget_bytes, **budget},
            "live": self._ledger.live(),
            "queues": queue.queue_lengths(self._client, sorted(queues)),
        }


class BrokerSubmission:
    """One handoff of ours: its tokens, and what the edge may do to it."""

    def __init__(self, ledger: Ledger, reader: TokenReader, handoff_id: str, on_close: Callable[[], None]) -> None:
        self._ledger = ledger
        self._reader = reader
        self._id = handoff_id
        self._on_close = on_close

    def __aiter__(self) -> AsyncIterator[TokenEntry]:
        return aiter(self._reader)

    async def cancel(self, reason: str) -> None:
        await to_thread.run_sync(self._ledger.cancel, self._id, reason)

    async def stop(self, tokens: int) -> bool:
        return await to_thread.run_sync(self._ledger.stop, self._id, tokens)

    async def trace(self) -> dict[str, Any] | None:
        return await to_thread.run_sync(self._ledger.trace, self._id)

    async def close(self) -> None:
        self._on_close()
        await self._reader.__aexit__(None, None, None)
        await to_thread.run_sync(self._ledger.forget, self._id)


def _fitted(request: Request, decoder: Replica) -> Request:
    """A replica may serve a shorter context than the checkpoint allows, and may need the first token from P."""
    room = decoder.contract.context_length - len(request.token_ids)
    sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
    return replace(request, sampling=sampling, first_token=decoder.needs_first_token)


def _shown(replica: Replica) -> dict[str, Any]:
    contract = {"digest": replica.contract.digest, "context_length": replica.contract.context_length}
    return {**asdict(replica), "contract": contract, "features": sorted(replica.features)}


async def _every(seconds: float, step: Callable[[], object]) -> None:
    """A step that fails is tried again: the broker may be back by then."""
    while True:
        try:
            await to_thread.run_sync(step)
        except CrossfillError as error:
            _log.warning("%s", error)
        except Exception:
            _log.exception("a periodic step broke")
        await asyncio.sleep(seconds)
