"""PageServers: the servers on which pages cross, as one process sees them. Usually that is the control broker.

A decode replica may have one of its own; its address is in the registry and in the record of every handoff to it. The
rule here: one that is down costs its own handoffs time and nobody else, and its end is no obstacle to theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from redis import Redis

from pipeline.broker import credit, keys
from pipeline.broker.address import Address, require_public
from pipeline.broker.connect import PageServer, connect_pages, translate
from pipeline.errors import ConfigError, PageServerError, PeerError
from pipeline.header import is_handoff_id
from pipeline.settings import BrokerSettings

_log = logging.getLogger(__name__)
_SHUN_S = 5.0  # after a release that failed: waiting for a black hole once per handoff would stop the janitor
_OWED = 1024  # releases remembered; what is forgotten ends by its lease, where its D lives, and by its time to live


class PageServers:
    """Clients by address, made when first asked for; `None` is the control broker. Thread safe."""

    def __init__(
        self, control: Redis, settings: BrokerSettings, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._control = control
        self._settings = settings
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._clients: dict[str, PageServer] = {}
        self._failed_s: dict[str, float] = {}
        self._owed: deque[tuple[Address, str]] = deque(maxlen=_OWED)

    def at(self, address: Address | None) -> Redis:
        """Raises PeerError for an address that nobody should have advertised."""
        if address is None:
            return self._control
        with self._lock:
            if (client := self._clients.get(address.url)) is None:
                try:
                    client = connect_pages(require_public(address.url), self._settings)
                except ConfigError as error:
                    raise PeerError(str(error)) from error
                self._clients[address.url] = client
            return client

    def settings(self, address: Address | None) -> BrokerSettings:
        """Ours, with the budget that holds at `address`."""
        if address is None:
            return self._settings
        return self._settings.model_copy(update={"budget_bytes": address.budget_bytes})

    def release(self, address: Address | None, handoff_id: str) -> None:
        """`credit.release`. One that a page server of a decode replica misses is owed to it: see `settle`.

        Raises BrokerError of the control broker only.
        """
        if address is None:
            credit.release(self._control, handoff_id)
        elif self._shunned(address) or not self._release(address, handoff_id):
            self._owed.append((address, handoff_id))

    def settle(self) -> None:
        """Make up for releases that could not be made. Call it about once a second."""
        for _ in range(len(self._owed)):
            address, handoff_id = self._owed.popleft()
            if self._shunned(address) or not self._release(address, handoff_id):
                self._owed.append((address, handoff_id))

    def abandoned(self, address: Address, idle_s: float) -> list[str]:
        """Ids of handoffs that nobody has kept there for `idle_s`: their time to live falls. Keys that only look like
        theirs are a stranger's. Raises BrokerError."""
        client, kept_ms = self.at(address), 1000 * (self._settings.handoff_ttl_s - idle_s)
        with translate(client):
            fences = list(client.scan_iter(keys.FENCES_PATTERN, count=1000))
            with client.pipeline(transaction=False) as pipe:
                for fence in fences:
                    pipe.pttl(fence)
                lefts = pipe.execute()
        idle = (fence for fence, left in zip(fences, lefts, strict=True) if 0 <= left < kept_ms)
        return [found for fence in idle if is_handoff_id(found := keys.handoff_of(fence.decode(errors="replace")))]

    def _shunned(self, address: Address) -> bool:
        return self._monotonic() - self._failed_s.get(address.url, float("-inf")) < _SHUN_S

    def _release(self, address: Address, handoff_id: str) -> bool:
        try:
            credit.release(self.at(address), handoff_id)
        except PageServerError as error:
            self._failed_s[address.url] = self._monotonic()
            _log.warning("handoff %s is not released there: %s", handoff_id, error)
            return False
        except PeerError as error:
            _log.warning("handoff %s: %s", handoff_id, error)
        return True

    def close(self) -> None:
        """Let go of all but the control broker's client, which is its owner's."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
