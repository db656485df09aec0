"""The block table follows what the scheduler of vLLM 0.26 and of 0.32 says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def step(
    new: dict[str, list[int]] | None = None,
    cached: dict[str, list[int] | None] | None = None,
    resumed: tuple[str, ...] = (),
) -> Any:
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in (new or {}).items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[None if ids is None else (ids,) for ids in cached.values()],
        ),
    )


def test_blocks_are_appended_as_a_request_grows() -> None:
    from pipeline.engines.vllm.table import BlockTable

    table = BlockTable()
    table.update(step(new={"a": [3, 1], "b": [7]}))
    before = table.blocks("a")
    table.update(step(cached={"a": [9], "b": None}))
    assert (table.blocks("a"), table.blocks("b"), before) == ([3, 1, 9], [7], [3, 1])


@pytest.mark.parametrize("listed", ["new", "resumed"])
def test_a_resumed_request_has_other_blocks(listed: str) -> None:
    from pipeline.engines.vllm.table import BlockTable

    table = BlockTable()
    table.update(step(new={"a": [3, 1]}))
    if listed == "new":
        table.update(step(new={"a": [5, 6, 7]}))
    else:
        table.update(step(cached={"a": [5, 6, 7]}, resumed=("a",)))
    assert table.blocks("a") == [5, 6, 7]


def test_a_dropped_request_is_unknown() -> None:
    from pipeline.engines.vllm.table import BlockTable

    table = BlockTable()
    table.update(step(new={"a": [3]}))
    table.drop("a")
    table.drop("never seen")
    with pytest.raises(KeyError):
        table.blocks("a")
