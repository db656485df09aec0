"""Rig: a System that can be hurt. Each process reaches the broker through a proxy of its own, and each process and the
broker itself can be killed, paused and started again. A decode replica may have a page server of its own, behind a
proxy too. `rest` is where the invariants are checked."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis
from tokenizers import Tokenizer

from pipeline.broker import scripts, stream
from pipeline.broker.credit import entry_id
from pipeline.broker.embedded import EmbeddedServer
from pipeline.cli.child import Child
from pipeline.cli.fleet import Fleet
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.oracle import split_run
from pipeline.handoff import Attempts
from pipeline.settings import Settings
from tests.faults.call import Call
from tests.ports import free_port
from tests.proxy import Faults, Proxy, first_held
from tests.scenarios.system import READY_S, System, eventually, worker

API = "api"
LEASE_S = 3.0
PAGE_BYTES = 1 << 15  # of the tiny model
BUDGET = 32 * PAGE_BYTES  # one handoff may have four pages in flight
CLAIM_S = 120.0
REST_S = 60.0  # a bound for a loaded machine; the promise is 2 s after the lease has ended
_PLAIN = (18, 19, 20, 21, 22, 23)  # "012345": a prompt that ends within no character
MARGIN = 0.002  # logits of the tiny model: FP16 rounding of KV moves one by less than a tenth of this


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of the tiny model and what it greedily says, from a run without a line of Crossfill's path."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    tokenizer: Tokenizer

    def text(self, count: int) -> str:
        return str(self.tokenizer.decode(list(self.tokens[:count])))


class Oracle:
    """Questions whose answers no rounding changes."""

    def __init__(self, model: Path, margin: float = MARGIN) -> None:
        self._model = Model.load(model)
        self._margin = margin
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.question = cache(self._question)

    def _question(self, length: int, tokens: int, number: int = 0) -> Question:
        """The `number`-th question of `length` prompt tokens with a firm answer of `tokens` tokens."""
        for salt in range(400):
            body = tuple((7 * i + 131 * number + 17 * salt) % 900 + 20 for i in range(length - len(_PLAIN)))
            prompt = body + _PLAIN
            run = split_run(self._model, prompt, tokens)
            if min(run.margins) >= self._margin:
                return Question(prompt, run.tokens, self._tokenizer)
        raise AssertionError("no firm question found")


def script(name: str) -> bytes:
    """What marks a call of the broker's script `name`."""
    return hashlib.sha1(scripts.source(name).encode(), usedforsecurity=False).hexdigest().encode()


def page(number: int) -> bytes:
    """What marks the moment when P stores its `number`-th page (1: the first), and D asks for it, both at first try."""
    return b"page:1.1.%d\r\n" % number


def frame(number: int) -> bytes:
    """What marks the header of P's `number`-th frame (0: OPEN), at first try."""
    return b"%b\r\n" % entry_id(Attempts(1, 1), number).encode()


class Beside(NamedTuple):
    """The page server of one decode replica."""

    server: EmbeddedServer
    port: int


class Crew(Fleet):
    """A Fleet whose members may be started again one by one."""

    def child(self, name: str) -> Child:
        return next(each for each in self.children if each.name == name)

    def revive(self, name: str) -> None:
        """Start `name` again; it must have ended."""
        old = self.child(name)
        assert old.join(60.0), f"{name} still runs"
        self.restart(old)


