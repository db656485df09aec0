"""A seed is a plan."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from tests.chaos.nemesis import WEIGHTS, plan

WORKERS = ("p-0", "d-0")


def test_the_same_seed_is_the_same_plan_and_another_is_another() -> None:
    first, again, other = (list(islice(plan(seed, WORKERS, 1.0), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_every_fault_comes_as_often_as_its_weight_says() -> None:
    seen = Counter(fault.kind for fault in islice(plan(3, WORKERS, 1.0), 8000))
    total = sum(WEIGHTS.values())
    assert all(abs(seen[kind] / 8000 - weight / total) < 0.02 for kind, weight in WEIGHTS.items())


def test_the_api_is_killed_by_its_own_fault_only() -> None:
    faults = list(islice(plan(4, WORKERS, 1.0), 2000))
    assert {fault.target for fault in faults if fault.kind == "kill"} == set(WORKERS)
    assert {fault.target for fault in faults if fault.kind == "kill_api"} == {"api"}
