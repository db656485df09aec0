"""Hub: the token channels of one API process, so that a late or slow reader loses nothing.

A reader subscribes before the jobs are enqueued, on the line that enqueues them. It tells its listener what is
published in order, drops what it has, and reads the log wherever it sees a gap or silence. The rule here: what is
published goes from the socket to the listener in one call on the event loop; a token costs no task, lock or timer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError as AwayError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as SlowError

from pipeline.broker import keys, scripts
from pipeline.broker.channel import TokenEntry, decode
from pipeline.broker.connect import HEALTH_CHECK_S, REPLY_TIMEOUT_S, translate
from pipeline.broker.line import Line
from pipeline.broker.payload import Word
from pipeline.broker.resp import Reply
from pipeline.broker.scripts import Step
from pipeline.errors import BrokerError, PeerError

_HEAL_S = 0.5  # a reader that heard nothing between two ticks of this looks into the log by itself
_MOST_PATIENT = 4  # ticks: nothing is lost as a rule, and two commands of every waiting stream add up
_IDLE = f"{keys.PREFIX}:hub".encode()  # a channel that is subscribed to when no other is
_RECONNECT_S = 0.2
_AWAY_S = 2.0  # how long a command waits for a line
_PATIENCE_S = 2.0  # how long a reader waits for a broker that is away
_DIGITS = 9  # of an entry's number
_AHEAD = 1024  # entries kept that were published behind a gap
_GONE = 2  # looks in a row that find neither tokens nor the record
_log = logging.getLogger(__name__)

Heard = TokenEntry | Exception
Listener = Callable[[Heard], None]


class TokenHub:
    """One connection of an API process, shared by all its readers and by what begins and ends their handoffs.

    A command sent after `open` is answered after its channel is heard: both go the same way, in order.
    """

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._line: Line | None = None  # the living one; only the pump makes and ends one
        self._there = asyncio.Event()  # while there is one
        self._readers: dict[bytes, TokenReader] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(step) for step in (self._pump(), self._tick())]

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(self, handoff_id: str, reader: TokenReader) -> None:
        """Subscribe. Without a line nothing is sent: the next one begins with every reader."""
        channel = keys.HandoffKeys(handoff_id).notify.encode()
        self._readers[channel] = reader
        if line := self._living():
            line.subscribe(channel)

    def drop(self, handoff_id: str) -> None:
        channel = keys.HandoffKeys(handoff_id).notify.encode()
        if self._readers.pop(channel, None) and (line := self._living()):
            line.unsubscribe(channel)

    async def ask(self, *words: Word, patience_s: float = REPLY_TIMEOUT_S) -> Reply:
        """The reply to one command, which is sent once, as soon as there is a line. Raises BrokerError."""
        with translate():
            return await self._ask(words, patience_s)

    async def run(self, step: Step, patience_s: float = REPLY_TIMEOUT_S) -> Reply:
        """A script's reply. Raises BrokerError: it may have run all the same where that is no refusal."""
        keyed = (len(step.keys), *step.keys, *step.args)
        with translate():
            try:
                return await self._ask(("EVALSHA", scripts.digest(step.script), *keyed), patience_s)
            except NoScriptError:  # it did not run: the server has lost it
                return await self._ask(("EVAL", scripts.source(step.script), *keyed), patience_s)

    async def log(self, handoff_id: str, start: int) -> list[bytes]:
        """Entries of the log from index `start` on. Raises BrokerError."""
        try:
            entries = await self.ask("LRANGE", keys.HandoffKeys(handoff_id).tokens, start, -1)
        except BrokerError as error:
            raise BrokerError(f"cannot read the token log: {error}") from error
        assert isinstance(entries, list)
        return [entry for entry in entries if isinstance(entry, bytes)]

    async def known(self, handoff_id: str) -> bool:
        """Whether the ledger still has the handoff. Raises BrokerError."""
        try:
            return bool(await self.ask("EXISTS", keys.HandoffKeys(handoff_id).record))
        except BrokerError as error:
            raise BrokerError(f"cannot read the ledger: {error}") from error

    async def _ask(self, words: Sequence[Word], patience_s: float) -> Reply:
        """Raises what redis-py would. A reply that comes too late is dropped; the line goes on."""
        line = self._living() or await self._found()
        try:
            async with asyncio.timeout(patience_s):
                return await line.ask(words)
        except TimeoutError:
            raise SlowError(f"no reply within {patience_s:g} s") from None

    async def _found(self) -> Line:
        try:
            async with asyncio.timeout(_AWAY_S):
                while (line := self._living()) is None:
                    await self._there.wait()
        except TimeoutError:
            raise AwayError("no connection to it could be made") from None
        return line

    def _living(self) -> Line | None:
        """The line, unless it was lost a moment ago and the pump has not heard of it."""
        if self._line and self._line.lost.done():
            self._line = None
            self._there.clear()
        return self._line

    async def _pump(self) -> None:
        """Keep a line with a subscription to every reader, whatever the network, the server or redis-py does."""
        while not self._closing:
            try:
                await self._listen()
            except Exception as error:
                _log.warning("token channels: %s: %s; subscribing again", type(error).__name__, error)
                await asyncio.sleep(_RECONNECT_S)  # readers heal from the log meanwhile

    async def _listen(self) -> None:
        """Until the line is lost. Raises why."""
        line = await Line.open(self._client, self._hear)
        try:
            line.subscribe(_IDLE, *self._readers)
            self._line = line
            self._there.set()
            await asyncio.wait({line.lost})  # bare, it would be cancelled with us
            raise line.lost.result()
        finally:
            self._line = None
            self._there.clear()
            line.end(BrokerError("this process does not need it any more"))

    def _hear(self, kind: bytes, channel: bytes, data: bytes) -> None:
        reader = self._readers.get(channel)
        if reader is None:
            return
        if kind == b"message":
            index, _, entry = data.partition(b" ")
            if len(index) <= _DIGITS and index.isdigit():  # nobody else's message may end the reading of all
                reader.put(int(index), entry)
        elif kind == b"subscribe":  # anew, where somebody listens: what was published meanwhile is in the log
            reader.look()

    async def _tick(self) -> None:
        """Tell the readers of the time that passes, and keep an idle line in use: one timer for all of them."""
        loop = asyncio.get_running_loop()
        ping_s = loop.time() + HEALTH_CHECK_S
        while True:
            await asyncio.sleep(_HEAL_S)
            for reader in tuple(self._readers.values()):
                reader.tick()
            if line := self._living():
                if line.waiting_s() >= REPLY_TIMEOUT_S:
                    line.end(SlowError(f"no reply within {REPLY_TIMEOUT_S:g} s"))
                elif loop.time() >= ping_s:
                    ping_s = loop.time() + HEALTH_CHECK_S
                    line.subscribe(_IDLE)  # an answer is owed to it like to a PING


