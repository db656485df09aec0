"""Gauges: what one scrape of the API reads from the broker. Every API process tells the same of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from pipeline import routing
from pipeline.broker.operator import Operator, PagesView
from pipeline.broker.registry import Replica
from pipeline.errors import BrokerError
from pipeline.metrics import Reading

_log = logging.getLogger(__name__)


def source(operator: Operator, budget_bytes: int) -> Callable[[], list[Reading]]:
    """For `Metrics.add_source`. Of a broker that is away only that is told, and not what was before."""

    def read() -> list[Reading]:
        try:
            found = [*_readings(operator)]
        except BrokerError as error:
            _log.warning("metrics: %s", error)
            found = [Reading("crossfill_broker_up", 0)]
        return [*found, Reading("crossfill_budget_bytes", budget_bytes)]

    return read


def _readings(operator: Operator) -> Iterator[Reading]:
    replicas, budget = operator.replicas(), operator.budget()
    yield Reading("crossfill_broker_up", 1)
    yield Reading("crossfill_in_flight_bytes", budget.in_flight_bytes)
    yield Reading("crossfill_budget_waiters", budget.waiters)
    yield Reading("crossfill_live_handoffs", operator.live())
    for view in operator.pages(replicas):
        yield from _page_server(view)
    names = {name for replica in replicas for name in routing.queues(replica)}
    for name, tally in operator.queues(names).items():
        if name in names or tally.queued:  # of replicas long gone only what is left behind
            yield Reading("crossfill_queued_jobs", tally.queued, (name,))
    for labels, count in Counter(map(_labels, replicas)).items():
        yield Reading("crossfill_replicas", count, labels)


def _page_server(view: PagesView) -> Iterator[Reading]:
    labels = (view.address.url,)
    yield Reading("crossfill_page_server_up", int(view.gauges is not None), labels)
    yield Reading("crossfill_page_server_budget_bytes", view.address.budget_bytes, labels)
    if view.gauges is not None:
        yield Reading("crossfill_page_server_in_flight_bytes", view.gauges.in_flight_bytes, labels)
        yield Reading("crossfill_page_server_waiters", view.gauges.waiters, labels)


def _labels(replica: Replica) -> tuple[str, ...]:
    return replica.engine, replica.role, "draining" if replica.load.get("draining") else "serving"
