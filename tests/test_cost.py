"""What a way costs, and which one is taken."""

from __future__ import annotations

import pytest

from pipeline.cost import GONE_KEPT, NEAR, RETRY_EVERY, CostModel, Curve, Outcome, Way, explain

LOCAL = Way(None, "d")
REMOTE = Way("p", "d")
PAGE = 64


def _seen(model: CostModel, way: Way, tokens: int, prefill: float, exposed: float, moved: int = 0) -> None:
    model.observe(Outcome(way, tokens, moved, prefill, exposed))


def test_an_empty_curve_knows_nothing() -> None:
    assert Curve().at(100) == (0.0, False)


def test_one_point_is_known_near_it_and_scales_in_proportion() -> None:
    curve = Curve()
    curve.observe(100, 50.0)
    assert curve.at(100) == (50.0, True)
    assert curve.at(25) == (12.5, True)
    assert curve.at(100 * NEAR) == (200.0, True)
    assert curve.at(100 * NEAR + 100) == (250.0, False)


def test_between_points_a_straight_line_and_beyond_them_the_last_one() -> None:
    curve = Curve()
    for x, y in ((100, 20.0), (1000, 110.0), (4000, 710.0)):
        curve.observe(x, y)
    assert curve.at(550) == (65.0, True)
    assert curve.at(2500) == (410.0, True)
    assert curve.at(5000) == (910.0, True)
    assert curve.at(0).y == pytest.approx(10.0)


def test_a_longer_prompt_is_never_cheaper_by_extrapolation() -> None:
    curve = Curve()
    curve.observe(100, 30.0)
    curve.observe(1000, 20.0)
    assert curve.at(8000).y == 20.0


def test_a_curve_follows_what_changes() -> None:
    curve = Curve()
    curve.observe(100, 10.0)
    for _ in range(20):
        curve.observe(100, 50.0)
    assert curve.at(100).y == pytest.approx(50 - 40 * 0.8**20)


def test_an_estimate_adds_queue_compute_and_what_the_link_adds() -> None:
    model = CostModel()
    _seen(model, REMOTE, 640, prefill=100.0, exposed=30.0, moved=640 * 4)
    estimate = model.estimate(REMOTE, 640, 0, 4, ahead=2.0)
    assert estimate[1:] == (200.0, 100.0, 30.0, True)
    assert estimate.total_ms == 330.0


def test_what_the_decoder_holds_is_neither_moved_nor_computed_there_but_computed_by_p() -> None:
    model = CostModel()
    for tokens in (64, 640):
        _seen(model, LOCAL, tokens, prefill=tokens / 2, exposed=1.0)
        _seen(model, REMOTE, tokens, prefill=tokens / 10, exposed=tokens / 8, moved=tokens * 4)
    assert model.estimate(LOCAL, 640, 576, 4, 0.0).prefill_ms == 32.0
    remote = model.estimate(REMOTE, 640, 576, 4, 0.0)
    assert (remote.prefill_ms, remote.exposed_ms) == (64.0, 8.0)


def test_moved_bytes_are_whole_pages() -> None:
    model = CostModel()
    for pages in (1, 4):
        _seen(model, REMOTE, pages * PAGE, prefill=1.0, exposed=pages * 10.0, moved=pages * PAGE * 4)
    assert model.estimate(REMOTE, 65, 0, 4, 0.0).exposed_ms == pytest.approx(20.0)


def test_each_way_is_tried_then_the_faster_one_is_taken() -> None:
    model = CostModel()
    truth = {LOCAL: (80.0, 0.0, 0), REMOTE: (20.0, 10.0, 640 * 4)}
    taken = []
    for _ in range(6):
        chosen = model.choose([model.estimate(way, 640, 0, 4, 0.0) for way in truth]).way
        taken.append(chosen)
        prefill, exposed, moved = truth[chosen]
        _seen(model, chosen, 640, prefill, exposed, moved)
    assert sorted(map(str, taken[:2])) == ["local->d", "p->d"]
    assert taken[2:] == [REMOTE] * 4


def test_a_way_that_is_already_known_to_be_far_slower_is_not_tried_at_a_new_length() -> None:
    model = CostModel()
    _seen(model, LOCAL, 128, prefill=50.0, exposed=0.0)
    for tokens in (128, 8192):
        _seen(model, REMOTE, tokens, prefill=tokens / 50, exposed=10.0, moved=tokens * 4)
    estimates = [model.estimate(way, 8192, 0, 4, 0.0) for way in (LOCAL, REMOTE)]
    assert [e.known for e in estimates] == [False, True]
    assert model.choose(estimates).way == REMOTE


def test_a_queue_sends_prompts_the_other_way() -> None:
    model = CostModel()
    _seen(model, LOCAL, 640, prefill=80.0, exposed=0.0)
    _seen(model, REMOTE, 640, prefill=20.0, exposed=10.0, moved=640 * 4)

    def choice(ahead: float) -> Way:
        return model.choose(
            [model.estimate(LOCAL, 640, 0, 4, 0.0), model.estimate(REMOTE, 640, 0, 4, ahead)],
        ).way

    assert [choice(ahead) for ahead in (0.0, 2.0, 3.0)] == [REMOTE, REMOTE, LOCAL]


def test_a_narrow_loser_is_tried_again_now_and_then() -> None:
    model = CostModel()
    _seen(model, LOCAL, 640, prefill=40.0, exposed=0.0)
    _seen(model, REMOTE, 640, prefill=20.0, exposed=10.0, moved=640 * 4)
    estimates = [model.estimate(way, 640, 0, 4, 0.0) for way in (LOCAL, REMOTE)]
    ways = [model.choose(estimates).way for _ in range(RETRY_EVERY + 2)]
    assert ways.count(LOCAL) == 1
    assert ways.index(LOCAL) == RETRY_EVERY


def test_no_way_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        CostModel().choose([])


def test_of_replicas_that_are_gone_the_newest_stay_known() -> None:
    model = CostModel()
    names = [f"d-{number}" for number in range(GONE_KEPT + 3)]
    for name in names:
        for way in (Way(None, name), Way("p", name)):
            _seen(model, way, 640, prefill=40.0, exposed=10.0, moved=640 * 4 if way.prefill else 0)
        model.choose([model.estimate(Way("p", name), 640, 0, 4, 0.0)])
    model.forget(alive={"d-0"})

    def known(name: str) -> list[bool]:
        return [model.estimate(Way(prefill, name), 640, 0, 4, 0.0).known for prefill in (None, "p")]

    assert [name for name in names if known(name) != [True, True]] == ["d-1", "d-2"]
    assert known("d-1") == known("d-2") == [False, False]
    model.forget(alive=())
    assert [name for name in names if not any(known(name))] == ["d-0", "d-1", "d-2"]
    assert model.estimate(Way("p", "new"), 640, 0, 4, 0.0).prefill_ms == 40.0  # the prefill engine's own is no name's


def test_explain_names_the_chosen_way_first() -> None:
    model = CostModel()
    _seen(model, LOCAL, 640, prefill=80.0, exposed=0.0)
    _seen(model, REMOTE, 640, prefill=20.0, exposed=10.0, moved=640 * 4)
    estimates = [model.estimate(way, 640, 0, 4, 0.0) for way in (LOCAL, REMOTE)]
    shown = explain(estimates, model.choose(estimates))
    assert [(row["way"], row["chosen"], row["total_ms"]) for row in shown] == [
        ("p->d", True, 30.0),
        ("local->d", False, 80.0),
    ]
