"""Transfer: SGLang's disaggregation interface (`BaseKVManager`, `BaseKVSender`, `BaseKVReceiver`) over a Station.

Called on the scheduler's thread, except what `station.Transfer` names. SGLang frees the blocks of a transfer right
after it was aborted or has succeeded, so `abort` waits for a copy that runs, and none begins afterwards.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)

from pipeline.engines.sglang import order
from pipeline.engines.sglang.message import ADDRESS, Kind, Message
from pipeline.engines.sglang.order import First
from pipeline.engines.sglang.plugin.pool import Buffer, Pool
from pipeline.engines.sglang.plugin.station import Station
from pipeline.page import PAGE_TOKENS

_TOKEN, _COUNTS, _ROOM = 0, 1, -1  # SGLang's host buffers of a request: first token, token counts, and the commit gate


class Manager(BaseKVManager):
    """One per scheduler. Its public attributes beside ours are those that SGLang reads."""

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, *_: Any, **__: Any) -> None:
        self.kv_args = args
        self.prefill_info_table: dict[str, Any] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self._scheduler: Any = None
        self.station = Station(os.environ[ADDRESS], self._measure)
        buffers = [Buffer(*one) for one in zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)]
        gpu = args.gpu_id if str(server_args.device).startswith("cuda") else None
        self.pool = Pool(buffers, self.station.shape, gpu)
        self.pool.pin(self.station.ring.memory)
        self._aux = [
            _bytes(*one) for one in zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
        ]

    def attend(self, scheduler: Any) -> None:
        """From now on there are gauges, so from now on the worker may ask. Raises ValueError for an unknown layout."""
        self._scheduler = scheduler
        layout = getattr(scheduler.token_to_kv_pool_allocator.get_kvcache(), "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise ValueError(f"SGLang lays its KV pool out as {layout}: choose an attention backend with nhd")
        self.station.start()

    def register_to_bootstrap(self) -> None:
        """Nothing: the worker brings P and D together."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        self.prefill_info_table[bootstrap_addr] = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
        return True

    def breathe(self) -> None:
        self.station.breathe(idle=self._scheduler is None or self._scheduler.last_batch is None)

    def first_token(self, index: int) -> int:
        return int(self._aux[_TOKEN][index].view(np.int32)[0])

    def commit(self, index: int, room: int, token: int) -> None:
        """Hand P's token to D. The room is written last: SGLang takes it for "everything is there"."""
        self._aux[_TOKEN][index].view(np.int32)[0] = token
        self._aux[_COUNTS][index] = 0
        self._aux[_ROOM][index].view(np.uint64)[0] = room

    def held_slots(self, receiver: object, tokens: int) -> Any:
        """Where the leading `tokens` of the prompt lie that D found in its cache: the first slot of each page, on the
        pool's device. None for no tokens. Called while SGLang admits the request."""
        if not tokens:
            return None
        queue = self._scheduler.disagg_decode_prealloc_queue.queue
        request = next(one.req for one in queue if one.kv_receiver is receiver)
        owner = request if hasattr(request, "req_pool_idx") else request.kv  # 0.5.17 has it on the request
        return self._scheduler.req_to_token_pool.req_to_token[owner.req_pool_idx, :tokens:PAGE_TOKENS].clone()

    def _measure(self) -> tuple[int, int]:
        free = int(self._scheduler.token_to_kv_pool_allocator.available_size())
        cached = int(self._scheduler.tree_cache.evictable_size())
        return (free + cached) // PAGE_TOKENS, cached // PAGE_TOKENS


class EndedError(RuntimeError):
    """SGLang logs a failed transfer as an error unless it is another's fault: our cancels are no errors."""

    is_from_another_rank = True


class _Transfer:
    """What both directions share: blocks, and an end that waits for the copy that runs."""

    def __init__(self, mgr: Manager, room: int) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = room
        self.conclude_state: int | None = None
        self._changed = threading.Condition()
        self._copying = False
        self._first = 0  # page of the prompt that the first of `_blocks` holds
        self._blocks: list[int] = []
        self._after: Any = None  # the pool's fence: what happened to `_blocks` before is over once it has passed
        mgr.station.add(room, self)

    def read(self, page: int, pages: NDArray[np.float16]) -> bool:
        return self._copy(self._find(page, len(pages)), pages, self.kv_mgr.pool.read)

    def write(self, page: int, pages: NDArray[np.float16]) -> bool:
        return self._copy(self._find(page, len(pages)), pages, self.kv_mgr.pool.write)

    def _find(self, page: int, count: int) -> list[int]:
        """Blocks of as many pages, or fewer."""
        at = page - self._first
        with self._changed:
            return self._blocks[at : at + count] if at >= 0 else []

    def _copy(self, blocks: list[int], pages: NDArray[np.float16], move: Callable[..., None]) -> bool:
        with self._changed:
            if self.conclude_state is not None or len(blocks) < len(pages):
                return False
            self._copying = True
        try:
            move(blocks, pages, self._after)
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        return True

    def obey(self, message: Message) -> None:
        raise NotImplementedError

    def draw(self, first: First) -> None:
        raise NotImplementedError

    def lose(self) -> None:
        self.abort()

    def abort(self) -> None:
        with self._changed:
            if self.conclude_state is None:
                self.conclude_state = KVPoll.Failed
            self._changed.wait_for(lambda: not self._copying)
        self.kv_mgr.station.remove(self.bootstrap_room)

    def clear(self) -> None:
        self.kv_mgr.station.remove(self.bootstrap_room)

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()

    def failure_exception(self) -> None:
        raise EndedError("the worker ended this transfer")


