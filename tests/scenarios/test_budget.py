"""The budget bounds bytes in flight, never the length of a prompt; the SERVER's memory shows it."""

from __future__ import annotations

import threading

import pytest

from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def _peak(system: System, done: threading.Event) -> list[int]:
    seen = [int(system.broker.info("memory")["used_memory"])]
    while not done.wait(0.01):
        seen.append(int(system.broker.info("memory")["used_memory"]))
    return seen


@pytest.mark.real_model
@pytest.mark.parametrize("route", ["vllm->mlx", "mlx->vllm"])
def test_server_memory_stays_within_budget_and_margin(real: System, route: str) -> None:
    """2844 tokens are 66 MB of pages; the budget is 8 MiB."""
    budget = real.fleet.settings.broker.budget_bytes
    real.settled()
    done, seen = threading.Event(), []
    watch = threading.Thread(target=lambda: seen.extend(_peak(real, done)))
    watch.start()
    try:
        answer = real.complete([(13 * i) % 40000 + 500 for i in range(2844)], route, max_tokens=2)
    finally:
        done.set()
        watch.join()
    assert answer.trace["bytes"] == 45 * 1474560 > 8 * budget - budget
    page = 1474560
    assert max(seen) - seen[0] <= budget + 2 * page  # the server's own buffers hold a page on its way in or out
    assert max(seen) - seen[0] > page  # the watch saw pages at all


def test_a_prompt_many_times_the_budget_streams_through(cheap: System) -> None:
    prompt = [(17 * i) % 900 + 20 for i in range(1900)]
    answer = cheap.complete(prompt, "reference->reference", max_tokens=2)
    assert answer.trace["bytes"] > 2 * cheap.fleet.settings.broker.budget_bytes
    cheap.settled()
