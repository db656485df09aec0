"""Loop: the one thread that owns vLLM's `LLMEngine`: builds it, steps it, ends it.

It never waits for a job: commands come through the exchange's inbox, pages are copied elsewhere, tokens go into queues.
When a step raises, the engine is over: every ticket fails with EngineError and so does every later call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm import exceptions as vllm_exceptions

from pipeline.engines.base import TokenStep
from pipeline.engines.vllm.exchange import Abort, Exchange, Reset, Stop, Submit, VllmTicket
from pipeline.engines.vllm.export import Export
from pipeline.engines.vllm.intake import Intake, Sibling
from pipeline.engines.vllm.sampling import for_decode, for_prefill, logprobs
from pipeline.errors import ConfigError, CrossfillError, EngineError

# vLLM has requests but nothing to run: they wait for pages, for room, or to be read. Every such event wakes the loop;
# the timeout only bounds the harm of one that does not.
_IDLE_S = 0.1
# What `add_request` raises for a request that it cannot serve. vLLM 0.26 has no class for it beside ValueError.
_REFUSALS = (TypeError, ValueError, getattr(vllm_exceptions, "VLLMClientError", ValueError))


class EngineLoop:
    """`build` makes the LLMEngine, on the loop's thread. `held_pages`: unread export pages that hold back new prompts.

    Constructing it blocks until the engine is ready. Raises ConfigError when vLLM cannot load the model.
    """

    def __init__(self, build: Callable[[], Any], exchange: Exchange, *, held_pages: int) -> None:
        self.tokens_sampled = 0
        self._build = build
        self._exchange = exchange
        self._quota = held_pages
        self._backlog: deque[Export] = deque()
        self._engine_ids: dict[str, str] = {}  # our key -> vLLM's id
        self._generation = 0
        self._stopping = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if exchange.ended is not None:
            self._thread.join()
            raise exchange.ended

    # --- any thread

    def submit(self, ticket: VllmTicket) -> None:
        self._exchange.post(Submit(ticket))

    def reset_prefix_cache(self) -> None:
        done = threading.Event()
        self._exchange.post(Reset(done))
        done.wait()
        self._raise_failure()

    def close(self) -> None:
        """End the thread and tear vLLM down. Idempotent."""
        with contextlib.suppress(CrossfillError):  # it has ended already
            self._exchange.post(Stop())
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._exchange.ended is None

    @property
    def tickets(self) -> list[VllmTicket]:
        """Everything inside vLLM or waiting for it."""
        return [*list(self._exchange.by_key.values()), *list(self._backlog)]

    @property
    def block_pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def _raise_failure(self) -> None:
        if isinstance(self._exchange.ended, EngineError):
            raise self._exchange.ended

    # --- the engine's thread

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self._scheduler = self._engine.engine_core.engine_core.scheduler
        except BaseException as error:
            ours = isinstance(error, ConfigError)
            self._end(ConfigError(str(error) if ours else f"vLLM could not load the model: {error}"))
            return
        finally:
            self._ready.set()
        try:
            self._serve()
            self._end(EngineError("the vLLM engine was closed"))
        except BaseException as error:
            self._end(EngineError(f"the vLLM engine died: {type(error).__name__}: {error}"))
        finally:
            self._engine.engine_core.shutdown()

    def _serve(self) -> None:
        while True:
            while (command := self._exchange.peek()) is not None:
                self._obey(command)
                self._exchange.drop()
            if self._stopping:
                return
            self._start_prompts()
            self._sweep()
            if not self._scheduler.has_requests():
                self._exchange.wait(None)
                continue
            for output in self._engine.step():
                self._deliver(output)
            self._sweep()
            if not self._exchange.progress:
                self._exchange.wait(_IDLE_S)

    def _obey(self, command: Submit | Abort | Reset | Stop) -> None:
        match command:
            case Submit(Export() as export):
                self._backlog.append(export)
            case Submit(ticket):
                self._add(ticket)
            case Abort(ticket):
                self._abort(ticket)
            case Reset(done):
                self._reset()
                done.set()
            case Stop():
                self._stopping = True

    def _start_prompts(self) -> None:
        """New prompts enter while unread pages leave room under the quota; the first always, however long."""
        while self._backlog:
            held = sum(one.held_pages for one in self._exchange.by_key.values() if isinstance(one, Export))
            if held and held + self._backlog[0].pages > self._quota:
                return
            self._add(self._backlog.popleft())

    def _add(self, ticket: VllmTicket) -> None:
        if ticket.closed:
            ticket.vanish()
            return
        request = ticket.request
        prompt = {
            "prompt_token_ids": list(request.token_ids),
            "cache_salt": f"{self._generation}/{request.salt}",
        }
        self._exchange.by_key[ticket.key] = ticket
        try:
            params = for_prefill(ticket) if isinstance(ticket, Export) else for_decode(ticket.texts[0], ticket.key)
            self._engine_ids[ticket.key] = self._engine.add_request(ticket.key, prompt, params)
        except _REFUSALS as error:
            del self._exchange.by_key[ticket.key]
            ticket.fail(EngineError(f"vLLM refuses the request: {error}"))
            ticket.vanish()

    def _abort(self, ticket: VllmTicket) -> None:
        if ticket.key in self._exchange.by_key:
            self._engine.abort_request([ticket.key])
            return
        if isinstance(ticket, Export) and ticket in self._backlog:
            self._backlog.remove(ticket)
        ticket.vanish()

    def _reset(self) -> None:
        """vLLM refuses to forget while any block is in use; the next generation's salt makes it forget in effect."""
        self._generation += 1
        self._scheduler.reset_prefix_cache()

    def _deliver(self, output: Any) -> None:
        ticket = self._exchange.by_key.get(output.request_id)
        completion = output.outputs[0]
        if ticket is None:
            return
        if completion.finish_reason not in (None, "stop", "length"):
            ticket.fail(EngineError(f"vLLM ended the request: {completion.finish_reason}"))
        elif isinstance(ticket, Export):
            self.tokens_sampled += len(ticket.texts)
            ticket.deliver()
        elif isinstance(ticket, Intake | Sibling):
            self.tokens_sampled += len(completion.token_ids)
            ticket.deliver(_step(completion, ticket))
            self._join_siblings(ticket)

    def _join_siblings(self, ticket: Intake | Sibling) -> None:
        """The prompt's pages are in vLLM's prefix cache from the first sample's first token on."""
        if isinstance(ticket, Intake) and not ticket.joined:
            ticket.joined = True
            for sibling in ticket.siblings:
                self._add(sibling)

    def _sweep(self) -> None:
        """Tickets that vLLM has let go of."""
        for key, ticket in list(self._exchange.by_key.items()):
            if self._engine_ids[key] not in self._scheduler.requests:
                del self._exchange.by_key[key], self._engine_ids[key]
                ticket.vanish()

    def _end(self, error: CrossfillError) -> None:
        left = self._exchange.end(error)
        for ticket in [*self.tickets, *(one.ticket for one in left if isinstance(one, Submit | Abort))]:
            ticket.fail(error)
            ticket.vanish()
        self._exchange.by_key.clear()
        self._backlog.clear()
        for one in left:
            if isinstance(one, Reset):
                one.done.set()


def _step(completion: Any, ticket: Intake | Sibling) -> TokenStep:
    token_ids, count = tuple(completion.token_ids), ticket.request.sampling.logprobs
    found = None if count is None else logprobs(completion.logprobs or (), token_ids, count)
    return TokenStep(token_ids, completion.finish_reason, ticket.sample if isinstance(ticket, Sibling) else 0, found)
