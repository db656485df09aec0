"""SglangEngine: one of the two roles of `engines/base.py` on SGLang (0.5.17 to 0.5.23; CPU or CUDA).

SGLang is started for prefill or for decode. As P it computes prompts and draws their first token; as D it only goes on
from KV and a first token (`can_prefill` is False), so it is always given a P. When its scheduler process dies every
request fails at once and `failure` says so: the worker must leave, since SGLang cannot be restarted in place.
"""

from __future__ import annotations

import importlib.util
import itertools
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from pipeline.checkpoint import eos_token_ids, read_contract
from pipeline.contract import Contract
from pipeline.engines.base import Capabilities, Check, EngineStats
from pipeline.engines.feature import SUPPORTED
from pipeline.engines.sglang.admission import SglangAdmission
from pipeline.engines.sglang.link import Link
from pipeline.engines.sglang.message import Message
from pipeline.engines.sglang.prefill import SglangPrefill
from pipeline.engines.sglang.sample import End, SglangSample
from pipeline.engines.sglang.sampling import for_decode, for_prefill, sample
from pipeline.engines.sglang.server import Server
from pipeline.engines.sglang.ticket import SglangTicket
from pipeline.engines.ticket import admitted, require_fit
from pipeline.errors import ConfigError, CrossfillError, EngineError
from pipeline.grammar import Compiler
from pipeline.page import PAGE_TOKENS
from pipeline.request import Request, Sampling
from pipeline.settings import EngineSettings

if importlib.util.find_spec("sglang") is None:
    raise ImportError("SGLang is not in this environment")

# SGLang keeps a few tokens of its context window for itself; we let it have these and keep to ours.
_MARGIN_TOKENS = 8
# num_reserved_decode_tokens' default: as D SGLang gives a prompt room only where so many tokens stay free beside it.
_RESERVED_TOKENS = 512
# How long the first of several samples may run on, so that its pages stay until the others have them.
_GRACE_TOKENS = 64
_LOOK_AHEAD_TOKENS = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION's default
_ATTACH_S = 10.0  # the plug-in says hello before SGLang says that it is ready
_IDLE_S = 5.0  # how long SGLang may take to notice that nothing runs any more
_IDLE_STEP_S = 0.05


