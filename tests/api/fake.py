"""FakeBackend: answers from a script, remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.api.relay import Entry, Listener, Model, Submission
from pipeline.broker.channel import ErrorInfo, TokenEntry
from pipeline.errors import CrossfillError
from pipeline.request import Request
from pipeline.routing import Wish

Step = TokenEntry | asyncio.Event | Exception


def steps(token_ids: Sequence[int], finish: str | None = "length", size: int = 1, held: int = 0) -> list[Step]:
    """Entries of `size` tokens each; the last has `finish`."""
    cuts = range(0, len(token_ids), size)
    entries: list[Step] = [TokenEntry(at, tuple(token_ids[at : at + size])) for at in cuts]
    if finish:
        last = entries[-1]
        assert isinstance(last, TokenEntry)
        entries[-1] = TokenEntry(last.seq, last.token_ids, finish, held_tokens=held)
    return entries


def failure(code: str = "engine_failed", message: str = "boom", *, retryable: bool = True, status: int = 502) -> Step:
    return TokenEntry(0, (), error=ErrorInfo(code, message, retryable, status))


class FakeSubmission:
    """Tells entries, one in each turn of the loop, even after its end; an event in the script is waited for, an
    exception told."""

    def __init__(self, script: Sequence[Step], log: list[Any]) -> None:
        self._script = script
        self._log = log
        self.read = 0
        self.closed = asyncio.Event()

    def listen(self, listener: Listener) -> None:
        self.playing = asyncio.create_task(self._play(listener))

    async def _play(self, listener: Listener) -> None:
        for step in self._script:
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            await asyncio.sleep(0)
            self.read += not isinstance(step, Exception)
            listener(step)

    async def cancel(self, reason: str) -> None:
        self._log.append(("cancel", reason))

    async def stop(self) -> bool:
        self._log.append(("stop",))
        return True

    async def trace(self) -> dict[str, Any] | None:
        return {"route": {"prefill_engine": "vllm"}, "reused_tokens": 7}

    async def close(self) -> None:
        self._log.append(("close",))
        self.closed.set()


def told(submission: Submission) -> asyncio.Future[list[Entry]]:
    """Every entry up to and with the last, listened to from now on; or the error that ended them."""
    ended: asyncio.Future[list[Entry]] = asyncio.get_running_loop().create_future()
    entries: list[Entry] = []

    def hear(heard: Entry | Exception) -> None:
        if isinstance(heard, Exception):
            ended.set_exception(heard)
            return
        entries.append(heard)
        if heard.last:
            ended.set_result(entries)

    submission.listen(hear)
    return ended


@dataclass
class FakeBackend:
    """`scripts` are taken in order, the last one again and again; `refusal` is raised by every submit."""

    scripts: list[list[Step]] = field(default_factory=list)
    refusal: CrossfillError | None = None
    unready: CrossfillError | None = None
    unready_model: str | None = None  # None: all of them
    log: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    submissions: list[FakeSubmission] = field(default_factory=list)

    async def start(self) -> None:
        self.log.append(("start",))

    async def close(self) -> None:
        self.log.append(("end",))

    async def submit(self, request: Request, wish: Wish, model: Model) -> FakeSubmission:
        if self.refusal:
            raise self.refusal
        self.requests.append(request)
        self.models.append(model.name)
        self.wishes.append(wish)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.submissions.append(FakeSubmission(script, self.log))
        return self.submissions[-1]

    async def require_ready(self, model: Model) -> None:
        if self.unready and (self.unready_model in (None, model.name)):
            raise self.unready

    async def explain(self, model: Model, tokens: int) -> list[Mapping[str, object]]:
        return [{"way": f"vllm->{model.name}", "tokens": tokens}]

    async def status(self) -> dict[str, Any]:
        return {"replicas": [], "live": []}

    async def handoffs(self, recent: int) -> list[dict[str, Any]]:
        return [{"handoff_id": "a" * 32, "recent": recent}]

    async def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        return {"handoff_id": handoff_id} if handoff_id == "a" * 32 else None
