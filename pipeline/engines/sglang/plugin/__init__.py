"""Plug-in: the half of Crossfill that runs inside SGLang's processes (entry point group `sglang.srt.plugins`).

It has no broker code, no credentials and no budget: it moves pages between SGLang's KV pool and a ring, and tells the
worker what is ready. Without a worker's address in the environment it does nothing, so that an SGLang which merely
shares our environment is left alone. Only SGLang's own registration points are used, nothing private is patched.
"""

from __future__ import annotations

import os
import pkgutil
from enum import Enum
from pathlib import Path
from typing import Any

from pipeline.engines.sglang.message import ADDRESS

NAME = "crossfill"
_SEEDS = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_QUEUED = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
_SAMPLED = "sglang.srt.model_executor.model_runner.ModelRunner.sample"


def register() -> None:
    """Called by SGLang in each of its processes, before any engine code runs."""
    if ADDRESS not in os.environ:
        return
    from sglang.srt import server_args
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from pipeline.engines.sglang.plugin.draw import Draws
    from pipeline.engines.sglang.plugin.sampling import add_seeds

    draws = Draws()

    def introduce(_: Any, scheduler: Any) -> None:
        """What draws and what moves pages get to know the scheduler that they serve."""
        require_hooked(_SEEDS, _QUEUED, _SAMPLED)
        manager = _manager(scheduler)
        arguments = scheduler.server_args
        draws.attend(manager.station, Path(arguments.model_path), prefills=arguments.disaggregation_mode == "prefill")
        manager.attend(scheduler)

    backends = {member.name: member.value for member in utils.TransferBackend} | {NAME.upper(): NAME}
    HookRegistry.register(
        "sglang.srt.disaggregation.utils.TransferBackend", Enum("TransferBackend", backends), HookType.REPLACE
    )
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _kv_class, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_disaggregation", introduce, HookType.AFTER)
    HookRegistry.register(_SEEDS, add_seeds, HookType.AFTER)
    HookRegistry.register(_QUEUED, draws.take, HookType.BEFORE)
    HookRegistry.register(_SAMPLED, draws.sample, HookType.AROUND)
    server_args.add_disagg_transfer_backend_choices([NAME])


def require_hooked(*targets: str) -> None:
    """Raise RuntimeError where SGLang has not put a hook around one of `targets`: it would only log that, and requests
    would be drawn as if nothing had been asked."""
    for target in targets:
        try:
            hooked = hasattr(pkgutil.resolve_name(target), "__wrapped__")
        except AttributeError:
            hooked = False
        if not hooked:
            raise RuntimeError(f"this SGLang has no {target} that can be hooked: Crossfill needs another version")


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Our classes for our backend, SGLang's for the others."""
    if transfer_backend.value != NAME:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base.conn import KVArgs

    from pipeline.engines.sglang.plugin import transfer

    return {
        "kvargs": KVArgs,
        "manager": transfer.Manager,
        "sender": transfer.Sender,
        "receiver": transfer.Receiver,
        "bootstrap_server": transfer.NoBootstrap,
    }[class_type.value]


def _manager(scheduler: Any) -> Any:
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    return queue.kv_manager
