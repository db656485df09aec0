"""A client that goes away, at any point, in both modes: every gauge returns to zero and the next answer is right."""

from __future__ import annotations

import os
import secrets
import signal
import time
from typing import Any

import httpx
import pytest

from pipeline.broker.keys import LIVE
from tests.faults.call import Call
from tests.scenarios.system import System, eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
LONG = [(11 * i) % 900 + 20 for i in range(1500)]
DELAYS_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def _leave_after(system: System, route: str, prompt: list[int], delay_s: float, stream: bool, tokens: int) -> None:
    body = {
        "model": system.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "cache_salt": secrets.token_hex(8),
    }
    with httpx.Client(base_url=system.url, timeout=httpx.Timeout(10, read=delay_s or 0.001)) as client:
        end = time.monotonic() + delay_s
        try:
            with client.stream("POST", "/v1/completions", json=body, headers={"X-Crossfill-Route": route}) as answer:
                for _ in answer.iter_bytes():
                    if time.monotonic() > end:
                        break
        except httpx.ReadTimeout:
            return  # leaving the block closes the connection: the client is gone


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_disconnect_at_any_time(cheap: System, delay_s: float, stream: bool) -> None:
    free = {r["name"]: r["stats"]["free_pages"] for r in cheap.settled()["replicas"]}
    right = cheap.complete(LONG[:200], "reference->reference").text
    _leave_after(cheap, "reference->reference", LONG, delay_s, stream, tokens=400)
    after = cheap.settled()
    assert {r["name"]: r["stats"]["free_pages"] for r in after["replicas"]} == free
    assert cheap.complete(LONG[:200], "reference->reference").text == right


def test_many_disconnects_beside_a_bystander(cheap: System) -> None:
    right = cheap.complete(LONG[:300], "reference->reference").text
    for index in range(12):
        _leave_after(cheap, "reference->reference", LONG, index * 0.05, bool(index % 2), tokens=200)
        if index % 4 == 0:
            assert cheap.complete(LONG[:300], "reference->reference").text == right
    cheap.settled()


@pytest.mark.real_model
@pytest.mark.parametrize("route", ["vllm->mlx", "mlx->vllm"])
@pytest.mark.parametrize("delay_s", [0.1, 0.7, 1.5, 4.0])
def test_disconnect_on_real_engines(real: System, route: str, delay_s: float) -> None:
    free = {r["name"]: _free(r["stats"]) for r in real.settled()["replicas"]}
    _leave_after(real, route, LONG[:700], delay_s, True, tokens=200)
    after = real.settled()
    assert {r["name"]: _free(r["stats"]) for r in after["replicas"]} == free
    assert "Paris" in real.complete("The capital of France is", route).text


def _free(stats: dict[str, Any]) -> int:
    return int(stats["free_pages"])


def test_cancel_of_a_queued_request_never_starts_it(cheap: System) -> None:
    """P is stopped until the client has gone: neither engine has computed a token of it."""
    done = _computed(cheap)
    body = {"model": cheap.model, "prompt": LONG, "max_tokens": 4, "temperature": 0}
    for stream in (True, False):
        os.kill(cheap.child("ref-p").pid, signal.SIGSTOP)
        try:
            call = Call(cheap.url, body | {"stream": stream}, "reference->reference")
            eventually(lambda: cheap.broker.zcard(LIVE) == 1)
            call.leave()
            assert not call.result().ended
            eventually(lambda: cheap.broker.zcard(LIVE) == 0)
        finally:
            os.kill(cheap.child("ref-p").pid, signal.SIGCONT)
        eventually(lambda: "ref-p" in {replica["name"] for replica in cheap.status()["replicas"]})
    cheap.complete(LONG[:200], "reference->reference")  # P takes what came before it first
    eventually(lambda: _computed(cheap) == {"ref-p": done["ref-p"] + 199, "ref-d": done["ref-d"] + 1})


def _computed(system: System) -> dict[str, int]:
    return {r["name"]: r["stats"]["prompt_tokens_computed"] for r in system.settled()["replicas"]}
