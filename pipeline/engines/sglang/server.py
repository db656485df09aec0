"""Server: SGLang's own engine, and the one thread whose event loop follows every request in it.

SGLang starts its scheduler as a child process and installs signal handlers that kill this process when that child
dies; both are kept away: the loop runs on a thread of its own, and the one signal that children send is noted only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import warnings
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from pipeline.engines.arguments import checked
from pipeline.engines.room import shortage
from pipeline.engines.sglang.message import ADDRESS
from pipeline.engines.sglang.ticket import SglangTicket
from pipeline.errors import ConfigError, EngineError
from pipeline.page import PAGE_TOKENS

_log = logging.getLogger(__name__)
BACKEND = "crossfill"
_ABORT_AGAIN_S = 0.5  # an abort that SGLang's front had no request for yet is dropped: say it again
_HOST, _PORT = "127.0.0.1", 8998  # of a bootstrap server that does not exist: the plug-in needs none
# SGLang reads these. An operator's own values win.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # its own limit lies a little above ours: see `engine`
}
_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
}


class Server:
    """Loads the model; blocks until SGLang is ready (30 to 140 s). For the main thread: it sets a signal handler.

    `arguments` are `ServerArgs` fields beside those that follow from the device, `more` those of an operator.
    `kv_cache_bytes` is what the pool will take. Raises ConfigError.
    """

    def __init__(
        self,
        checkpoint: Path,
        role: str,
        address: str,
        arguments: dict[str, Any],
        more: Mapping[str, Any],
        kv_cache_bytes: int,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-loop", daemon=True)
        os.environ[ADDRESS] = address
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            self._engine = _build(checkpoint, role, arguments, more, kv_cache_bytes)
        finally:
            del os.environ[ADDRESS]  # the scheduler has its copy
        self._manager = self._engine.tokenizer_manager
        self._thread.start()

    # Any thread; these return at once.

    def start(self, ticket: SglangTicket, sampling: dict[str, Any], cache_key: str) -> None:
        self._post(self._follow(ticket, sampling, cache_key))

    def abort(self, ticket: SglangTicket) -> None:
        """Have SGLang drop it, repeated until its stream has ended."""
        self._post(self._abort(ticket))

    def flush(self) -> bool:
        """Forget cached prefixes. False: something runs, or has just ended, and SGLang refuses. Waits for its word."""
        return bool(asyncio.run_coroutine_threadsafe(self._manager.flush_cache(), self._loop).result().success)

    def close(self) -> None:
        """Kill SGLang's processes, which is how it ends, and the loop."""
        contexts = self._contexts()
        self._engine.shutdown()
        self._post(self._stop())
        self._thread.join()
        self._loop.close()
        for context in contexts:
            context.destroy(linger=0)

    def _contexts(self) -> list[Any]:
        """ZeroMQ contexts, which SGLang leaves open."""
        sockets = [getattr(self._manager, name, None) for name in ("recv_from_detokenizer", "send_to_scheduler")]
        sockets.append(getattr(self._engine, "send_to_rpc", None))
        return [one.context for one in sockets if one is not None]

    def _post(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    # The loop's thread.

    async def _follow(self, ticket: SglangTicket, sampling: dict[str, Any], cache_key: str) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        try:
            if not ticket.closed:
                asked = GenerateReqInput(
                    rid=ticket.rid,
                    input_ids=list(ticket.request.token_ids),
                    sampling_params=sampling,
                    extra_key=cache_key,
                    stream=True,
                    bootstrap_host=_HOST,
                    bootstrap_port=_PORT,
                    bootstrap_room=ticket.room,
                )
                await _read(ticket, self._manager.generate_request(asked, None))
        except Exception as error:  # SGLang raises HTTP errors, ValueError and others: each is this request's
            if not ticket.whole:
                ticket.fail(EngineError(f"SGLang refuses or failed the request: {getattr(error, 'detail', error)}"))
        finally:
            ticket.end()

    async def _stop(self) -> None:
        """SGLang's own tasks run for ever."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    async def _abort(self, ticket: SglangTicket) -> None:
        while not ticket.ended:
            self._manager.abort_request(ticket.rid)
            await asyncio.sleep(_ABORT_AGAIN_S)


async def _read(ticket: SglangTicket, outputs: Any) -> None:
    """Pass on what is new in each output: its ids are all so far, or only the new ones, and the count tells which."""
    seen = 0
    async for output in outputs:
        meta = output["meta_info"]
        count = int(meta["completion_tokens"])
        ids = list(output["output_ids"])
        fresh = ids[len(ids) - (count - seen) :] if count > seen else []
        seen = max(seen, count)
        reason = meta["finish_reason"]
        ticket.on_output(fresh, reason and str(reason["type"]), meta)
        if reason and reason["type"] == "abort" and not ticket.whole:
            ticket.fail(EngineError(f"SGLang aborted the request: {reason.get('message')}"))


def _build(checkpoint: Path, role: str, arguments: dict[str, Any], more: Mapping[str, Any], kv_cache_bytes: int) -> Any:
    """SGLang's engine. Warnings of what it imports are silenced: nobody here can act on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        if not torch.cuda.is_available():
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else the first seeded draw wants a C++ compiler
            arguments = {**_CPU, **arguments}
        import sglang
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        _require_plugin()
        known = getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dataclass_fields__
        wanted = _common(checkpoint, role) | arguments
        wanted |= checked("SGLang", more, known, wanted)
        handlers, level = logging.root.handlers[:], logging.root.level
        try:
            return sglang.Engine(**{name: value for name, value in wanted.items() if name in known})
        except Exception as error:
            short = torch.cuda.is_available() and shortage(checkpoint, kv_cache_bytes, torch.cuda.mem_get_info()[0])
            raise ConfigError(f"SGLang could not load the model: {short or error}") from error
        finally:  # it has made the process's log its own
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)


def _common(checkpoint: Path, role: str) -> dict[str, Any]:
    """What is the same on every device. Versions differ in which of these they know."""
    return {
        "model_path": str(checkpoint),
        "skip_tokenizer_init": True,
        "dtype": "float16",
        "page_size": PAGE_TOKENS,
        "disaggregation_mode": role,
        "disaggregation_transfer_backend": BACKEND,
        "disaggregation_decode_enable_radix_cache": role == "decode",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        # Pages are read on another thread as soon as SGLang says they are sent: its forward must be over by then.
        "disable_overlap_schedule": True,
        "sampling_backend": "pytorch",  # the only one that takes seeds
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # else its scheduler spins a core while nothing is there to do
        "log_level": "error",
        "custom_sigquit_handler": _child_failed,
    }


def _require_plugin() -> None:
    """Raise ConfigError where SGLang did not find our plug-in: it looks at installed packages only."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if BACKEND not in [member.value for member in TransferBackend]:
        raise ConfigError(
            "SGLang does not see Crossfill's plug-in: install Crossfill into SGLang's environment "
            "(`make env-sglang`, or pip install --no-deps)"
        )


def _child_failed(number: int, _: Any) -> None:
    """The link sees the same end and fails every request; the worker then leaves by itself."""
    _log.error("a process of SGLang failed (%s)", signal.Signals(number).name)
