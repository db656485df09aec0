"""The router's bench: its arithmetic, and that the grid asks a real question."""

from __future__ import annotations

from bench import router
from bench.router import LOCAL, REMOTE, World


def test_the_truth_of_a_world() -> None:
    world = World(prefill_rate=10_000, decode_rate=1_000, link_rate=12_288e3)
    assert world.split_ms(LOCAL, 1600, 600) == (10 + 1000 * 1.1, 0.0)
    assert world.split_ms(REMOTE, 1600, 600) == (20 + 160 * 1.1, 15 + 1000 - 196)


def test_regret_is_never_below_zero_and_the_router_beats_both_habits_over_the_grid() -> None:
    rows = router.rows(router.grid(), prompts=150, seed=3)
    overall = router.summary(rows)
    assert min(row["regret_percent"] for row in rows) >= 0
    assert min(overall["local_better_percent"], overall["remote_better_percent"]) >= 30
    assert overall["mean_regret_percent"] <= 10
    assert all(target.reached for target in router.targets(overall))
    for habit in ("always_local_percent", "always_remote_percent"):
        assert overall["mean_regret_percent"] < sum(row[habit] for row in rows) / len(rows)


def test_the_same_seed_plays_the_same_game() -> None:
    world = router.grid()[0]
    assert router.play(world, 50, 1) == router.play(world, 50, 1)
    assert router.play(world, 50, 1) != router.play(world, 50, 2)
