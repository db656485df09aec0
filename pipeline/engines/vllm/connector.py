"""Connector: vLLM's hooks (`KVConnectorBase_V1`) over an `Exchange`. Marks and bookkeeping only, no copies.

vLLM makes two of these, one beside its scheduler and one beside its worker; here both live on the engine's thread, so
a step's metadata may hold tickets. Order within a step: the scheduler hooks, `handle_preemptions`, the forward,
`wait_for_save`, `get_finished`. An exception in a hook would end the engine, so the hooks touch nothing that a
request could make wrong: pages are checked and copied on the threads of jobs. On CUDA a hook runs ahead of the device,
so each announcement carries a fence: the point in the device's work after which it is true.

Two orders matter. Admissions are announced only in `handle_preemptions`, after withdrawn pages have been waited for:
their blocks may be the ones that a preemption took, and a job writes into them at once. And pages hit in P's own prefix
cache are marked before the forward only if no request computes them in this very step: vLLM hashes a block when it
schedules it, so a hit may be on a block that is still empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.model_executor.models.utils import extract_layer_index

from pipeline.contract import decode as decode_contract
from pipeline.engines.vllm.blocks import BlockPages
from pipeline.engines.vllm.copier import Copier
from pipeline.engines.vllm.exchange import Exchange, VllmTicket, find
from pipeline.engines.vllm.export import Export
from pipeline.engines.vllm.intake import Intake
from pipeline.engines.vllm.table import BlockTable
from pipeline.page import PAGE_TOKENS, page_count


class Computing(NamedTuple):
    """An export in this step: `early` pages are complete already, after the forward those of `tokens` tokens are."""

    export: Export
    blocks: list[int]
    early: int
    tokens: int


class Admitting(NamedTuple):
    """An intake that got blocks in this step; no `blocks` when nothing is to be imported."""

    intake: Intake
    held: int
    blocks: list[int]


class Scheduled(NamedTuple):
    """One request of a step: tokens [before, after) run through the model."""

    ticket: VllmTicket
    before: int
    after: int
    blocks: list[int]

    @property
    def written(self) -> list[int]:
        return self.blocks[self.before // PAGE_TOKENS : page_count(self.after)]


class Located(NamedTuple):
    """The blocks of an intake's whole prompt, computed in an earlier step."""

    intake: Intake
    blocks: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    preempted: list[Export | Intake] = field(default_factory=list)
    located: list[Located] = field(default_factory=list)
    computing: list[Computing] = field(default_factory=list)
    admitting: list[Admitting] = field(default_factory=list)


class PageConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._exchange: Exchange = find(extra["exchange"])
        self._shape = decode_contract(extra["contract"]).page_shape
        self._admitting: list[Admitting] = []
        self._table = BlockTable()

    # --- scheduler side

    def on_new_request(self, request: Any) -> None:
        ticket = self._exchange.by_key[request.kv_transfer_params["ticket"]]
        self._exchange.by_engine_id[request.request_id] = ticket

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last prompt token come from outside. Once admitted (a preemption) vLLM recomputes by itself."""
        ticket = self._exchange.by_engine_id[request.request_id]
        if not isinstance(ticket, Intake) or ticket.local or ticket.admitted:
            return 0, False
        missing = ticket.request.transfer_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called a second time, with 0, when a loaded request is scheduled: nothing to do then."""
        ticket = self._exchange.by_engine_id[request.request_id]
        if not isinstance(ticket, Intake) or num_external_tokens == 0:
            return
        ticket.loading = request.request_id
        held = (ticket.request.transfer_tokens - num_external_tokens) // PAGE_TOKENS
        self._admitting.append(Admitting(ticket, held, blocks.get_block_ids()[0][: ticket.pages]))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        tickets = self._exchange.by_engine_id
        meta = StepMetadata(admitting=self._admitting)
        self._admitting = []
        for engine_id in scheduler_output.preempted_req_ids or ():
            if isinstance(ticket := tickets.get(engine_id), Export | Intake):
                meta.preempted.append(ticket)
        self._table.update(scheduler_output)
        scheduled = list(_scheduled(scheduler_output, tickets, self._table))
        written = {block for one in scheduled for block in one.written}
        for one in scheduled:
            self._note(one, written, meta)
        self._exchange.progress = bool(scheduled or meta.admitting or meta.preempted)
        return meta

    def _note(self, one: Scheduled, written: set[int], meta: StepMetadata) -> None:
        prompt = len(one.ticket.request.token_ids)
        self._exchange.prompt_tokens_computed += min(one.after, prompt) - min(one.before, prompt)
        if isinstance(one.ticket, Export):
            early = _leading(one.blocks[: one.before // PAGE_TOKENS], written)
            meta.computing.append(Computing(one.ticket, one.blocks, early, one.after))
        elif isinstance(one.ticket, Intake) and not one.ticket.admitted and one.ticket.loading is None:
            # Local, or held whole: it runs without anything from outside.
            transfer = one.ticket.request.transfer_tokens
            held = one.ticket.pages if one.before >= transfer else one.before // PAGE_TOKENS
            meta.admitting.append(Admitting(one.ticket, held, []))
        elif isinstance(one.ticket, Intake) and one.ticket.keeping and one.before > one.ticket.request.transfer_tokens:
            meta.located.append(Located(one.ticket, one.blocks))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """True keeps the blocks until `get_finished` names the request."""
        ticket = self._exchange.by_engine_id.pop(request.request_id)
        self._table.drop(request.request_id)
        if isinstance(ticket, Export) and not ticket.released:
            self._exchange.held[request.request_id] = ticket
            return True, None
        if isinstance(ticket, Intake) and ticket.loading is not None:
            self._exchange.receive(ticket.loading)  # aborted while loading: vLLM frees once the load has ended
            return False, None
        if isinstance(ticket, Intake) and not ticket.released:
            ticket.locate(block_ids, self._exchange.copier.fence())
            self._exchange.held[request.request_id] = ticket
            return True, None
        return False, None

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = sorted(kv_caches, key=extract_layer_index)
        self._exchange.copier = Copier(BlockPages([kv_caches[name] for name in names], self._shape))

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        for ticket in kv_connector_metadata.preempted:
            ticket.withdraw()
        fence = self._exchange.copier.fence()
        for intake, blocks in kv_connector_metadata.located:
            intake.locate(blocks, fence)
        for export, blocks, early, _ in kv_connector_metadata.computing:
            export.publish(early, blocks, fence)
        for intake, held, blocks in kv_connector_metadata.admitting:
            intake.admit(held, blocks, fence)

    def wait_for_save(self) -> None:
        """The forward of this step is queued here; on a CPU it is over."""
        if not self.has_connector_metadata():
            return
        fence = self._exchange.copier.fence()
        for export, blocks, _, tokens in self._get_connector_metadata().computing:
            transfer = export.request.transfer_tokens
            ready = export.pages if tokens >= transfer else tokens // PAGE_TOKENS
            export.publish(ready, blocks, fence, done=tokens >= len(export.request.token_ids))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent = self._exchange.take_sent()
        received = self._exchange.take_received()
        for engine_id in received:
            if isinstance(ticket := self._exchange.by_engine_id.get(engine_id), Intake):
                ticket.loading = None  # reported: naming it twice would end the engine
        self._exchange.progress = self._exchange.progress or bool(sent or received)
        return sent or None, received or None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: jobs write pages whenever they arrive."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no load is synchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are read out of the blocks, when somebody wants them."""


def _scheduled(scheduler_output: Any, tickets: dict[str, VllmTicket], table: BlockTable) -> Iterator[Scheduled]:
    cached = scheduler_output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    for engine_id, tokens in scheduler_output.num_scheduled_tokens.items():
        yield Scheduled(tickets[engine_id], before[engine_id], before[engine_id] + tokens, table.blocks(engine_id))


def _leading(blocks: list[int], written: set[int]) -> int:
    """How many leading blocks nobody writes in this step."""
    return next((i for i, block in enumerate(blocks) if block in written), len(blocks))