class Sender(_Transfer, BaseKVSender):
    """P: says after each chunk how many pages are there; concludes when the worker releases them."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, *_: Any, **__: Any) -> None:
        super().__init__(mgr, bootstrap_room)
        self._total = 0
        self._index = -1
        self._drawn: First | None = None  # in place of the token that SGLang draws

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._total = num_kv_indices
        self._index = -1 if aux_index is None else int(aux_index)

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk  # else a prompt whose last chunk fills no page would never conclude

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **_: Any) -> None:
        with self._changed:
            self._blocks.extend(int(block) for block in kv_indices)
            self._after = self.kv_mgr.pool.fence()
            ready = len(self._blocks)
        if ready == self._total:  # told first: when the last page is ready, all is done
            token = self.kv_mgr.first_token(self._index)
            data = b"" if self._drawn is None else order.pack(self._drawn)
            self.kv_mgr.station.say(Message(Kind.FIRST, self.bootstrap_room, value=token, data=data))
        self.kv_mgr.station.say(Message(Kind.READY, self.bootstrap_room, ready))

    def draw(self, first: First) -> None:
        self._drawn = first

    def poll(self) -> int:
        if self.conclude_state is None:
            self.kv_mgr.breathe()
        return KVPoll.WaitingForInput if self.conclude_state is None else self.conclude_state

    def write(self, page: int, pages: NDArray[np.float16]) -> bool:
        return False  # what is here was computed here

    def obey(self, message: Message) -> None:
        with self._changed:
            if message.kind is Kind.RELEASE and self.conclude_state is None:
                self.conclude_state = KVPoll.Success


class Receiver(_Transfer, BaseKVReceiver):
    """D: tells which pages it holds; concludes when the worker commits."""

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None, *_: Any, **__: Any
    ) -> None:
        super().__init__(mgr, bootstrap_room or 0)
        self.require_staging = False
        self.abort_notified = False
        self._index = -1
        self._held: Any = None  # the first slot of each page that was there before
        self._state = KVPoll.Bootstrapping

    def init(self, prefill_dp_rank: int) -> None:
        self._state = KVPoll.WaitingForInput

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        held = self.kv_mgr.held_slots(self, decode_prefix_len or 0)
        with self._changed:
            self._held = held
            self._first = (decode_prefix_len or 0) // PAGE_TOKENS
            self._blocks = [int(block) for block in kv_indices]
            self._after = self.kv_mgr.pool.fence()
            self._index = -1 if aux_index is None else int(aux_index)
            self._state = KVPoll.Transferring
        self.kv_mgr.station.say(Message(Kind.ADMITTED, self.bootstrap_room, self._first))

    def poll(self) -> int:
        if self.conclude_state is None:
            self.kv_mgr.breathe()
        return self._state if self.conclude_state is None else self.conclude_state

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        self.abort()

    def read(self, page: int, pages: NDArray[np.float16]) -> bool:
        """Those that were held, too: a capture wants all."""
        held = [] if self._held is None else [slot // PAGE_TOKENS for slot in self._held.tolist()]
        with self._changed:
            blocks = [*held, *self._blocks][page : page + len(pages)]
        return self._copy(blocks, pages, self.kv_mgr.pool.read)

    def obey(self, message: Message) -> None:
        with self._changed:
            if message.kind is Kind.COMMIT and self.conclude_state is None and self._index >= 0:
                self.kv_mgr.commit(self._index, self.bootstrap_room, message.value)
                self.conclude_state = KVPoll.Success


class NoBootstrap(BaseKVBootstrapServer):
    """SGLang's P starts one of these for D to find it; ours meet through their workers."""

    def __init__(self, host: str, port: int, *_: Any, **__: Any) -> None:
        pass


def _bytes(address: int, size_bytes: int, item_bytes: int) -> Any:
    """`(requests, item_bytes)` over one of SGLang's host buffers."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * size_bytes).from_address(address)).reshape(-1, item_bytes)
