"""A worker dies, hangs or comes back in the middle of a request: the client gets the text it would have had.

Four `reference` replicas in processes of their own, two in each role, so that there is always somebody to go on.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.rig import Rig, page, rig, script
from tests.proxy import first_held
from tests.scenarios.system import System, eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PROMPT = [(11 * i + 221) % 900 + 20 for i in range(1500)]  # each of TOKENS tokens leads by 0.003, FP16 moves less
PAGES = 24
ROUTE = "reference->reference"
TOKENS = 200
TOKEN = script("emit")  # what D sends with each token
PAGE = page(8)  # what P sends, and D asks for, once earlier pages are in D
OTHER = {"p-0": "p-1", "p-1": "p-0", "d-0": "d-1", "d-1": "d-0"}


@pytest.fixture(scope="module")
def four(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tiny_model, tmp_path_factory.mktemp("four"), grace_s=0.0, handoff={"progress_s": 30}) as running:
        yield running


class Asked:
    """One streamed request, read on a thread of its own."""

    def __init__(self, running: System, sampling: dict[str, Any] | None = None, **body: Any) -> None:
        self._system = running
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


def _baseline(running: System) -> dict[str, int]:
    return {r["name"]: r["stats"]["free_pages"] for r in running.settled()["replicas"]}


def _as_before(running: System, free: dict[str, int]) -> None:
    """Every gauge is at rest and every pool whole."""
    eventually(lambda: _baseline(running) == free)


def _whole(asked: Asked, text: str) -> None:
    """The undisturbed text, every token counted once."""
    asked.done()
    assert (asked.status, asked.error) == (200, {})
    assert asked.text == text
    assert asked.finish == "length"
    assert (asked.usage["prompt_tokens"], asked.usage["completion_tokens"]) == (len(PROMPT), TOKENS)


@pytest.fixture(scope="module")
def text(four: Rig) -> str:
    """What the prompt is answered with where nothing goes wrong."""
    return four.complete(PROMPT, ROUTE, max_tokens=TOKENS).text


def test_p_is_killed_between_two_pages(four: Rig, text: str) -> None:
    """What D has imported stays: the other P sends the rest."""
    free = _baseline(four)
    with four.holding("prefill", PAGE) as held:
        asked = Asked(four)
        victim = held()
        four.child(victim).kill()
    _whole(asked, text)
    assert (asked.trace["resent"], asked.trace["taken_over"], asked.trace["recomputed"]) == (1, 0, None)
    assert asked.trace["attempts"] == {"prefill": 2, "decode": 1}
    assert asked.trace["imported_tokens"] == len(PROMPT) - 1
    assert asked.trace["pages"] < PAGES  # the second P did not begin at the first page
    four.revive(victim)
    _as_before(four, free)


def test_d_is_killed_before_the_first_token(four: Rig, text: str) -> None:
    free = _baseline(four)
    with four.holding("decode", PAGE) as held:
        asked = Asked(four)
        victim = held()
        four.child(victim).kill()
    _whole(asked, text)
    assert (asked.trace["resent"], asked.trace["taken_over"], asked.trace["lost_workers"]) == (0, 1, 1)
    assert asked.trace["attempts"] == {"prefill": 2, "decode": 2}
    four.revive(victim)
    _as_before(four, free)


def test_d_is_killed_in_the_midst_of_the_text(four: Rig, text: str) -> None:
    """The stream goes on: nothing twice, nothing missing."""
    free = _baseline(four)
    with four.holding("decode", TOKEN, after=20) as held:
        asked = Asked(four)
        victim = held()
        four.child(victim).kill()
    _whole(asked, text)
    assert asked.trace["taken_over"] == 1
    four.revive(victim)
    _as_before(four, free)


def test_sampled_text_goes_on_from_what_was_said(four: Rig) -> None:
    """Every draw is of its position, so that with a seed the other D draws what this one would have: but for rounding,
    the same text. What the client had read stays as it was."""
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    right = four.complete(PROMPT, ROUTE, max_tokens=TOKENS, **sampling).text
    with four.holding("decode", TOKEN, after=40) as held:
        asked = Asked(four, sampling=sampling)
        victim = held()
        eventually(lambda: len(asked.text) > 20)
        said = asked.text
        four.child(victim).kill()
    asked.done()
    assert asked.text.startswith(said)
    assert right.startswith(said)
    assert (asked.trace["taken_over"], asked.usage["completion_tokens"]) == (1, TOKENS)
    four.revive(victim)
    four.settled()


LISTED = {"type": "array", "items": {"enum": ["good", "bad"]}, "minItems": 24, "maxItems": 24}


@pytest.mark.parametrize(
    "sampling",
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
def test_whatever_an_answer_depends_on_it_goes_on(four: Rig, sampling: dict[str, Any]) -> None:
    """Penalties count what the first D said, a grammar stands where it stood, samples go on side by side: all of it as
    if nothing had happened (`reference` computes the same whoever computes it, but for rounding)."""
    right = four.post(PROMPT, ROUTE, **({"max_tokens": TOKENS} | sampling)).json()
    with four.holding("decode", TOKEN, after=40) as held:
        asked = Asked(four, sampling=sampling)
        victim = held()
        eventually(lambda: len(asked.text) > 20)
        four.child(victim).kill()
    asked.done()
    assert (asked.error, asked.trace["taken_over"]) == ({}, 1)
    texts = [choice["text"] for choice in right["choices"]]
    assert [asked.texts[index] for index in range(len(texts))] == texts
    assert asked.usage["completion_tokens"] == right["usage"]["completion_tokens"]
    if "response_format" in sampling:
        assert len(json.loads(texts[0])) == 24
    four.revive(victim)
    four.settled()


def test_a_stop_string_is_found_across_the_seam(four: Rig, text: str) -> None:
    stop = text[-24:-12]
    assert text.index(stop) == len(text) - 24
    with four.holding("decode", TOKEN, after=20) as held:
        asked = Asked(four, stop=[stop])
        victim = held()
        four.child(victim).kill()
    asked.done()
    assert (asked.text, asked.finish) == (text[:-24], "stop")
    four.revive(victim)
    four.settled()


def test_a_p_that_was_stopped_for_a_while_changes_nothing_when_it_wakes(four: Rig, text: str) -> None:
    free = _baseline(four)
    with four.holding("prefill", PAGE) as held:
        asked = Asked(four)
        zombie = held()
        four.pause(zombie)
    _whole(asked, text)
    assert asked.trace["resent"] == 1
    four.resume(zombie)
    eventually(lambda: zombie in {replica["name"] for replica in four.status()["replicas"]})
    _as_before(four, free)
    assert four.complete(PROMPT, ROUTE, max_tokens=TOKENS).text == text


def test_a_d_that_was_stopped_for_a_while_adds_no_token_when_it_wakes(four: Rig, text: str) -> None:
    free = _baseline(four)
    with four.holding("decode", TOKEN, after=20) as held:
        asked = Asked(four)
        zombie = held()
        four.pause(zombie)
        other = OTHER[zombie]
        with first_held({other: four.hops[other]}, TOKEN, after=20) as taken_over:
            taken_over()
            four.resume(zombie)  # in the midst of the other's text
    _whole(asked, text)
    eventually(lambda: zombie in {replica["name"] for replica in four.status()["replicas"]})
    _as_before(four, free)


def test_p_hangs_and_the_client_goes_away(four: Rig) -> None:
    free = _baseline(four)
    with four.holding("prefill", PAGE) as held:
        asked = Asked(four)
        zombie = held()
        four.pause(zombie)
    asked.leave()
    asked.done()
    four.resume(zombie)
    _as_before(four, free)


def test_d_is_stopped_by_sigterm_and_another_goes_on(four: Rig, text: str) -> None:
    """What does not end within its grace (here none) moves; nothing is counted as a death."""
    free = _baseline(four)
    with four.holding("decode", TOKEN, after=20) as held:
        asked = Asked(four)
        stopped = held()
        four.child(stopped).terminate()
        eventually(lambda: "drains" in four.child(stopped).log.read_text())
    _whole(asked, text)
    assert (asked.trace["taken_over"], asked.trace["lost_workers"]) == (1, 0)
    four.revive(stopped)
    _as_before(four, free)


def test_a_request_that_two_workers_died_of_is_not_given_to_a_third(four: Rig) -> None:
    """500, and no client's library tries it again."""
    with four.holding("prefill", PAGE) as held:
        asked = Asked(four, stream=False, stream_options=None)
        first = held()
        second = OTHER[first]
        with first_held({second: four.hops[second]}, b"page:2.1.") as held_again:
            four.child(first).kill()
            held_again()
            four.child(second).kill()
    asked.done()
    assert (asked.status, asked.error["code"], asked.should_retry) == (500, "quarantined", "false")
    for name in (first, second):
        four.revive(name)
    four.settled()


def test_where_no_d_is_left_the_client_is_told(four: Rig) -> None:
    with four.holding("decode", TOKEN, after=20) as held:
        asked = Asked(four)
        victim = held()
        for name in (OTHER[victim], victim):
            four.child(name).kill()
    asked.done()
    assert asked.error["code"] in ("worker_lost", "no_replica")
    assert asked.finish is None
    eventually(lambda: not four.live())
    for name in (victim, OTHER[victim]):
        four.revive(name)
    four.settled()
    assert four.complete(PROMPT[:200], ROUTE).finish == "length"
