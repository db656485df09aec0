"""One script for many threads: every call gets its own reply, and what waits goes in one round trip."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakeredis
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from pipeline.broker import batch
from pipeline.broker.batch import Batch

ECHO = "if ARGV[1] == 'bad' then return redis.error_reply('BAD ' .. KEYS[1]) end return {KEYS[1], ARGV[1]}"


class Held(Batch):
    """Notes what goes together; the first round trip waits until it is let go."""

    def __init__(self, client: fakeredis.FakeRedis) -> None:
        super().__init__(client, "echo")
        self.rounds: list[int] = []
        self.sending, self.let_go = threading.Event(), threading.Event()

    def _executed(self, calls: Sequence[Any]) -> list[Any]:
        self.rounds.append(len(calls))
        self.sending.set()
        self.let_go.wait()
        return super()._executed(calls)

    def crowd(self, size: int, work: Callable[[int], Any]) -> list[Any]:
        """One call is under way, `size` more wait behind it; then all go on."""
        with ThreadPoolExecutor(size + 1) as pool:
            answers = [pool.submit(work, 0)]
            self.sending.wait()
            answers += [pool.submit(work, at) for at in range(1, size + 1)]
            while len(self._waiting) < size:
                threading.Event().wait(0.001)
            self.let_go.set()
            return [answer.exception() or answer.result() for answer in answers]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> fakeredis.FakeRedis:
    monkeypatch.setattr(batch, "source", lambda name: ECHO)
    return fakeredis.FakeRedis()


def test_what_waits_goes_together_and_each_gets_its_own(client: fakeredis.FakeRedis) -> None:
    held = Held(client)
    found = held.crowd(15, lambda at: held.run([f"key-{at}"], [at]))
    assert found == [[f"key-{at}".encode(), str(at).encode()] for at in range(16)]
    assert held.rounds == [1, 1, 15]  # the server did not know the script at first


def test_a_call_alone_waits_for_nobody(client: fakeredis.FakeRedis) -> None:
    echo = Batch(client, "echo")
    assert [echo.run(["a"], [at]) for at in range(3)] == [[b"a", str(at).encode()] for at in range(3)]


def test_a_refused_call_fails_alone(client: fakeredis.FakeRedis) -> None:
    held = Held(client)
    found = held.crowd(3, lambda at: held.run([f"key-{at}"], ["bad" if at == 2 else "good"]))
    assert isinstance(found[2], ResponseError)
    assert [reply[0] for at, reply in enumerate(found) if at != 2] == [b"key-0", b"key-1", b"key-3"]


def test_a_server_that_lost_the_script_gets_it_again(client: fakeredis.FakeRedis) -> None:
    echo = Batch(client, "echo")
    echo.run(["a"], [1])
    client.script_flush()
    assert echo.run(["a"], [2]) == [b"a", b"2"]


def test_only_the_calls_that_met_no_script_are_sent_again(client: fakeredis.FakeRedis) -> None:
    """The others were run: a second time some of them would be refused."""
    sent: list[list[int]] = []

    class Flushed(Held):
        def _executed(self, calls: Sequence[Any]) -> list[Any]:
            replies = super()._executed(calls)
            sent.append(sorted(call.args[0] for call in calls))
            return [
                NoScriptError("flushed") if len(calls) > 2 and call.args[0] == 2 else reply
                for call, reply in zip(calls, replies, strict=True)
            ]

    held = Flushed(client)
    held.let_go.set()
    held.run(["first"], [9])  # the server knows the script from here on
    held.let_go.clear()
    found = held.crowd(4, lambda at: held.run([f"key-{at}"], [at]))
    assert found == [[f"key-{at}".encode(), str(at).encode()] for at in range(5)]
    assert sent[-2:] == [[1, 2, 3, 4], [2]]


def test_a_broken_connection_is_told_to_every_call_and_the_next_goes_on(client: fakeredis.FakeRedis) -> None:
    class Broken(Held):
        def _executed(self, calls: Sequence[Any]) -> list[Any]:
            found = super()._executed(calls)
            if len(self.rounds) == 3:
                raise RedisConnectionError("reset")
            return found

    held = Broken(client)
    found = held.crowd(4, lambda at: held.run(["a"], [at]))
    assert found[0] == [b"a", b"0"]
    assert [type(error) for error in found[1:]] == [RedisConnectionError] * 4
    assert held.run(["a"], [9]) == [b"a", b"9"]
