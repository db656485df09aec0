"""Requests that begin alike and come at once: what they have in common crosses the wire once."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.scenarios.system import Answer, System

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
COMMON = [(11 * i) % 900 + 20 for i in range(8 * 64)]


def test_the_common_pages_of_concurrent_requests_are_sent_once(cheap: System) -> None:
    """Eight pages in common, one more each."""
    prompts = [COMMON + [20 + tail] * 40 for tail in range(4)]
    salt = secrets.token_hex(8)

    def ask(prompt: list[int]) -> Answer:
        return cheap.complete(prompt, "reference->reference", cache_salt=salt, max_tokens=4)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert sorted(answer.trace["pages"] for answer in answers) == [1, 1, 1, 9]
    assert sorted(answer.trace["reused_tokens"] for answer in answers) == [0, 512, 512, 512]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.text == cheap.complete(prompt, "local:reference", max_tokens=4).text
    cheap.settled()
