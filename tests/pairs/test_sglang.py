"""SGLang in both roles on the real model, with every other kind of engine on the other side.

Both of its workers are real processes, so this is also the test of how `crossfill worker` runs them. As D it gets one
token more than the others, and a first token: nothing of the prompt is computed there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.ports import free_port
from tests.scenarios import oracle
from tests.scenarios.conftest import MODEL, required
from tests.scenarios.oracle import MAX_TOKENS, Expected, prompts
from tests.scenarios.system import System, eventually, system, worker
from tests.scenarios.test_disconnect import _leave_after

pytestmark = [pytest.mark.processes, pytest.mark.real_model, pytest.mark.timeout(600)]
LENGTHS = (1, 65, 193, 744)
DIRECTIONS = ["sglang->mlx", "mlx->sglang", "sglang->reference", "reference->sglang", "sglang->sglang"]
ENOUGH = 0.6  # of all tokens must have been comparable


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """SGLang as P and as D, MLX and `reference`; 8 MiB of budget, policy `fail`."""
    for engine in ("mlx", "sglang"):
        required(engine)
    engines: list[dict[str, Any]] = [
        worker("sglang-p", "sglang", MODEL, "prefill"),
        worker("sglang-d", "sglang", MODEL, "decode"),
        worker("mlx-0", "mlx", MODEL),
        worker("reference-0", "reference", MODEL),
    ]
    settings = {
        "api": {"model": MODEL, "port": free_port()},
        "broker": {"budget_bytes": 8 << 20},
        "handoff": {"failure_policy": "fail"},
        "workers": engines,
    }
    with system(settings, tmp_path_factory.mktemp("mixed")) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> dict[int, list[int]]:
    made = prompts(tokenizer)
    return {length: made[length] for length in LENGTHS}


@pytest.fixture(scope="module")
def own_texts(asked: dict[int, list[int]], tokenizer: Tokenizer) -> dict[str, dict[int, Expected]]:
    """engine -> length -> what it says without us."""
    for engine in ("mlx", "sglang"):
        required(engine)
    return oracle.own_texts(("sglang", "mlx", "reference"), MODEL, tokenizer, asked)


def decoder_of(direction: str) -> tuple[str, str]:
    """Engine and replica."""
    engine = direction.partition("->")[2]
    return engine, "sglang-d" if engine == "sglang" else f"{engine}-0"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_text_equals_the_decode_engines_own(
    own_texts: dict[str, dict[int, Expected]], mixed: System, asked: dict[int, list[int]], direction: str
) -> None:
    decoder, replica = decoder_of(direction)
    kept_home = 0 if decoder == "sglang" else 1
    mixed.settled()
    before = mixed.stats(replica)["prompt_tokens_computed"]
    compared = 0
    for length, prompt in asked.items():
        answer = mixed.complete(prompt, direction, max_tokens=MAX_TOKENS)
        compared += own_texts[decoder][length].check(answer.text)
        assert answer.trace["imported_tokens"] == length - kept_home
        assert answer.trace["pages"] == -(-(length - kept_home) // 64)
        assert answer.usage["completion_tokens"] == MAX_TOKENS
    assert compared >= ENOUGH * MAX_TOKENS * len(LENGTHS)
    mixed.settled()
    eventually(lambda: mixed.stats(replica)["prompt_tokens_computed"] - before == kept_home * len(LENGTHS))


def test_held_pages_are_not_sent(mixed: System, asked: dict[int, list[int]]) -> None:
    prompt = asked[744]
    first = mixed.complete(prompt, "mlx->sglang", cache_salt="sglang holds")
    assert (first.trace["pages"], first.trace["reused_tokens"]) == (12, 0)
    again = mixed.complete(prompt, "mlx->sglang", cache_salt="sglang holds")
    assert (again.trace["pages"], again.trace["imported_tokens"], again.trace["reused_tokens"]) == (1, 40, 704)
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 704
    assert again.text == first.text
    for pages, reused in ((2, 0), (0, 128)):  # whole pages only: the second time nothing moves but the first token
        answer = mixed.complete(prompt[:128], "mlx->sglang", cache_salt="sglang holds all")
        assert (answer.trace["pages"], answer.trace["reused_tokens"]) == (pages, reused)
        assert answer.usage["completion_tokens"] == 16
    stranger = mixed.complete(prompt, "mlx->sglang", cache_salt="another tenant")
    assert (stranger.trace["pages"], stranger.trace["reused_tokens"]) == (12, 0)


@pytest.mark.parametrize("direction", ["sglang->mlx", "mlx->sglang"])
@pytest.mark.parametrize("limit", [1, 2])
def test_max_tokens(mixed: System, asked: dict[int, list[int]], direction: str, limit: int) -> None:
    answer = mixed.complete(asked[65], direction, max_tokens=limit)
    assert (answer.usage["completion_tokens"], answer.finish) == (limit, "length")


@pytest.mark.parametrize("direction", ["sglang->mlx", "mlx->sglang", "sglang->sglang"])
def test_sampled_text_repeats_with_its_seed(mixed: System, asked: dict[int, list[int]], direction: str) -> None:
    texts = [mixed.complete(asked[65], direction, temperature=1.0, seed=seed).text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def free_pages(mixed: System) -> dict[str, int]:
    """Of both SGLangs, once nothing is in flight; what is cached counts as free."""
    replicas = mixed.settled()["replicas"]
    return {one["name"]: one["stats"]["free_pages"] for one in replicas if one["engine"] == "sglang"}


@pytest.mark.parametrize("direction", ["sglang->mlx", "mlx->sglang"])
@pytest.mark.parametrize("delay_s", [0.05, 0.5, 2.0])
def test_a_client_that_leaves(mixed: System, asked: dict[int, list[int]], direction: str, delay_s: float) -> None:
    """At any moment: in prefill, in transfer, while decoding. Nothing stays behind, and the next request is right."""
    free = free_pages(mixed)
    _leave_after(mixed, direction, asked[744] * 2, delay_s, stream=True, tokens=400)
    assert free_pages(mixed) == free
    assert mixed.complete(asked[65], direction).usage["completion_tokens"] == 16


def test_a_scheduler_that_dies_takes_its_worker_out(mixed: System, asked: dict[int, list[int]]) -> None:
    """Last in this module: the replica is gone afterwards. Its handoffs fail at once, and nobody is sent to it."""
    child = next(each for each in mixed.fleet.children if each.name == "sglang-d")
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(mixed.post(asked[744], "mlx->sglang", max_tokens=1000)), daemon=True
    )
    asking.start()
    eventually(lambda: bool(mixed.status()["live"]))
    os.kill(_scheduler_of(child.pid), signal.SIGKILL)
    asking.join(60)
    assert [answer.status_code for answer in answers] == [502]
    assert answers[0].json()["error"]["code"] == "engine_failed"
    eventually(lambda: child.status is not None)
    eventually(lambda: "sglang-d" not in [replica["name"] for replica in mixed.status()["replicas"]])
    assert mixed.post(asked[65], "mlx->sglang").status_code == 503
    assert mixed.complete(asked[65], "sglang->mlx").usage["completion_tokens"] == 16


def _scheduler_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in {int(one) for listed in children for one in listed.read_text().split()}:
        if b"scheduler" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("the worker has no scheduler process")
