"""The batch against mlx-lm's own generator, which decodes one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.engines.base import TokenStep
from pipeline.engines.text import Text
from pipeline.errors import EngineError, HandoffCancelledError
from pipeline.request import Sampling
from tests.engines.flow import prompt, read_text

if TYPE_CHECKING:
    from pipeline.engines.mlx.model import Model

pytest.importorskip("mlx.core", exc_type=ImportError)

from pipeline.engines.mlx.batch import Batch, Outbox, Row
from pipeline.engines.mlx.cache import STEP, capacity
from pipeline.engines.mlx.memory import Memory

Compute = Callable[[tuple[int, ...]], list[Any]]
Decode = Callable[[tuple[int, ...], int], list[int]]
AHEAD = pytest.mark.parametrize("ahead", [False, True])


class Single(Row):
    """A request with one sample."""

    def __init__(self, text: Text, count: int) -> None:
        self.outbox = Outbox()
        super().__init__(text, count, self.outbox)

    def steps(self) -> Iterator[TokenStep]:
        return self.outbox.read(1)


def make_row(token_ids: tuple[int, ...], count: int, **sampling: Any) -> Single:
    asked = Sampling(max_tokens=count, **{"temperature": 0.0, **sampling})
    return Single(Text(token_ids, asked, 1024, limit=count, seed=asked.seed or 0), count)


def run(batch: Batch, *, ahead: bool) -> int:
    emitted = 0
    while batch.rows:
        emitted += batch.step(ahead=ahead)
    return emitted


@AHEAD
def test_requests_that_join_late_and_leave_early_do_not_disturb_each_other(
    model: Model, computed: Compute, alone: Decode, ahead: bool
) -> None:
    # Longer, shorter and single-token prompts join a batch that runs; 250 crosses a step of the cache's growth.
    plan = {0: (130, 20), 1: (65, 30), 4: (250, 15), 7: (1, 12), 9: (2, 9), 12: (300, 4)}
    batch, rows, emitted = Batch(model), {}, 0
    for step in range(60):
        if step in plan:
            tokens, count = plan[step]
            rows[step] = make_row(prompt(tokens, step), count)
            emitted += batch.join(rows[step], computed(prompt(tokens, step)))
        if step == 11:
            batch.leave(rows[4])
            batch.leave(rows[4])
            rows[4].fail(HandoffCancelledError("closed"))
        if batch.rows:
            emitted += batch.step(ahead=ahead)
    assert batch.rows == []
    for step, row in rows.items():
        tokens, count = plan[step]
        if step != 4:
            assert read_text(row.steps()) == (alone(prompt(tokens, step), count), "length")
    with pytest.raises(HandoffCancelledError):
        read_text(rows[4].steps())
    assert emitted >= sum(count for step, (_, count) in plan.items() if step != 4)


def test_a_first_token_does_not_wait_for_the_step_behind_it(
    model: Model, computed: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, row = Batch(model), make_row(prompt(65, 0), 4)
    built, seen = [0], []
    forward, push = batch._forward, row.push

    def counted(*args: Any) -> Any:
        built[0] += 1
        return forward(*args)

    def told(*args: Any) -> bool:
        seen.append(built[0])
        return push(*args)

    monkeypatch.setattr(batch, "_forward", counted)
    monkeypatch.setattr(row, "push", told)
    batch.join(row, computed(prompt(65, 0)))
    assert run(batch, ahead=True) == 4
    # The first is read as soon as its own step is built, each other while the next one is under way.
    assert (seen, built[0]) == ([1, 3, 4, 4], 4)


@AHEAD
def test_every_emitted_token_is_counted_once(model: Model, computed: Compute, ahead: bool) -> None:
    batch = Batch(model)
    joined = [batch.join(make_row(prompt(20, count), count), computed(prompt(20, count))) for count in (3, 5, 8)]
    assert joined == [0, 0, 0]
    assert run(batch, ahead=ahead) == 16


@AHEAD
def test_a_stop_id_ends_its_row_only(model: Model, computed: Compute, alone: Decode, ahead: bool) -> None:
    expected = alone(prompt(40), 12)
    stop = expected[4]
    batch = Batch(model)
    stopping, going = make_row(prompt(40), 12, stop_token_ids=(stop,)), make_row(prompt(40), 12)
    for row in (stopping, going):
        batch.join(row, computed(prompt(40)))
    run(batch, ahead=ahead)
    assert read_text(stopping.steps()) == (expected[: expected.index(stop) + 1], "stop")
    assert read_text(going.steps()) == (expected, "length")


def test_nothing_is_computed_behind_the_last_token(model: Model, computed: Compute) -> None:
    batch, row = Batch(model), make_row(prompt(30), 3)
    batch.join(row, computed(prompt(30)))
    run(batch, ahead=True)
    assert row.drawn == 3


@AHEAD
def test_sampled_rows_draw_the_same_in_any_company(model: Model, computed: Compute, ahead: bool) -> None:
    hot = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "seed": 11}
    texts = []
    for company in (0, 2):
        batch, row = Batch(model), make_row(prompt(90), 10, **hot)
        for seed in range(company):
            batch.join(make_row(prompt(33, seed), 20, temperature=1.0, seed=seed), computed(prompt(33, seed)))
            batch.step(ahead=ahead)
        batch.join(row, computed(prompt(90)))
        run(batch, ahead=ahead)
        texts.append(read_text(row.steps()))
    assert texts[0] == texts[1]


@AHEAD
def test_memory_counts_at_least_what_the_batch_takes(model: Model, computed: Compute, ahead: bool) -> None:
    memory = Memory(10**9, model.token_bytes, 8, lambda: None)
    batch = Batch(model)
    for tokens, count in ((10, 300), (250, 20), (257, 3), (600, 300), (5, 5)):
        memory.ask(capacity(tokens + count) + STEP, rows=1)
        batch.join(make_row(prompt(tokens), count), computed(prompt(tokens)))
        for _ in range(4):
            batch.step(ahead=ahead)
        assert sum(one.nbytes for one in batch._caches) <= 10**9 - memory.free_bytes


def test_caches_that_do_not_fit_are_refused_before_anything_changes(
    model: Model, computed: Compute, alone: Decode
) -> None:
    batch, row = Batch(model), make_row(prompt(30), 5)
    batch.join(row, computed(prompt(30)))
    for wrong in (computed(prompt(50))[:1], computed(prompt(51))):
        with pytest.raises(EngineError):
            batch.join(make_row(prompt(50), 5), wrong)
    run(batch, ahead=False)
    assert read_text(row.steps()) == (alone(prompt(30), 5), "length")


def test_a_failure_comes_before_steps_that_were_not_read() -> None:
    row = make_row((1, 2), 5)
    row.push(7)
    row.fail(EngineError("out of memory"))
    row.fail(HandoffCancelledError("closed"))
    with pytest.raises(EngineError, match="out of memory"):
        next(row.steps())
