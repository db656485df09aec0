"""The plug-in's draws, without SGLang's scheduler: which rows it draws, what it reports, whom a fault concerns."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import logprob
from pipeline.grammar import encode
from pipeline.request import Request, Sampling
from pipeline.sample import tiny

pytest.importorskip("sglang", reason="SGLang is not in this environment")

import torch

from pipeline.engines.sglang import order
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.plugin.draw import Draws

VOCAB = 1024


class Station:
    def __init__(self) -> None:
        self.said: list[Message] = []
        self.drawn: dict[int, Any] = {}

    def say(self, message: Message) -> None:
        self.said.append(message)

    def draw(self, room: int, first: Any) -> None:
        self.drawn[room] = first


class Queued:
    """SGLang's request, as far as it is looked at."""

    def __init__(self, room: int, sampling: Sampling | None, said: tuple[int, ...]) -> None:
        asked = None if sampling is None else order.write(Request(f"h-{room}", (), sampling, first_token=True))
        self.rid = f"rid-{room}"
        self.bootstrap_room = room
        self.sampling_params = SimpleNamespace(custom_params=asked)
        self.origin_input_ids = [20, 21, 22]
        self.output_ids = list(said)


def made(checkpoint: Path, *, prefills: bool) -> tuple[Draws, Station]:
    draws, station = Draws(), Station()
    draws.attend(station, checkpoint, prefills=prefills)  # type: ignore[arg-type]
    return draws, station


def step(
    draws: Draws, requests: list[Queued], logits: np.ndarray[Any, Any], seen: list[int] | None = None
) -> list[int]:
    """One call of the model runner. What SGLang draws is each row's best token, and it ruins the logits.

    `seen`: tokens of each row that the model has read by now; None: not told.
    """
    output = SimpleNamespace(next_token_logits=torch.from_numpy(logits.copy()))

    def original(_: Any, output: Any, __: Any) -> Any:
        best = output.next_token_logits.argmax(-1)
        output.next_token_logits.fill_(9.0)
        return best

    for request in requests:
        draws.take(None, request)
    rids = [one.rid for one in requests]
    lengths = None if seen is None else torch.tensor(seen)
    return list(draws.sample(original, None, output, SimpleNamespace(rids=rids, seq_lens_cpu=lengths)).tolist())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def logits() -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).normal(0, 1, (4, VOCAB)).astype(np.float32)


def test_rows_with_an_order_are_drawn_and_the_others_left_alone(checkpoint: Path, logits: Any) -> None:
    draws, station = made(checkpoint, prefills=False)
    best = logits.argmax(-1).tolist()
    requests = [
        Queued(1, None, (5,)),
        Queued(2, Sampling(9, temperature=0.0, logit_bias=((77, 100.0),)), (5,)),
        Queued(3, Sampling(9, temperature=0.0, frequency_penalty=100.0), (best[2],)),  # P's token counts
        Queued(4, Sampling(9, temperature=0.7, logprobs=0), (5,)),  # reported, but drawn by SGLang
    ]
    without = logits[2].copy()
    without[best[2]] = -np.inf
    assert step(draws, requests, logits) == [best[0], 77, int(without.argmax()), best[3]]
    assert [(one.kind, one.room, one.value) for one in station.said] == [(Kind.LOGPROB, 4, best[3])]


def test_penalties_follow_what_was_said_since(checkpoint: Path, logits: Any) -> None:
    """SGLang's own tokens come back through its request; each counts once."""
    draws, _ = made(checkpoint, prefills=False)
    request = Queued(1, Sampling(9, temperature=0.0, presence_penalty=100.0), (5,))
    wanted = [int(token) for token in np.argsort(-logits[0]) if token != 5][:3]
    for token in wanted:
        assert step(draws, [request], logits[:1]) == [token]
        request.output_ids.append(token)


def test_logprobs_are_of_the_raw_logits_whoever_draws(checkpoint: Path, logits: Any) -> None:
    draws, station = made(checkpoint, prefills=False)
    requests = [
        Queued(1, Sampling(9, temperature=0.0, logit_bias=((77, 100.0),), logprobs=3), (5,)),
        Queued(2, Sampling(9, temperature=0.0, logprobs=1), (5,)),
    ]
    tokens = step(draws, requests, logits[:2])
    assert tokens == [77, int(logits[1].argmax())]
    for row, (message, count) in enumerate(zip(station.said, (3, 1), strict=True)):
        (found,) = logprob.unpack(message.data, [message.value], count)
        expected = logits[row] - np.log(np.exp(logits[row].astype(np.float64)).sum())
        assert found.token_id == tokens[row]
        assert found.logprob == pytest.approx(expected[tokens[row]], abs=1e-5)
        assert [token for token, _ in found.top] == np.argsort(-logits[row])[:count].tolist()
        assert [value for _, value in found.top] == pytest.approx(np.sort(expected)[::-1][:count].tolist(), abs=1e-5)


def test_p_draws_for_every_sample(checkpoint: Path, logits: Any) -> None:
    draws, station = made(checkpoint, prefills=True)
    request = Queued(1, Sampling(9, temperature=2.0, seed=4, n=8, logprobs=2), ())
    (token,) = step(draws, [request], logits[:1])
    ids = station.drawn[1].token_ids
    assert token == ids[0]
    assert len(ids) == len(station.drawn[1].logprobs) == 8
    assert len(set(ids)) > 4
    singles = []
    for seed in range(4, 12):
        single = Queued(seed, Sampling(9, temperature=2.0, seed=seed), ())
        singles += step(draws, [single], logits[:1])
    assert list(ids) == singles
    assert station.said == []


def test_p_draws_behind_the_last_chunk_only(checkpoint: Path, logits: Any) -> None:
    draws, station = made(checkpoint, prefills=True)
    requests = [Queued(room, Sampling(9, temperature=0.0, logit_bias=((77, 100.0),)), ()) for room in (1, 2)]
    best = logits.argmax(-1).tolist()
    assert step(draws, requests, logits[:2], seen=[2, 3]) == [best[0], 77]
    assert set(station.drawn) == {2}
    assert step(draws, requests[:1], logits[:1], seen=[3]) == [77]
    assert set(station.drawn) == {1, 2}


def test_a_grammar_that_is_broken_fails_its_request_alone(checkpoint: Path, logits: Any) -> None:
    draws, station = made(checkpoint, prefills=False)
    broken = Queued(1, Sampling(9, temperature=0.0, grammar=encode("regex", "[0-9]+")), (70,))
    biased = Queued(2, Sampling(9, temperature=0.0, logit_bias=((77, 100.0),)), (5,))
    best = int(logits[0].argmax())
    assert step(draws, [broken, biased], logits[:2]) == [best, 77]
    assert [(one.kind, one.room) for one in station.said] == [(Kind.FAILED, 1)]
    assert b"grammar" in station.said[0].data
    assert step(draws, [broken, biased], logits[:2]) == [best, 77]
    assert len(station.said) == 1


def test_an_order_lives_as_long_as_its_request(checkpoint: Path, logits: Any) -> None:
    draws, _ = made(checkpoint, prefills=False)
    request: Queued | None = Queued(1, Sampling(9, temperature=0.0, logit_bias=((77, 100.0),)), (5,))
    step(draws, [request], logits[:1])  # type: ignore[list-item]
    assert len(draws._orders) == len(draws._requests) == 1
    del request
    gc.collect()
    assert len(draws._orders) == len(draws._requests) == 0
