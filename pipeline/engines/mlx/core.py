"""Core: the part of the engine that lives on the engine thread: the model, the prompts in line, the batch.

Each step computes one chunk of one prompt, then one token of every running request. What other threads call is
marked so; everything else belongs to the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from pipeline.contract import Contract
from pipeline.engines.mlx import model as checkpoint_model
from pipeline.engines.mlx.batch import Batch, Row, failure
from pipeline.engines.mlx.cache import Assembly, Chunk
from pipeline.engines.mlx.loop import Loop
from pipeline.engines.mlx.memory import Memory
from pipeline.engines.mlx.prompt import Prompt
from pipeline.engines.room import shortage
from pipeline.engines.store import PageStore
from pipeline.errors import ConfigError, CrossfillError, EngineError
from pipeline.settings import EngineSettings

# Freed buffers that MLX may keep for what comes next. Without any, each request allocates its caches and pages anew,
# which on a GPU waits for the device every time; without a bound, buffers of every size that it has seen stay.
_SPARE_BYTES = 1 << 30


class Live(Protocol):
    """A request inside the engine: a prefill or an admission."""

    @property
    def kept_pages(self) -> int: ...

    @property
    def unread_pages(self) -> int: ...

    def fail(self, error: CrossfillError) -> None: ...


class Core:
    """Built on the engine thread, where it loads the model."""

    def __init__(self, loop: Loop[Core], checkpoint: Path, contract: Contract, settings: EngineSettings) -> None:
        self.loop = loop
        self.settings = settings
        _require_room(checkpoint, settings.kv_cache_bytes)
        mx.set_cache_limit(min(_SPARE_BYTES, settings.kv_cache_bytes // 2))
        self.model = checkpoint_model.load(checkpoint, contract, settings.compute_dtype)
        self.store = PageStore(settings.prefix_cache_bytes)
        self.memory = Memory(settings.kv_cache_bytes, self.model.token_bytes, settings.max_running, loop.wake)
        self.failure: EngineError | None = None  # what ended the engine
        self.prompt_tokens_computed = 0
        self.tokens_sampled = 0
        self._batch = Batch(self.model)
        self._prompts: list[Prompt] = []
        self._live: set[Live] = set()
        self._lock = threading.Lock()  # of _live

    # Any thread.

    def enter(self, one: Live) -> None:
        with self._lock:
            self._live.add(one)

    def exit(self, one: Live) -> None:
        with self._lock:
            self._live.discard(one)

    def live(self) -> list[Live]:
        with self._lock:
            return list(self._live)

    def submit(self, prompt: Prompt) -> None:
        """Put a prompt in line, without waiting. Raises EngineError when the engine has ended."""
        queued = self.loop.post(lambda: self._prompts.append(prompt))
        if queued.done():
            queued.result()

    def fill(self, row: Row, assembly: Assembly, first: int, pages: list[Any]) -> None:
        """Put evaluated `pages` into place, from page `first` on; what goes wrong fails `row`."""
        self.loop.post(lambda: assembly.add(first, pages)).add_done_callback(lambda done: _tell(row, done))

    def placed(self, assembly: Assembly, count: int) -> Chunk | None:
        """Copies of its leading `count` pages; None when it decodes or was cleared. Raises what ended the engine."""
        found: list[Chunk | None] = []
        self.loop.post(lambda: found.append(assembly.pages(count))).result()
        return found[0]

    def withdraw(
        self, prompts: Iterable[Prompt] = (), rows: Iterable[Row] = (), assembly: Assembly | None = None
    ) -> None:
        """Take work out again; returns once the device no longer works on it."""
        done = self.loop.post(lambda: self._withdraw(list(prompts), list(rows), assembly))
        done.exception()  # it only fails where the engine has ended, and then nothing works on it

    def prompt(self, row: Row) -> Chunk | None:
        """KV of the prompt of a request that decodes, or has and was to be kept. Raises what ended the engine."""
        found: list[Chunk | None] = []
        self.loop.post(lambda: found.append(self._batch.prompt(row))).result()
        return found[0]

    def join(self, rows: Sequence[Row], caches: Callable[[], list[Any]]) -> None:
        """Let a request's samples decode: `caches()`, on the engine thread, hold all its prompt but the last token."""
        self.loop.post(lambda: self._join(rows, caches())).add_done_callback(lambda done: _tell(rows[0], done))

    # The engine thread.

    def step(self) -> bool:
        prompt = self._next_prompt()
        if prompt is not None:
            self._compute(prompt)
        if self._batch.rows:
            self._decode(ahead=self.model.queues and not self._prompts)
        return prompt is not None or bool(self._batch.rows)

    def die(self, error: Exception) -> None:
        self._fail_all(EngineError(f"the engine has ended: {error}"))

    def end(self) -> None:
        """Without this MLX's own threads outlive the arrays of this one, and the process aborts at exit."""
        self._fail_all(EngineError("the engine has ended"))
        self.memory.close()
        self._prompts.clear()
        self._batch.clear()
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _next_prompt(self) -> Prompt | None:
        """The first prompt in line that has its memory. One that came to decode has it already and may overtake."""
        blocked = self._quota_is_full()
        for prompt in self._prompts:
            if prompt.share is None and not blocked:
                prompt.share = self.memory.ask(prompt.room, rows=0)
            if prompt.share is not None and prompt.share.granted:
                return prompt
            blocked = True
        return None

    def _quota_is_full(self) -> bool:
        return sum(one.unread_pages for one in self.live()) >= self.settings.held_pages

    def _compute(self, prompt: Prompt) -> None:
        try:
            prompt.begin(self.model)
            if not prompt.done:
                chunk = prompt.step(self.model, self.settings.chunk_tokens)
                self.prompt_tokens_computed += chunk.tokens
                self.tokens_sampled += len(prompt.first_tokens)
                prompt.pages.feed(chunk, prompt.first_tokens, prompt.first_logprobs)
            if prompt.done:
                self._finish(prompt)
        except Exception as error:  # one prompt's, not the engine's: out of memory, for one
            self._withdraw([prompt], [])
            prompt.on_fail(failure(error))

    def _finish(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)
        prompt.on_done(prompt, prompt.begin(self.model))
        prompt.caches = None

    def _decode(self, *, ahead: bool) -> None:
        try:
            self.tokens_sampled += self._batch.step(ahead=ahead)
        except Exception as error:  # the caches of the whole batch are in doubt
            for row in self._batch.rows:
                row.fail(error)
            self._batch.clear()

    def _join(self, rows: Sequence[Row], caches: list[Any]) -> None:
        for row in rows:
            self.tokens_sampled += self._batch.join(row, caches)
            self.prompt_tokens_computed += 1

    def _withdraw(self, prompts: list[Prompt], rows: list[Row], assembly: Assembly | None = None) -> None:
        for prompt in prompts:
            if prompt in self._prompts:
                self._prompts.remove(prompt)
            prompt.caches = None
        for row in rows:
            self._batch.leave(row)
        if assembly is not None:
            assembly.clear()

    def _fail_all(self, error: EngineError) -> None:
        self.failure = error
        for one in self.live():
            one.fail(error)


def _require_room(checkpoint: Path, kv_cache_bytes: int) -> None:
    """Caches grow with requests: better no start than a machine out of memory later. Raises ConfigError."""
    device: dict[str, Any] = mx.device_info()
    size = device.get("free_memory") or device.get("memory_size")  # of CUDA, of Metal; a CPU tells neither
    if size and (short := shortage(checkpoint, kv_cache_bytes, int(size))):
        raise ConfigError(f"MLX cannot serve the model: {short}")


def _tell(row: Row, done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        row.fail(error)
