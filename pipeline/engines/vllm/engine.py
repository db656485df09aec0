"""VllmEngine: both roles of `engines/base.py` on vLLM's in-process `LLMEngine` (CUDA: 0.26 on, CPU: 0.32).

The engine's thread (`loop`) steps vLLM; `connector` marks pages from inside a step; `Export` and `Intake` are what jobs
hold. vLLM keeps process-wide state, so there is one engine per process.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

from pipeline.checkpoint import eos_token_ids, read_contract
from pipeline.contract import Contract
from pipeline.contract import encode as encode_contract
from pipeline.engines.arguments import checked
from pipeline.engines.base import Capabilities, Check, EngineStats
from pipeline.engines.feature import SUPPORTED
from pipeline.engines.room import shortage
from pipeline.engines.text import Text, texts
from pipeline.engines.ticket import admitted, require_fit
from pipeline.engines.vllm import linear
from pipeline.engines.vllm.blocks import verify_layout
from pipeline.engines.vllm.exchange import Exchange, VllmTicket, register, unregister
from pipeline.engines.vllm.export import Export
from pipeline.engines.vllm.intake import Intake
from pipeline.engines.vllm.loop import EngineLoop
from pipeline.errors import ConfigError, CrossfillError, EngineError
from pipeline.grammar import Compiler
from pipeline.page import PAGE_TOKENS
from pipeline.request import Request
from pipeline.settings import EngineSettings

# vLLM reads these when the engine is built. An operator's own values win.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers on one host would all be pinned to its first cores
    "HF_HUB_OFFLINE": "1",
}
# The pool's size is explicit; all that is left of this number is a check at start that so much of the GPU is free.
_START_SHARE = 0.1


class VllmEngine:
    """Loads the checkpoint directory; blocks until vLLM is ready (10 to 60 s).

    Raises ConfigError: neither a CUDA nor a CPU build of vLLM, an unknown block layout, a second engine
    in this process, a model that vLLM cannot load, a pool too small for one page.
    """

    name = "vllm"

    def __init__(self, checkpoint: Path, settings: EngineSettings) -> None:
        self._contract = read_contract(checkpoint, context_length=settings.context_length)
        self._settings = settings
        self._blocks = settings.kv_cache_bytes // self._contract.page_shape.page_bytes
        if self._blocks < 1:
            page_bytes = self._contract.page_shape.page_bytes
            raise ConfigError(f"kv_cache_bytes = {settings.kv_cache_bytes} holds no page: set {page_bytes} or more")
        self._limit = min(self._contract.context_length, self._blocks * PAGE_TOKENS)
        self._keys = itertools.count(1)
        self._compiler = Compiler(checkpoint, self._contract.vocab_size, eos_token_ids(checkpoint))
        self._exchange = Exchange()
        register(self._exchange)
        try:
            self._loop = EngineLoop(lambda: self._build(checkpoint), self._exchange, held_pages=settings.held_pages)
        except BaseException:
            unregister(self._exchange)
            raise

    @property
    def contract(self) -> Contract:
        return self._contract

    @property
    def capabilities(self) -> Capabilities:
        room = self._blocks * PAGE_TOKENS
        return Capabilities(max_running=self._settings.max_running, kv_tokens=room, features=SUPPORTED[self.name])

    @property
    def failure(self) -> CrossfillError | None:
        """What ended the engine, if it has ended: a worker whose engine is dead must give up its lease."""
        return self._exchange.ended

    def prefill(self, request: Request) -> Export:
        """Raises EngineError at once for a prompt that can never fit, or when the engine is dead."""
        require_fit(request, self._limit, self._contract)
        first = self._texts(request, 1) if request.first_token else []
        export = Export(self._key("p", request), request, self._exchange, first)
        self._loop.submit(export)
        return export

    def admit(
        self, request: Request, *, local: bool = False, timeout_s: float = 60.0, check: Check = lambda: None
    ) -> Intake:
        """Raises DeadlineError when vLLM found no room in time, EngineError for a prompt that can never fit."""
        require_fit(request, self._limit, self._contract)
        limit = min(request.sampling.max_tokens, self._contract.context_length - len(request.token_ids))
        samples = self._texts(request, limit)
        if len(samples) > self._settings.max_running:
            setting = f"max_running is {self._settings.max_running}: raise it"
            raise EngineError(f"n = {len(samples)} samples need as many places and {setting}")
        intake = Intake(self._key("d", request), request, self._exchange, samples, local=local)
        self._loop.submit(intake)
        return admitted(intake, timeout_s, check, "vLLM")

    def stats(self) -> EngineStats:
        """Free pages are 0 once the engine is dead."""
        tickets = self._loop.tickets
        pool = self._loop.block_pool
        return EngineStats(
            running=len(tickets),
            held_pages=sum(_held_pages(ticket) for ticket in tickets),
            cached_pages=len(pool.cached_block_hash_to_block),
            free_pages=pool.get_num_free_blocks() if self._loop.alive else 0,
            prompt_tokens_computed=self._exchange.prompt_tokens_computed,
            tokens_sampled=self._loop.tokens_sampled,
        )

    def reset_prefix_cache(self) -> None:
        self._loop.reset_prefix_cache()

    def close(self) -> None:
        self._loop.close()
        unregister(self._exchange)

    def _key(self, role: str, request: Request) -> str:
        return f"{role}{next(self._keys)}-{request.handoff_id}"

    def _texts(self, request: Request, limit: int) -> list[Text]:
        return texts(request, self._contract.vocab_size, self._compiler, lambda: secrets.randbits(64), limit)

    def _build(self, checkpoint: Path) -> Any:
        """The LLMEngine, on the engine's thread.

        Deprecation warnings of what vLLM imports are silenced: nobody here can act on them.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a step must happen in this process, the connector with it
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.platforms import current_platform
            from vllm.v1.engine.llm_engine import LLMEngine

            device = current_platform.device_type
            if device not in ("cpu", "cuda"):
                raise ConfigError(f"vLLM runs on {device!r} here: its KV layout is known for CPU and CUDA only")
            current_platform.import_kernels()
            verify_layout(self._contract.page_shape, device)
            arguments = self._engine_args(checkpoint, device)
            try:
                engine = LLMEngine.from_engine_args(arguments)
            except Exception as error:
                short = device == "cuda" and shortage(checkpoint, self._settings.kv_cache_bytes, _free_bytes())
                raise ConfigError(f"vLLM could not load the model: {short or error}") from error
            if device == "cpu" and linear.wanted(self._settings.compute_dtype):
                linear.widen(engine.model_executor.driver_worker.worker.model_runner.model)
            return engine

    def _engine_args(self, checkpoint: Path, device: str) -> Any:
        from vllm import EngineArgs
        from vllm.config import KVTransferConfig

        settings, blocks = self._settings, self._blocks + 1  # vLLM keeps one block back as its null block
        ours = {
            "model": str(checkpoint),
            "dtype": "float16",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "seed": secrets.randbits(31),  # unseeded requests must not repeat after a restart
            "block_size": PAGE_TOKENS,
            "max_model_len": self._limit,
            "max_num_seqs": settings.max_running,
            "max_num_batched_tokens": max(settings.chunk_tokens, settings.max_running),
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": blocks * self._contract.page_shape.page_bytes,
            "gpu_memory_utilization": _START_SHARE,
            "disable_hybrid_kv_cache_manager": True,
            "async_scheduling": False,
            "disable_log_stats": True,
            "logits_processors": ["pipeline.engines.vllm.sampling:Draws"],
            "kv_transfer_config": KVTransferConfig(
                kv_connector="PageConnector",
                kv_connector_module_path="pipeline.engines.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="fail",
                kv_connector_extra_config={"exchange": self._exchange.id, "contract": encode_contract(self._contract)},
            ),
        }
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        more = dict(checked("vLLM", settings.arguments, known, ours))
        return EngineArgs(**ours | graphs(device, settings.role) | more)


def graphs(device: str, role: str) -> dict[str, Any]:
    """Fields of EngineArgs: on a GPU a step in which every request decodes is replayed as one CUDA graph.

    Without a compiler (mode 0): a start takes seconds longer, not minutes, and the kernels are those of the eager mode.
    A worker that only prefills has no such step. Our connector works between steps and needs nothing from within one.
    """
    if device != "cuda" or role == "prefill":
        return {"enforce_eager": True}
    return {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def _free_bytes() -> int:
    """Of the GPU, with what this process has taken of it so far."""
    import torch

    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())


def _held_pages(ticket: VllmTicket) -> int:
    return ticket.held_pages if isinstance(ticket, Export) else ticket.pages if isinstance(ticket, Intake) else 0
