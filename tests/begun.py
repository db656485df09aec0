"""A handoff that has begun, by one connection of a ledger's own: what an API process does on its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.broker.connect import translate
from pipeline.broker.ledger import Ledger
from pipeline.broker.opening import Command
from pipeline.broker.scripts import Scripts
from pipeline.contract import Contract
from pipeline.request import Request


def begin(
    ledger: Ledger,
    request: Request,
    contract: Contract,
    route: Mapping[str, str | None],
    owner: str,
    jobs: Sequence[Command] = (),
) -> None:
    """Its record is written and `jobs` are queued. Raises BrokerError."""
    with translate():
        assert Scripts(ledger._client).run(*ledger.opening(request, contract, route, owner, jobs)) == 1