class TokenReader:
    """Every entry of one handoff, in order, exactly once, up to and with the last; or the error that ended it.

    What comes before somebody listens is kept: an answer has a bounded number of tokens. Until then nothing is looked
    for: the handoff may not have been submitted yet, however long that takes.
    """

    def __init__(self, hub: TokenHub, handoff_id: str) -> None:
        self._hub = hub
        self._id = handoff_id
        self._listener: Listener | None = None
        self._early: list[Heard] = []
        self._ahead: dict[int, bytes] = {}  # published behind a gap
        self._next = 0
        self._over = False
        self._looking: asyncio.Task[None] | None = None
        self._again = False  # a look was asked for while one was under way
        self._silent = 0  # ticks since something was published or looked for
        self._patience = 1  # and how many of them are let pass
        self._missing = 0
        self._away_s = math.inf  # since when the broker has not answered
        self.finished = False  # the last entry has come, and it is no error

    def open(self) -> None:
        self._hub.open(self._id, self)

    def close(self) -> None:
        self._over = True
        if self._looking:
            self._looking.cancel()
        self._hub.drop(self._id)

    def listen(self, listener: Listener) -> None:
        """`listener` is told all that has come, at once, and all that comes. It must not raise."""
        self._listener = listener
        early, self._early = self._early, []
        for heard in early:
            listener(heard)
        if self._ahead:
            self.look()

    def put(self, index: int, raw: bytes) -> None:
        """`raw` was published as entry number `index` of the log."""
        self._silent, self._patience = 0, 1
        if index == self._next:
            self._take(raw)
        elif index > self._next:
            if len(self._ahead) < _AHEAD:  # the log has them all
                self._ahead[index] = raw
            self.look()

    def tick(self) -> None:
        """Silence makes it look: after a tick or two at first, later less often."""
        if self._listener is None:
            return
        self._silent += 1
        if self._silent > self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENT)
            self.look()

    def look(self) -> None:
        """Read the log; once more where that is being done, since it may have passed what is meant."""
        self._silent = 0
        if self._over or self._listener is None:
            return
        self._again = True
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._heal())

    def _take(self, raw: bytes) -> None:
        self._next += 1
        try:
            self._tell(decode(raw))
        except PeerError as error:
            self._tell(error)

    def _tell(self, heard: Heard) -> None:
        if self._over:
            return
        if isinstance(heard, Exception):
            self._over = True
        elif heard.last:
            self._over, self.finished = True, heard.error is None
        (self._listener or self._early.append)(heard)

    async def _heal(self) -> None:
        while self._again and not self._over:
            self._again = False
            await self._read_log()

    async def _read_log(self) -> None:
        """A gap, or silence for a while: read the log. A handoff gone from the ledger will say nothing more.

        A broker that is away is waited for a moment: a reset connection, or a failover, is not the end of an answer.
        """
        began_s, start = asyncio.get_running_loop().time(), self._next
        try:
            entries = await self._hub.log(self._id, start)
            self._missing = 0 if entries or await self._hub.known(self._id) else self._missing + 1
        except BrokerError as error:
            self._away_s = min(self._away_s, began_s)
            self._patience = 1
            if asyncio.get_running_loop().time() - self._away_s >= _PATIENCE_S:
                self._tell(error)
            return
        self._away_s = math.inf
        self._fill(enumerate(entries, start))
        if self._missing >= _GONE:
            self._tell(BrokerError("the broker has lost this request: it was restarted or emptied"))

    def _fill(self, found: Iterable[tuple[int, bytes]]) -> None:
        """What the log has, then what was published meanwhile; behind another gap it waits for the next look."""
        for index, raw in sorted({**self._ahead, **dict(found)}.items()):
            if index == self._next:
                self._take(raw)
        self._ahead = {index: raw for index, raw in self._ahead.items() if index > self._next}
