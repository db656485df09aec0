"""Table: which blocks each scheduled request has, kept from what vLLM's scheduler says in every step.

vLLM hands a connector only the change: all blocks of a request that is new, or resumed after a preemption, and the
appended ones of the others. Versions differ in where a resumed request is listed (`scheduled_new_reqs` or
`resumed_req_ids`), not in what is meant. One KV cache group, as for every model served here.
"""

from __future__ import annotations

from typing import Any


class BlockTable:
    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}

    def update(self, scheduler_output: Any) -> None:
        """Apply one step of the scheduler. Lists handed out before stay as they were."""
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for engine_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            added = list(blocks[0]) if blocks else []
            kept = [] if engine_id in cached.resumed_req_ids else self._blocks[engine_id]
            self._blocks[engine_id] = kept + added

    def blocks(self, engine_id: str) -> list[int]:
        """Block ids in token order. Raises KeyError for a request that was never scheduled."""
        return self._blocks[engine_id]

    def drop(self, engine_id: str) -> None:
        self._blocks.pop(engine_id, None)