class SglangEngine:
    """Loads the checkpoint directory; blocks until SGLang is ready. Construct it in the main thread.

    Raises ConfigError: the role is "both", a model that SGLang cannot load, a pool too small for one page.
    """

    name = "sglang"

    def __init__(self, checkpoint: Path, settings: EngineSettings) -> None:
        if settings.role == "both":
            raise ConfigError(
                "SGLang serves one role per process: describe two workers, one with role = 'prefill' and one with "
                "role = 'decode'"
            )
        self._role = settings.role
        self._contract = read_contract(checkpoint, context_length=settings.context_length)
        self._settings = settings
        self._compiler = Compiler(checkpoint, self._contract.vocab_size, eos_token_ids(checkpoint))
        self._pages = settings.kv_cache_bytes // self._contract.page_shape.page_bytes
        if self._pages < 1:
            page_bytes = self._contract.page_shape.page_bytes
            raise ConfigError(f"kv_cache_bytes = {settings.kv_cache_bytes} holds no page: set {page_bytes} or more")
        self._limit = min(self._contract.context_length, self._pages * PAGE_TOKENS - _MARGIN_TOKENS)
        self._rooms = itertools.count(1)
        self._lock = threading.Lock()
        self._live: dict[int, SglangTicket] = {}
        self._backlog: deque[SglangPrefill] = deque()
        self._generation = 0
        self._prompt_tokens_computed = 0
        self._tokens_sampled = 0
        self._failure: CrossfillError | None = None
        self._closed = False
        self.link = Link(self._contract.page_shape, self._route, self._lost)
        try:
            self._server = Server(
                checkpoint,
                self._role,
                self.link.address,
                self._arguments(),
                settings.arguments,
                self._pages * self._contract.page_shape.page_bytes,
            )
            if not self.link.wait_attached(_ATTACH_S):
                raise ConfigError("SGLang started without Crossfill's plug-in in its scheduler")
            self._require_pool()
        except BaseException:
            self.link.close()
            raise

    @property
    def contract(self) -> Contract:
        return self._contract

    @property
    def capabilities(self) -> Capabilities:
        decodes = self._role == "decode"
        return Capabilities(
            can_prefill=not decodes,
            needs_first_token=decodes,
            max_running=self._settings.max_running,
            kv_tokens=max(1, self._pages * PAGE_TOKENS - (_RESERVED_TOKENS if decodes else _MARGIN_TOKENS)),
            features=SUPPORTED[f"sglang {self._role}"],
        )

    @property
    def failure(self) -> CrossfillError | None:
        return self._failure

    def prefill(self, request: Request) -> SglangPrefill:
        """Raises EngineError at once for a prompt that can never fit, in the wrong role, or when SGLang is dead.

        InvalidParameterError for a grammar that cannot be compiled.
        """
        self._require_role("prefill")
        require_fit(request, self._limit, self._contract)
        if request.first_token:
            self._stops(request.sampling)
        ticket = SglangPrefill(next(self._rooms), request, self)
        with self._lock:
            self._require_alive()
            self._live[ticket.room] = ticket
            self._backlog.append(ticket)
        self.moved()
        return ticket

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> SglangAdmission:
        """Raises DeadlineError, EngineError for a request that can never fit, in the wrong role, or `local`.

        InvalidParameterError for a grammar that cannot be compiled.
        """
        self._require_role("decode")
        if local or not request.first_token:
            raise EngineError("SGLang in decode mode computes no prompts: it needs all of the KV and P's first token")
        require_fit(request, self._limit, self._contract)
        limit = min(request.sampling.max_tokens, self._contract.context_length - len(request.token_ids))
        self._require_room(len(request.token_ids), limit, request.sampling.n)
        samples = [sample(request, index) for index in range(request.sampling.n)]
        end = End(self._stops(request.sampling), limit)
        ticket = SglangAdmission([next(self._rooms) for _ in samples], samples, self, end)
        with self._lock:
            self._require_alive()
            self._live[ticket.room] = ticket
        grace = _GRACE_TOKENS if len(samples) > 1 else 0
        self._start(ticket, min(limit + grace, self._contract.context_length - len(request.token_ids)))
        return admitted(ticket, timeout_s, check, "SGLang")

    def stats(self) -> EngineStats:
        """Free pages are 0 once SGLang is dead."""
        try:
            free, cached = self.link.measure()
        except EngineError:
            free, cached = 0, 0
        with self._lock:
            self._sweep()
            live = list(self._live.values())
            return EngineStats(
                running=len(live),
                held_pages=sum(ticket.kept_pages for ticket in live),
                cached_pages=cached,
                free_pages=free,
                prompt_tokens_computed=self._prompt_tokens_computed,
                tokens_sampled=self._tokens_sampled,
            )

    def reset_prefix_cache(self) -> None:
        """SGLang refuses to forget while anything runs; another generation's key makes it forget in effect.

        For a moment after a request's last word it still counts as one that runs: that is waited for.
        """
        self._generation += 1
        deadline = time.monotonic() + _IDLE_S
        while not self._server.flush() and not self._live and time.monotonic() < deadline:
            time.sleep(_IDLE_STEP_S)

    def close(self) -> None:
        """Fail what is left and end SGLang's processes. Idempotent."""
        self._die(EngineError("the engine was closed"))
        if not self._closed:
            self._closed = True
            self._server.close()
        self.link.close()

    # What tickets ask.

    def abort(self, ticket: SglangTicket) -> None:
        with self._lock:
            waiting = ticket in self._backlog
            if isinstance(ticket, SglangPrefill) and waiting:
                self._backlog.remove(ticket)
        if waiting:
            ticket.end()
        elif self._failure is None:
            self._server.abort(ticket)

    def join(self, ticket: SglangTicket) -> None:
        assert isinstance(ticket, SglangSample)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._live[ticket.room] = ticket
        if failure is not None:
            ticket.fail(failure)
            ticket.end()
            return
        self._start(ticket, ticket.end_at.limit)

    def moved(self) -> None:
        """Start prompts while unread pages leave room under the quota; the first always, however long."""
        with self._lock:
            self._sweep()
            while self._backlog and self._failure is None and self._may_start(self._backlog[0]):
                ticket = self._backlog.popleft()
                self._start(ticket, 1)

    # Under the lock.

    def _may_start(self, ticket: SglangPrefill) -> bool:
        waiting = set(self._backlog)
        held = sum(one.kept_pages for one in self._live.values() if one not in waiting)
        return not held or held + ticket.pages <= self._settings.held_pages

    def _sweep(self) -> None:
        """Count and let go of what SGLang has let go of."""
        for room, ticket in list(self._live.items()):
            if not ticket.over:
                continue
            del self._live[room]
            if isinstance(ticket, SglangPrefill):
                self._prompt_tokens_computed += ticket.computed_tokens
                self._tokens_sampled += len(ticket.first_tokens)
            elif isinstance(ticket, SglangSample):
                self._tokens_sampled += ticket.tokens_sampled

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The link's thread.

    def _route(self, message: Message) -> None:
        ticket = self._live.get(message.room)
        if ticket is not None:
            ticket.on_message(message)

    def _lost(self) -> None:
        self._die(EngineError("SGLang's scheduler process has ended"))

    def _die(self, error: CrossfillError) -> None:
        with self._lock:
            self._failure = self._failure or error
            left = list(self._live.values())
            self._backlog.clear()
        for ticket in left:
            ticket.fail(error)
            ticket.end()

    def _require_role(self, role: str) -> None:
        if self._role != role:
            raise EngineError(f"this SGLang was started for {self._role}, not for {role}")

    def _require_room(self, prompt_tokens: int, limit: int, samples: int) -> None:
        """SGLang admits a request only if what it may generate (as far as it looks ahead) fits behind the prompt.

        Further samples share the whole pages of the prompt.
        """
        if samples > self._settings.max_running:
            setting = f"max_running is {self._settings.max_running}: raise it"
            raise EngineError(f"n = {samples} samples need as many places and {setting}")
        answer = min(limit, _LOOK_AHEAD_TOKENS)
        needed = prompt_tokens + answer
        if samples > 1:
            needed += _GRACE_TOKENS + (samples - 1) * (prompt_tokens % PAGE_TOKENS + answer)
        if needed > self._pages * PAGE_TOKENS:
            raise EngineError(
                f"{prompt_tokens} prompt tokens and max_tokens = {limit} with n = {samples} need {needed} tokens of KV "
                f"and kv_cache_bytes allows {self._pages * PAGE_TOKENS}: raise it, or ask for fewer tokens"
            )

    def _require_pool(self) -> None:
        """SGLang takes a smaller pool than it was asked for without a word. Raises ConfigError."""
        free, page_bytes = self.link.measure()[0], self._contract.page_shape.page_bytes
        if free + 1 < self._pages:  # it may keep a page for itself
            self._server.close()
            raise ConfigError(
                f"out of memory: SGLang found room for {free} pages of KV, kv_cache_bytes = "
                f"{self._settings.kv_cache_bytes} is {self._pages}: set {free * page_bytes} or free memory"
            )

    def _start(self, ticket: SglangTicket, max_tokens: int) -> None:
        request = ticket.request
        told = for_prefill(request) if isinstance(ticket, SglangPrefill) else for_decode(request, max_tokens)
        self._server.start(ticket, told, self._cache_key(request))

    def _stops(self, sampling: Sampling) -> frozenset[int]:
        """What ends a text: a grammar's end too, whatever was asked for. Raises InvalidParameterError."""
        grammar = sampling.grammar
        ends = () if grammar is None else self._compiler.matcher(grammar).eos_token_ids
        return frozenset((*sampling.stop_token_ids, *ends))

    def _cache_key(self, request: Request) -> str:
        return f"{self._generation}/{request.salt}"

    def _arguments(self) -> dict[str, Any]:
        return {
            "chunked_prefill_size": self._settings.chunk_tokens,
            "max_running_requests": self._settings.max_running,
            "max_total_tokens": self._pages * PAGE_TOKENS,
            "context_length": self._contract.context_length + _MARGIN_TOKENS,
            "random_seed": secrets.randbits(31),
        }
