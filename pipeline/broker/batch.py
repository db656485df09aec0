"""Batch: calls of one script from many threads, several to a round trip.

An engine's step ends with a token for every request at once, each on a thread of its own. Whoever finds nobody sending
sends at once, its own call alone; those that come meanwhile go together, sent by the first of them. So nobody waits for
company, and no thread sends for others after its own call is answered.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

from pipeline.broker.scripts import source


class Batch:
    """For any number of threads. The script must be one that may be sent again: a broken connection ends a batch and
    does not tell which of its calls were run; each of their threads gets the error."""

    def __init__(self, client: Redis, name: str) -> None:
        self._client = client
        self._script = client.register_script(source(name))
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []
        self._sending = False

    def run(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The script's reply. Raises what redis-py raises."""
        call = _Call(keys, args)
        with self._lock:
            self._waiting.append(call)
            call.leads, self._sending = not self._sending, True
        if not call.leads:
            call.turn.wait()
        if call.leads:
            self._send()
        if isinstance(call.reply, BaseException):
            raise call.reply
        return call.reply

    def _send(self) -> None:
        """All that wait by now, the caller's own among them; the next that waits sends the next."""
        with self._lock:
            calls, self._waiting = self._waiting, []
        try:
            replies = self._replies(calls)
        except BaseException as error:
            replies = [error] * len(calls)
        with self._lock:
            self._sending = bool(self._waiting)
            if self._sending:
                self._waiting[0].leads = True
                self._waiting[0].turn.set()
        for call, reply in zip(calls, replies, strict=True):
            call.reply = reply
            call.turn.set()

    def _replies(self, calls: Sequence[_Call]) -> list[Any]:
        """Refusals are values. A server that has lost the script gets it once more."""
        replies = self._executed(calls)
        lost = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if lost:
            self._client.script_load(self._script.script)
            for at, reply in zip(lost, self._executed([calls[at] for at in lost]), strict=True):
                replies[at] = reply
        return replies

    def _executed(self, calls: Sequence[_Call]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(self._script.sha, len(call.keys), *call.keys, *call.args)
            return list(pipe.execute(raise_on_error=False))


class _Call:
    """`turn` is set when there is a reply, or when this call's thread is to send."""

    __slots__ = ("args", "keys", "leads", "reply", "turn")

    def __init__(self, keys: Sequence[str], args: Sequence[Any]) -> None:
        self.keys = keys
        self.args = args
        self.leads = False
        self.turn = threading.Event()
        self.reply: Any = None
