"""Crowd: clients that use the system while it is hurt, and bystanders who ask again until they have their answer.

Every question's answer is known beforehand, so that every character that comes can be judged.
"""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

from tests.chaos.history import History
from tests.faults.call import Outcome
from tests.faults.rig import API, Question, Rig

LENGTHS = (1 + 6, 64, 65, 129, 200, 300, 450)
TOKENS = (4, 12, 30)
TRIES = 40  # of a bystander, with a pause of up to two seconds: far longer than the system needs to mend
LEAVES = 0.15  # share of requests whose client goes away


class Crowd:
    """`clients` threads each. Stops by itself after `requests` requests, or when told."""

    def __init__(self, rig: Rig, history: History, seed: int, clients: int, requests: int) -> None:
        self._rig = rig
        self._history = history
        self._seed = seed
        self._numbers = itertools.count()
        self._requests = requests
        self._stop = threading.Event()
        self._questions = [rig.oracle.question(length, max(TOKENS)) for length in LENGTHS]
        kinds = [self._use] * clients + [self._watch] * max(1, clients // 3)
        self._threads = [
            threading.Thread(target=kind, args=(random.Random(f"{seed}/{index}"),), name=f"client-{index}")
            for index, kind in enumerate(kinds)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def join(self, timeout_s: float) -> bool:
        """True when all requests are done."""
        for thread in self._threads:
            thread.join(timeout_s)
            timeout_s = 0.0 if thread.is_alive() else timeout_s
        return not any(thread.is_alive() for thread in self._threads)

    def _use(self, rng: random.Random) -> None:
        while not self._stop.is_set() and (number := next(self._numbers)) < self._requests:
            self._once(number, rng, leaves=rng.random() < LEAVES)

    def _watch(self, rng: random.Random) -> None:
        """A bystander: what it asked it must be told in the end, and rightly."""
        while not self._stop.is_set() and (number := next(self._numbers)) < self._requests:
            question, tokens = rng.choice(self._questions), rng.choice(TOKENS)
            for _ in range(TRIES):
                if self._once(number, rng, question=question, tokens=tokens).right:
                    break
                self._stop.wait(rng.uniform(0.2, 2.0))
                number = next(self._numbers)
            else:
                self._history.note("gave up", id=number, expected=question.text(tokens))

    def _once(
        self,
        number: int,
        rng: random.Random,
        *,
        leaves: bool = False,
        question: Question | None = None,
        tokens: int = 0,
    ) -> Outcome:
        question = question or rng.choice(self._questions)
        tokens = tokens or rng.choice(TOKENS)
        stream, route = rng.random() < 0.6, rng.choice(("auto", "reference->reference", "local:reference"))
        what = {"stream": stream, "route": route, "prompt_tokens": len(question.prompt), "tokens": tokens}
        self._history.note("ask", id=number, expected=question.text(tokens), leaves=leaves, **what)
        deaths, dying = self._rig.deaths[API], API in self._rig.dying
        call = self._rig.ask(question, tokens, stream=stream, route=route)
        if leaves:
            self._stop.wait(rng.uniform(0.0, 1.5))
            call.leave()
        try:
            outcome, hangs = call.result(), False
        except AssertionError:
            outcome, hangs = call.so_far, True
        api_died = dying or self._rig.deaths[API] != deaths
        self._history.note("end", id=number, hangs=hangs, api_died=api_died, **_told(outcome))
        if outcome.status in (0, 429, 503):  # as a client's SDK does: not at once again
            self._stop.wait(rng.uniform(0.3, 1.0))
        return outcome


def _told(outcome: Outcome) -> dict[str, Any]:
    trace = outcome.trace or {}
    attempts = trace.get("attempts", {})
    recovered = [f"{role} again" for role in ("prefill", "decode") if attempts.get(role, 1) > 1]
    recovered += ["recomputed"] if trace.get("recomputed") else []
    fields = ("status", "text", "finish", "code", "ended", "refused")
    return {name: getattr(outcome, name) for name in fields} | {"recovered": recovered}
