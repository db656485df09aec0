"""Exchange: what the adapter, the engine thread and the connector of one engine share, all in one process.

vLLM constructs the connector itself from a module path and a JSON config, so an object cannot be handed in: the config
carries an id, and `find` looks the exchange up in the one module-level registry of this package. There is no other
global state.

Threads: jobs call the public methods of tickets; the engine thread calls everything else, also through the connector.
Locks: a ticket's condition may be held while taking the exchange's, never the other way round.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from pipeline.engines.text import Text
from pipeline.engines.ticket import Ticket
from pipeline.engines.vllm.copier import Copier
from pipeline.errors import ConfigError, CrossfillError, EngineError
from pipeline.request import Request


class VllmTicket(Ticket):
    """One request inside vLLM. `key` names it for vLLM, unique per call: attempts of a handoff never mix.

    `gone` is the end: vLLM holds neither the request nor a block of it any more.
    """

    def __init__(self, key: str, request: Request, exchange: Exchange, texts: Sequence[Text] = ()) -> None:
        """`texts` are the samples that are drawn under this key; they belong to the engine's thread."""
        super().__init__(request)
        self.key = key
        self.texts = tuple(texts)
        self._exchange = exchange
        self._gone = False

    @property
    def gone(self) -> bool:
        return self._gone

    @property
    def released(self) -> bool:
        """No copy runs and none will ever begin."""
        return self._closed and not self._copying

    def close(self) -> None:
        """Wake every waiting call, drain running copies, then have the engine thread abort and free. Idempotent.

        Returns once vLLM has freed the blocks (about one engine step), or at once when the engine is dead.
        """
        self._drain()
        if self._gone:
            return
        try:
            self._exchange.post(Abort(self))
        except CrossfillError:  # the engine has ended, and with it every block
            self.vanish()
        with self.changed:
            self.changed.wait_for(lambda: self._gone)

    def vanish(self) -> None:
        """Engine thread: vLLM has let go of the request."""
        with self.changed:
            self._gone = True
            self.changed.notify_all()

    def _begin_copy(self) -> Copier:
        """Caller holds `changed`."""
        self._copying += 1
        return self._exchange.copier


class Submit(NamedTuple):
    ticket: VllmTicket


class Abort(NamedTuple):
    ticket: VllmTicket


class Reset(NamedTuple):
    """Forget vLLM's prefix cache; `done` is set afterwards."""

    done: threading.Event


class Stop(NamedTuple):
    """End the engine thread."""


Command: TypeAlias = Submit | Abort | Reset | Stop


class Exchange:
    """The meeting point of one engine. `copier` is set once vLLM has allocated its KV tensors."""

    def __init__(self) -> None:
        self.id = f"crossfill-{next(_IDS)}"
        self.by_key: dict[str, VllmTicket] = {}  # engine thread only; tickets that vLLM knows
        self.by_engine_id: dict[str, VllmTicket] = {}  # the same under vLLM's own, suffixed request ids
        self.prompt_tokens_computed = 0
        self.progress = False  # the last step ran the model or moved a request on: step again without waiting
        self.held: dict[str, VllmTicket] = {}  # by vLLM's id: finished, but blocks are kept until `released`
        self._copier: Copier | None = None
        self._changed = threading.Condition()
        self._woken = False
        self._inbox: deque[Command] = deque()
        self._ended: CrossfillError | None = None
        self._received: set[str] = set()

    @property
    def copier(self) -> Copier:
        if self._copier is None:
            raise EngineError("vLLM has not allocated its KV blocks yet")
        return self._copier

    @copier.setter
    def copier(self, copier: Copier) -> None:
        self._copier = copier

    def post(self, command: Command) -> None:
        """Hand a command to the engine thread. Raises what ended the engine once it has ended."""
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._inbox.append(command)
        self.wake()

    def peek(self) -> Command | None:
        """The oldest command. It stays until `drop`: should the engine die of it, `end` still returns it."""
        with self._changed:
            return self._inbox[0] if self._inbox else None

    def drop(self) -> None:
        with self._changed:
            self._inbox.popleft()

    def end(self, error: CrossfillError) -> list[Command]:
        """From now on `post` raises `error`; the commands that nobody will carry out any more."""
        with self._changed:
            self._ended = self._ended or error
            left = list(self._inbox)
            self._inbox.clear()
        return left

    @property
    def ended(self) -> CrossfillError | None:
        return self._ended

    def wake(self) -> None:
        """End the engine thread's idle wait: a command came, a page was read or received."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> None:
        """Engine thread: sleep until `wake`, at most `timeout_s`. A wake since the last wait returns at once."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken, timeout_s)
            self._woken = False

    def take_sent(self) -> set[str]:
        """Engine thread: held requests whose blocks vLLM may free now. Names each once, and only held ones."""
        sent = {engine_id for engine_id, ticket in self.held.items() if ticket.released}
        for engine_id in sent:
            del self.held[engine_id]
        return sent

    def receive(self, engine_id: str) -> None:
        """All pages of a loading request are in its blocks, or never will be: vLLM may go on with it."""
        with self._changed:
            self._received.add(engine_id)
        self.wake()

    def take_received(self) -> set[str]:
        with self._changed:
            received, self._received = self._received, set()
        return received


_IDS = itertools.count(1)
_EXCHANGES: dict[str, Exchange] = {}


def register(exchange: Exchange) -> None:
    """Make `exchange` findable. vLLM keeps the connector and the forward context in process globals, so a second
    engine in one process would get the first one's pages: ConfigError.
    """
    if _EXCHANGES:
        raise ConfigError("vLLM allows one engine per process: close the other one first, or start another worker")
    _EXCHANGES[exchange.id] = exchange


def find(exchange_id: str) -> Exchange:
    return _EXCHANGES[exchange_id]


def unregister(exchange: Exchange) -> None:
    _EXCHANGES.pop(exchange.id, None)
