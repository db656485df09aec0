"""PageKeeper: a replica's care for page servers beside the control broker, on a thread of its own.

It looks after the replica's own one (does it answer? whose lease has ended? what is left of handoffs that nobody knows
any more?), keeps the leases of handoffs that hold credit on somebody's, and makes up for releases that one has missed.
Apart from the heartbeat: a server that does not answer must not look like this replica's death.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable

from pipeline.broker import stream
from pipeline.broker.address import Address
from pipeline.broker.connect import require_ready, server_info
from pipeline.broker.page_server import PageServers
from pipeline.broker.record import Snapshot
from pipeline.errors import BrokerError, ConfigError, CrossfillError
from pipeline.settings import BrokerSettings, Settings, WorkerSettings

_log = logging.getLogger(__name__)
_BEAT_S = 0.5
_SWEEP_BEATS = 10
IDLE_S = 15.0  # what lives is kept every beat


def own_address(settings: Settings, worker: WorkerSettings) -> Address | None:
    """What `worker` advertises. Raises ConfigError."""
    if worker.pages_url is None:
        return None
    if worker.role == "prefill":
        raise ConfigError("pages_url is for replicas that decode: pages cross the page server of their decode replica")
    return Address.public(worker.pages_url, worker.pages_budget_bytes or settings.broker.budget_bytes)


class PageKeeper:
    """`active` are the handoffs this process works on, `seen` what was last read of one; `peek` asks the ledger."""

    def __init__(
        self,
        servers: PageServers,
        own: Address | None,
        active: Callable[[], Iterable[str]],
        seen: Callable[[str], Snapshot | None],
        peek: Callable[[str], Snapshot | None],
        settings: BrokerSettings,
    ) -> None:
        self._servers = servers
        self._own = own
        self._active = active
        self._seen = seen
        self._peek = peek
        self._settings = settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page-keeper", daemon=True)
        self.up = True  # our own one answers, or we have none

    def start(self, page_bytes: int) -> None:
        """Raises ConfigError, BrokerError where our own server cannot serve pages of `page_bytes`."""
        if self._own is not None:
            require_ready(self._servers.at(self._own), self._own.budget_bytes, page_bytes)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        for beat in itertools.count():
            if self._stop.wait(_BEAT_S):
                return
            try:
                self.look()
                self.renew()
                self._servers.settle()
                if beat % _SWEEP_BEATS == 0:
                    self.sweep()
            except CrossfillError as error:
                _log.warning("page keeper: %s", error)
            except Exception:  # this thread must outlive whatever happens to a server
                _log.exception("page keeper")

    def look(self) -> None:
        """Does our own server answer? What nobody keeps there any more is taken back."""
        if self._own is None:
            return
        server = self._servers.at(self._own)
        try:
            server_info(server)
            reaped = stream.reap(server)
        except BrokerError as error:
            if self.up:
                _log.error("this replica takes nothing new until its page server is back: %s", error)
            self.up = False
            return
        if not self.up:
            _log.info("page server %s is back", self._own.url)
        self.up = True
        for handoff_id in reaped:
            _log.warning("handoff %s: its credit lease on %s has ended", handoff_id, self._own.url)

    def sweep(self) -> None:
        """Whoever owed our own server the release of a handoff may have died: what is left of it there goes.

        Only of one without a record here: one that merely stands still has one. So a page server is one fleet's alone.
        """
        if self._own is None or not self.up:
            return
        for handoff_id in self._servers.abandoned(self._own, IDLE_S):
            if self._peek(handoff_id) is None:
                _log.info("handoff %s: it is over, and what is left of it on %s goes", handoff_id, self._own.url)
                self._servers.release(self._own, handoff_id)

    def renew(self) -> None:
        """The leases of handoffs whose pages cross such a server. One that fails is left alone for this round."""
        where: dict[Address, list[str]] = {}
        for handoff_id in self._active():
            seen = self._seen(handoff_id)
            if seen is not None and seen.page_server is not None:
                where.setdefault(seen.page_server, []).append(handoff_id)
        for address, ids in where.items():
            try:
                stream.heartbeat(self._servers.at(address), ids, self._settings)
            except CrossfillError as error:
                _log.warning("no lease is kept there: %s", error)
