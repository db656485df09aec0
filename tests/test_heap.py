"""What a process starts with is not looked through again and again."""

from __future__ import annotations

import gc

from pipeline import heap


def test_what_exists_is_not_collected_again() -> None:
    heap.settle()
    try:
        assert gc.get_freeze_count() > 10_000  # our modules alone
    finally:
        gc.unfreeze()