class Rig(System):
    """`hops` by process name, of page servers too. Whatever a test breaks, `rest` mends before it looks."""

    def __init__(
        self,
        crew: Crew,
        server: EmbeddedServer,
        hops: dict[str, Proxy],
        url: str,
        oracle: Oracle,
        beside: Mapping[str, Beside],
    ) -> None:
        super().__init__(crew)
        self.crew = crew
        self.server = server
        self.beside = beside  # page servers of decode replicas, by the names of their hops
        self.hops = hops
        self.oracle = oracle
        self.broker.close()
        self.broker = self.broker.from_url(url)  # ours does not pass a proxy
        self.deaths = Counter[str]()  # by name; counted before the kill
        self.dying = set[str]()  # counted, and may still answer
        self._killed_s = -math.inf  # when a process was last killed
        self._free: dict[str, int] = {}
        self.route = "reference->reference"  # of the next request after a fault

    # -- what a test does to it

    def kill(self, name: str) -> None:
        if name in self.beside:
            os.kill(self._pid(name), signal.SIGKILL)
            self.beside[name].server.stop()  # nothing is left to stop: what it notes of the process goes
            return
        self.dying.add(name)
        self.deaths[name] += 1
        self._killed_s = time.monotonic()
        self.crew.child(name).kill()
        assert self.crew.child(name).join(60.0)
        self.dying.discard(name)

    def revive(self, name: str) -> None:
        """Start again what was killed, and wait until a replica serves; a page server comes back empty."""
        if name in self.beside:
            self.beside[name].server.start()
        elif name == API:
            self.crew.revive(name)
        else:
            super().revive(name)

    def pause(self, name: str) -> None:
        os.kill(self._pid(name), signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.kill(self._pid(name), signal.SIGCONT)

    def _pid(self, name: str) -> int:
        pid = self.beside[name].server.pid if name in self.beside else self.crew.child(name).pid
        assert pid is not None, f"{name} does not run"
        return pid

    def ask(self, question: Question, tokens: int, *, stream: bool = True, route: str = "auto", **body: Any) -> Call:
        """One greedy request, running on a thread of its own."""
        fields = {"model": self.model, "prompt": list(question.prompt), "max_tokens": tokens, "temperature": 0}
        fields |= {"ignore_eos": True, "stream": stream, "cache_salt": os.urandom(8).hex()} | body
        return Call(self.url, fields, route)

    def answers(self, length: int = 150, tokens: int = 6) -> None:
        """A fresh request gets the right text: the last invariant of every fault."""
        question = self.oracle.question(length, tokens)
        outcome = self.ask(question, tokens, route=self.route).result()
        assert (outcome.status, outcome.code) == (200, None), outcome
        assert outcome.text == question.text(tokens)

    def serving(self) -> None:
        """Wait until every process that should serve does."""
        eventually(lambda: all(self.crew.ready().values()), READY_S)

    def handoff(self) -> str:
        """Id of the one live handoff, once there is one."""
        eventually(lambda: len(self.live()) == 1, REST_S)
        return self.live()[0]

    def live(self) -> list[str]:
        found: list[Any] = list(self.broker.zrange("cf:live", 0, -1))
        return [str(name, "ascii") for name in found]

    def record(self, handoff: str) -> dict[str, str]:
        """Its record as it lies there; empty when it is gone."""
        raw: Any = self.broker.hgetall(f"cf:{{{handoff}}}:record")
        return {name.decode(): value.decode() for name, value in raw.items()}

    def await_record(self, handoff: str, met: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """The record as soon as `met` says so."""
        deadline = time.monotonic() + REST_S
        while not met(found := self.record(handoff)):
            assert found, "the handoff has ended"
            assert time.monotonic() < deadline, found
            time.sleep(0.002)
        return found

    def worker_of(self, handoff: str, role: str) -> str:
        """Name of the replica that works on `role` of it, once one does."""
        return self.await_record(handoff, lambda found: f"{role}_worker" in found)[f"{role}_worker"].partition("@")[0]

    def slow(self, role: str, latency_s: float) -> None:
        """Each round trip of the replicas of `role`, and of all to a page server, takes twice this: pages and tokens
        come one by one."""
        for name, hop in self.hops.items():
            if name.startswith(role[0]) or name in self.beside:
                hop.apply(Faults(latency_s=latency_s))

    def holding(self, role: str, marker: bytes, after: int = 0) -> AbstractContextManager[Callable[[], str]]:
        """The first replica of `role` that is about to send `marker`, after it did so `after` times, stops: what is
        yielded waits for that and tells its name. It goes on at the end.
        """
        return first_held({name: hop for name, hop in self.hops.items() if name[0] == role[0]}, marker, after)

    # -- the invariants

    def mend(self) -> None:
        """The broker runs, the network works, nobody is stopped or dead."""
        for hop in self.hops.values():
            hop.mend()
        for server in (self.server, *(each.server for each in self.beside.values())):
            if server.pid is None:
                server.start()
        for name in self.beside:
            self.resume(name)
        for each in self.crew.children:
            if each.status is None:
                self.resume(each.name)
            else:
                self.crew.revive(each.name)
        self.serving()

    def rest(self) -> dict[str, Any]:
        """Mend, wait until nothing is in flight, and check the invariants I1-I4, I6 and I7; then the status."""
        self.mend()
        deadline = time.monotonic() + REST_S
        while found := self.unrest():
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        self.answers()
        return self.settled()

    def unrest(self) -> dict[str, Any]:
        """What is not at rest: handoffs, keys, credit, jobs, engines; empty when all is as at the start."""
        found = self.busy() | self._rq()
        for name, free in self._pools().items():
            if free != self._free.setdefault(name, free):
                found[f"free pages of {name}"] = (free, "of", self._free[name])
        for key in ("cf:budget:held", "cf:budget:leases", "cf:budget:waiters", "cf:budget:wants"):
            if self.broker.exists(key):
                found[key] = "is not empty"
        return found | {name: left for name, each in self.beside.items() if (left := _left(each.port))}

    def _pools(self) -> dict[str, int]:
        return {r["name"]: r["stats"]["free_pages"] for r in self.status()["replicas"]}

    def _rq(self) -> dict[str, Any]:
        """Jobs that wait, are being handed out or are believed to run."""
        found: dict[str, Any] = {}
        for key in map(bytes.decode, self.broker.scan_iter("rq:*", count=1000)):
            # what a killed worker claimed to run ends with RQ's own lease of it, after a minute and a half
            claims = () if time.monotonic() - self._killed_s < CLAIM_S else ("rq:wip:",)
            if key.startswith(("rq:queue:", *claims)) and self.broker.type(key) in (b"list", b"zset"):
                size = self.broker.llen(key) if self.broker.type(key) == b"list" else self.broker.zcard(key)
                if size:
                    found[key] = size
        return found


def settings(
    model: Path,
    url: str,
    hops: dict[str, Proxy],
    engines: Mapping[str, str],
    pool_bytes: int | None,
    grace_s: float,
    **sections: Any,
) -> dict[str, Any]:
    """A replica for each of `engines`, whose name begins with the letter of its role, behind its own hop."""
    workers = []
    small: dict[str, Any] = {"chunk_tokens": 64} | ({"kv_cache_bytes": pool_bytes} if pool_bytes else {})
    for name, engine in engines.items():
        role = "prefill" if name.startswith("p") else "decode"
        pages = {"pages_url": hop.url, "pages_budget_bytes": BUDGET} if (hop := hops.get(_beside(name))) else {}
        env = {"CROSSFILL_BROKER__URL": hops[name].url} | ({} if engine == "reference" else _sabotage())
        limits = {"lease_s": LEASE_S, "grace_s": grace_s}
        workers.append(worker(name, engine, model, role, engine_settings=small, env=env, **limits, **pages))
    deadlines = {"queue_s": 15, "accept_s": 20, "progress_s": 10, "total_s": 120}
    broker = {"url": hops[API].url, "budget_bytes": BUDGET}
    routes = {"policy": "handoff"}  # by itself: a prompt crosses wherever it can
    found = {"api": {"model": model, "port": free_port()}, "broker": broker, "handoff": deadlines, "routing": routes}
    return found | {"workers": workers} | (sections)


def _sabotage() -> dict[str, str]:
    """A real engine that ends at SIGUSR1."""
    here = Path(__file__).resolve().parent
    return {"PYTHONPATH": os.pathsep.join([str(here / "sabotage"), str(here.parent.parent)])}


def _page_server(directory: Path) -> Beside:
    port = free_port()
    return Beside(EmbeddedServer(directory, BUDGET, port=port), port)


def _left(port: int) -> dict[str, Any]:
    """What is not at rest on a page server."""
    with Redis(port=port) as pages:
        found = stream.gauges(pages)._asdict() | {"keys": [key for key in pages.scan_iter("*") if b"{" in key]}
    return {name: value for name, value in found.items() if value}


def _beside(name: str) -> str:
    """What the page server of a decode replica is called here."""
    return f"beside-{name}"


FOUR = dict.fromkeys(("p-0", "p-1", "d-0", "d-1"), "reference")


@contextmanager
def rig(
    model: Path,
    directory: Path,
    engines: Mapping[str, str] = FOUR,
    *,
    pool_bytes: int | None = None,
    margin: float = MARGIN,
    grace_s: float = 30.0,
    own_pages: Sequence[str] = (),
    **sections: Any,
) -> Iterator[Rig]:
    """Start it, wait until it serves, stop it. `engines` by name; each token of an answer leads by `margin`. Decode
    replicas in `own_pages` have a page server each."""
    port = free_port()
    server = EmbeddedServer(directory / "broker", BUDGET, port=port)
    with ExitStack() as stack:
        url = stack.enter_context(server)
        beside = {_beside(name): _page_server(directory / f"pages-{name}") for name in own_pages}
        for each in beside.values():
            stack.enter_context(each.server)
        ports = dict.fromkeys((API, *engines), port) | {name: each.port for name, each in beside.items()}
        hops = {name: stack.enter_context(Proxy(behind)) for name, behind in ports.items()}
        told = settings(model, url, hops, engines, pool_bytes, grace_s, **sections)
        crew = Crew(Settings.model_validate(told), directory, os.environ)
        stack.callback(crew.stop)
        crew.start()
        for _ in crew.wait_ready(READY_S):
            pass
        running = Rig(crew, server, hops, url, Oracle(model, margin), beside)
        stack.callback(running.close)
        running.unrest()  # notes the free pages
        yield running
        running.mend()
