"""A worker dies, hangs or comes back in the middle of a request: the client gets the text it would have had.

Four `reference` replicas in processes of their own, two in each role, so that there is always somebody to go on.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.broker.keys import LIVE, HandoffKeys
from tests.ports import free_port
from tests.scenarios.system import System, eventually, system, worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PROMPT = [(11 * i) % 900 + 20 for i in range(1500)]
PAGES = 24
ROUTE = "reference->reference"
TOKENS = 200


@pytest.fixture(scope="module")
def four(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    engine = {"chunk_tokens": 64}
    workers = [
        worker(f"{role[0]}-{index}", "reference", tiny_model, role, lease_s=2.0, grace_s=0.0, engine_settings=engine)
        for role in ("prefill", "decode")
        for index in range(2)
    ]
    settings = {
        "api": {"model": tiny_model, "port": free_port()},
        "broker": {"budget_bytes": 1 << 18},  # two pages in flight: P is never far ahead of D
        "routing": {"policy": "handoff"},
        "handoff": {"progress_s": 30},
        "workers": workers,
    }
    with system(settings, tmp_path_factory.mktemp("four")) as running:
        yield running


class Asked:
    """One streamed request, read on a thread of its own."""

    def __init__(self, running: System, sampling: dict[str, Any] | None = None, **body: Any) -> None:
        self._system = running
        self._before = set(running.broker.zrange(LIVE, 0, -1))
        self.texts: dict[int, str] = {}  # of each sample
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self.trace: dict[str, Any] = {}
        self.error: dict[str, Any] = {}
        self.status = 0
        self.should_retry: str | None = None
        self._body = {
            "model": running.model,
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": secrets.token_hex(8),
            **(sampling or {}),
            **body,
        }
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.id = ""

    def _read(self) -> None:
        headers = {"X-Crossfill-Route": ROUTE, "X-Crossfill-Trace": "1"}
        with (
            httpx.Client(base_url=self._system.url, timeout=200) as client,
            client.stream("POST", "/v1/completions", json=self._body, headers=headers) as answer,
        ):
            self.status, self.should_retry = answer.status_code, answer.headers.get("x-should-retry")
            if answer.status_code != 200:
                self.error = json.loads(answer.read())["error"]
                return
            for line in answer.iter_lines():
                if self._gone.is_set():
                    return
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error") or self.error
        self.usage = chunk.get("usage") or self.usage
        self.trace = chunk.get("crossfill") or self.trace
        for choice in chunk.get("choices", ()):
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
            self.finish = choice["finish_reason"] or self.finish

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def leave(self) -> None:
        """The client goes away at its next line."""
        self._gone.set()

    def done(self) -> None:
        self._thread.join(200)
        assert not self._thread.is_alive(), "no answer"

    def field(self, name: str) -> str | None:
        """A field of its record, once it is there."""
        fresh = set(self._system.broker.zrange(LIVE, 0, -1)) - self._before
        if not self.id and fresh:
            self.id = fresh.pop().decode()  # type: ignore[union-attr]
        found = self._system.broker.hget(HandoffKeys(self.id).record, name) if self.id else None
        return found.decode() if isinstance(found, bytes) else None

    def until(self, name: str, *values: str) -> Asked:
        self._soon(lambda: self.field(name) in values)
        return self

    def worker(self, role: str) -> str:
        """Name of the replica that works on it now."""
        self._soon(lambda: self.field(f"{role}_worker") is not None)
        return (self.field(f"{role}_worker") or "").split("@")[0]

    def _soon(self, true: Callable[[], bool]) -> None:
        """Looks often: what is to be hurt while it is so may be over a moment later."""
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, "never seen"
            time.sleep(0.002)


def _signal(running: System, name: str, number: signal.Signals) -> None:
    os.kill(running.child(name).pid, number)


def _baseline(running: System) -> dict[str, int]:
    return {r["name"]: r["stats"]["free_pages"] for r in running.settled()["replicas"]}


def _as_before(running: System, free: dict[str, int]) -> None:
    """Every gauge is at rest and every pool whole."""
    assert {r["name"]: r["stats"]["free_pages"] for r in running.settled()["replicas"]} == free


def _whole(asked: Asked, text: str) -> None:
    """The undisturbed text, every token counted once."""
    asked.done()
    assert (asked.status, asked.error) == (200, {})
    assert asked.text == text
    assert asked.finish == "length"
    assert (asked.usage["prompt_tokens"], asked.usage["completion_tokens"]) == (len(PROMPT), TOKENS)


@pytest.fixture(scope="module")
def text(four: System) -> str:
    """What the prompt is answered with where nothing goes wrong."""
    return four.complete(PROMPT, ROUTE, max_tokens=TOKENS).text


def test_p_is_killed_between_two_pages(four: System, text: str) -> None:
    """What D has imported stays: the other P sends the rest."""
    free = _baseline(four)
    asked = Asked(four).until("state", "streaming")
    victim = asked.worker("prefill")
    four.child(victim).kill()
    _whole(asked, text)
    assert (asked.trace["resent"], asked.trace["taken_over"], asked.trace["recomputed"]) == (1, 0, None)
    assert asked.trace["attempts"] == {"prefill": 2, "decode": 1}
    assert asked.trace["imported_tokens"] == len(PROMPT) - 1
    assert asked.trace["pages"] < PAGES  # the second P did not begin at the first page
    four.revive(victim)
    _as_before(four, free)


def test_d_is_killed_before_the_first_token(four: System, text: str) -> None:
    free = _baseline(four)
    asked = Asked(four).until("state", "streaming")
    victim = asked.worker("decode")
    four.child(victim).kill()
    _whole(asked, text)
    assert (asked.trace["resent"], asked.trace["taken_over"], asked.trace["lost_workers"]) == (0, 1, 1)
    assert asked.trace["attempts"] == {"prefill": 2, "decode": 2}
    four.revive(victim)
    _as_before(four, free)


def test_d_is_killed_in_the_midst_of_the_text(four: System, text: str) -> None:
    """The stream goes on: nothing twice, nothing missing."""
    free = _baseline(four)
    asked = Asked(four).until("state", "decoding")
    victim = asked.worker("decode")
    four.child(victim).kill()
    _whole(asked, text)
    assert asked.trace["taken_over"] == 1
    four.revive(victim)
    _as_before(four, free)


def test_sampled_text_goes_on_from_what_was_said(four: System) -> None:
    """Every draw is of its position, so that with a seed the other D draws what this one would have: but for rounding,
    the same text. What the client had read stays as it was."""
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    right = four.complete(PROMPT, ROUTE, max_tokens=TOKENS, **sampling).text
    asked = Asked(four, sampling=sampling).until("state", "decoding")
    eventually(lambda: len(asked.text) > 20)
    victim = asked.worker("decode")
    four.child(victim).kill()
    asked.until("decode_attempt", "2")
    said = asked.text
    asked.done()
    assert asked.text.startswith(said)
    assert right.startswith(said)
    assert (asked.trace["taken_over"], asked.usage["completion_tokens"]) == (1, TOKENS)
    four.revive(victim)
    four.settled()


LISTED = {"type": "array", "items": {"enum": ["good", "bad"]}, "minItems": 24, "maxItems": 24}


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "temperature": 0},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "l", "schema": LISTED}},
            "ignore_eos": False,
        },
        {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 60},
    ],
    ids=["penalties", "grammar", "samples"],
)
def test_whatever_an_answer_depends_on_it_goes_on(four: System, asked: dict[str, Any]) -> None:
    """Penalties count what the first D said, a grammar stands where it stood, samples go on side by side: all of it as
    if nothing had happened (`reference` computes the same whoever computes it, but for rounding)."""
    right = four.post(PROMPT, ROUTE, **({"max_tokens": TOKENS} | asked)).json()
    asking = Asked(four, sampling=asked).until("state", "decoding")
    asking._soon(lambda: len(asking.text) > 20)
    victim = asking.worker("decode")
    four.child(victim).kill()
    asking.done()
    assert (asking.error, asking.trace["taken_over"]) == ({}, 1)
    texts = [choice["text"] for choice in right["choices"]]
    assert [asking.texts[index] for index in range(len(texts))] == texts
    assert asking.usage["completion_tokens"] == right["usage"]["completion_tokens"]
    if "response_format" in asked:
        assert len(json.loads(texts[0])) == 24
    four.revive(victim)
    four.settled()


def test_a_stop_string_is_found_across_the_seam(four: System, text: str) -> None:
    stop = text[-24:-12]
    assert text.index(stop) == len(text) - 24
    asked = Asked(four, stop=[stop]).until("state", "decoding")
    victim = asked.worker("decode")
    four.child(victim).kill()
    asked.done()
    assert (asked.text, asked.finish) == (text[:-24], "stop")
    four.revive(victim)
    four.settled()


def test_a_p_that_was_stopped_for_a_while_changes_nothing_when_it_wakes(four: System, text: str) -> None:
    free = _baseline(four)
    asked = Asked(four).until("state", "streaming")
    zombie = asked.worker("prefill")
    _signal(four, zombie, signal.SIGSTOP)
    _whole(asked, text)
    assert asked.trace["resent"] == 1
    _signal(four, zombie, signal.SIGCONT)
    eventually(lambda: zombie in {replica["name"] for replica in four.status()["replicas"]})
    _as_before(four, free)
    assert four.complete(PROMPT, ROUTE, max_tokens=TOKENS).text == text


def test_a_d_that_was_stopped_for_a_while_adds_no_token_when_it_wakes(four: System, text: str) -> None:
    free = _baseline(four)
    asked = Asked(four).until("state", "decoding")
    zombie = asked.worker("decode")
    _signal(four, zombie, signal.SIGSTOP)
    asked.until("decode_attempt", "2")
    _signal(four, zombie, signal.SIGCONT)
    _whole(asked, text)
    eventually(lambda: zombie in {replica["name"] for replica in four.status()["replicas"]})
    _as_before(four, free)


def test_p_hangs_and_the_client_goes_away(four: System) -> None:
    free = _baseline(four)
    asked = Asked(four).until("state", "streaming")
    zombie = asked.worker("prefill")
    _signal(four, zombie, signal.SIGSTOP)
    asked.leave()
    asked.done()
    _signal(four, zombie, signal.SIGCONT)
    _as_before(four, free)


def test_d_is_stopped_by_sigterm_and_another_goes_on(four: System, text: str) -> None:
    """What does not end within its grace (here none) moves; nothing is counted as a death."""
    free = _baseline(four)
    asked = Asked(four).until("state", "decoding")
    stopped = asked.worker("decode")
    _signal(four, stopped, signal.SIGTERM)
    _whole(asked, text)
    assert (asked.trace["taken_over"], asked.trace["lost_workers"]) == (1, 0)
    four.revive(stopped)
    _as_before(four, free)


def test_a_request_that_two_workers_died_of_is_not_given_to_a_third(four: System) -> None:
    """500, and no client's library tries it again."""
    asked = Asked(four, stream=False, stream_options=None).until("state", "streaming")
    first = asked.worker("prefill")
    four.child(first).kill()
    asked.until("prefill_attempt", "2")
    second = asked.worker("prefill")
    assert second != first
    four.child(second).kill()
    asked.done()
    assert (asked.status, asked.error["code"], asked.should_retry) == (500, "quarantined", "false")
    for name in (first, second):
        four.revive(name)
    four.settled()


def test_where_no_d_is_left_the_client_is_told(four: System) -> None:
    asked = Asked(four).until("state", "decoding")
    victim = asked.worker("decode")
    other = {"d-0": "d-1", "d-1": "d-0"}[victim]
    for name in (other, victim):
        four.child(name).kill()
    asked.done()
    assert asked.error["code"] in ("worker_lost", "no_replica")
    assert asked.finish is None
    eventually(lambda: not four.broker.zcard(LIVE))
    for name in (victim, other):
        four.revive(name)
    four.settled()
    assert four.complete(PROMPT[:200], ROUTE).finish == "length"
