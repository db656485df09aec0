"""How much longer do prompts wait than with a router that knows everything?

A grid of worlds (how fast each engine prefills, how fast the link is), seeded noise on every time, prompts of 32 to
8192 tokens in random order, half of them with a prefix that the decode replica holds. The router starts knowing
nothing and learns only from what it chose. Regret = its total time to first token / that of the better way for
every prompt, minus 1; exploring is part of it. The better way is by true means, so nobody can do better.

    python -m bench.router [--prompts 400] [--seed 7]
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from bench import report
from bench.report import Target
from pipeline.cost import CostModel, Estimate, Outcome, Way

LENGTHS = (32, 128, 512, 1024, 2048, 4096, 8192)
TOKEN_BYTES = 12_288  # Qwen2.5-0.5B: 24 layers, K and V, 2 heads of 64, FP16
NOISE = 0.1
LOCAL = Way(None, "d-0")
REMOTE = Way("p", "d-0")
TARGET_PERCENT = 10.0
FEWEST_PERCENT = 30.0


@dataclass(frozen=True, slots=True)
class World:
    """The truth: tokens/s of each engine's prefill, bytes/s of the link, fixed costs in ms."""

    prefill_rate: float
    decode_rate: float
    link_rate: float
    prefill_fixed_ms: float = 20.0
    decode_fixed_ms: float = 10.0
    handoff_fixed_ms: float = 15.0

    def split_ms(self, way: Way, tokens: int, held: int) -> tuple[float, float]:
        """Mean prefill and exposed time. Attention makes a prompt of 16,000 tokens cost twice its linear part."""
        missing = tokens - held
        if way.prefill is None:
            return self.decode_fixed_ms + 1e3 * missing / self.decode_rate * (1 + tokens / 16_000), 0.0
        prefill = self.prefill_fixed_ms + 1e3 * tokens / self.prefill_rate * (1 + tokens / 16_000)
        wire = 1e3 * missing * TOKEN_BYTES / self.link_rate
        return prefill, self.handoff_fixed_ms + max(0.1 * wire, wire - prefill)  # pages leave while prefill runs

    def total_ms(self, way: Way, tokens: int, held: int) -> float:
        return sum(self.split_ms(way, tokens, held))


class Played(NamedTuple):
    """Totals over one world's prompts, ms; `local_better` counts prompts."""

    routed_ms: float
    best_ms: float
    always_local_ms: float
    always_remote_ms: float
    local_better: int


def play(world: World, prompts: int, seed: int) -> Played:
    """Run one world's prompts through a fresh router."""
    draw, model = random.Random(seed), CostModel()
    routed = best = local = remote = 0.0
    local_better = 0
    for _ in range(prompts):
        tokens = draw.choice(LENGTHS)
        held = tokens // 2 if draw.random() < 0.5 else 0
        means = {way: world.total_ms(way, tokens, held) for way in (REMOTE, LOCAL)}
        estimates = [model.estimate(way, tokens, held, TOKEN_BYTES, 0.0) for way in means]
        chosen = model.choose(estimates)
        model.observe(_outcome(world, chosen, tokens, held, draw))
        routed += means[chosen.way]
        best += min(means.values())
        local += means[LOCAL]
        remote += means[REMOTE]
        local_better += means[LOCAL] < means[REMOTE]
    return Played(routed, best, local, remote, local_better)


def _outcome(world: World, chosen: Estimate, tokens: int, held: int, draw: random.Random) -> Outcome:
    prefill, exposed = (mean * draw.lognormvariate(0.0, NOISE) for mean in world.split_ms(chosen.way, tokens, held))
    local = chosen.way.prefill is None
    return Outcome(
        chosen.way,
        computed_tokens=tokens - held if local else tokens,
        moved_bytes=0 if local else (tokens - held) * TOKEN_BYTES,
        prefill_ms=prefill,
        exposed_ms=exposed,
    )


def grid() -> list[World]:
    """From a Mac that is nearly as fast as the GPU box on a slow link to one 40 times slower on a fast link."""
    rates = product((20_000.0, 100_000.0), (2_500.0, 10_000.0, 40_000.0), (85e6, 125e6, 1.25e9))
    return [World(*rate) for rate in rates]


def rows(worlds: list[World], prompts: int, seed: int) -> list[dict[str, Any]]:
    found = []
    for index, world in enumerate(worlds):
        played = play(world, prompts, seed + index)
        found.append(
            asdict(world)
            | {
                "local_better_percent": 100 * played.local_better / prompts,
                "regret_percent": 100 * (played.routed_ms / played.best_ms - 1),
                "always_local_percent": 100 * (played.always_local_ms / played.best_ms - 1),
                "always_remote_percent": 100 * (played.always_remote_ms / played.best_ms - 1),
            }
        )
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """Over the whole grid; each way must be the better one often enough for the question to mean something."""
    local = sum(row["local_better_percent"] for row in found) / len(found)
    regrets = [row["regret_percent"] for row in found]
    return {
        "local_better_percent": local,
        "remote_better_percent": 100 - local,
        "mean_regret_percent": sum(regrets) / len(regrets),
        "worst_regret_percent": max(regrets),
    }


def targets(overall: dict[str, float]) -> list[Target]:
    fewest = min(overall["local_better_percent"], overall["remote_better_percent"])
    return [
        Target("regret over the grid, mean", overall["mean_regret_percent"], TARGET_PERCENT, "%"),
        Target("each way better for at least", fewest, FEWEST_PERCENT, "% of prompts", at_least=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    found = rows(grid(), options.prompts, options.seed)
    columns = ["prefill_rate", "decode_rate", "link_rate", "local_better_percent", "regret_percent"]
    columns += ["always_local_percent", "always_remote_percent"]
    shown = [[row[column] for column in columns] for row in found]
    report.table("router regret", columns, shown)
    overall = summary(found)
    for name, value in overall.items():
        print(f"{name:24} {value:6.1f}")
    result = {"question": "regret of the router against the better way", "summary": overall, "rows": found}
    report.finish("router", result | {"options": report.options(options), "targets": report.rows(targets(overall))})


if __name__ == "__main__":
    main()
