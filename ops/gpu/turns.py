"""A chat on one GPU: what each turn costs, and the second turn of a long one, whose beginning both engines hold.

    python -m ops.gpu.turns MODEL RESULT.json --engines vllm,mlx [--at RUN.json] [--turns 10] [--held 2800]

`bench/turns.py` against a system on the GPU.
"""

from __future__ import annotations

import json
from typing import Any

from bench import report, turns
from ops.gpu import system


def main() -> None:
    parser = system.arguments(__doc__)
    for name, value in {"turns": 10, "first": 600, "more": 96, "answer": 16, "held": 2800, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    a, b = options.engines.split(",")
    with system.opened(options) as running:
        asker = turns.Asker.of(running.http, options.model)
        second = turns.Second(asker, options, options.held)
        second.warm()
        found = turns.talks(asker, options)
        taken = [second.round(number) for number in range(options.rounds)]
    here = {"model": options.model.name, "link": turns.LOOPBACK}
    later = [here | row for row in turns.seconds(taken, a, b)]
    result: dict[str, Any] = {"question": "cost of a turn, on one GPU", "rows": found, "second": later}
    for row in later:
        print(json.dumps(row), flush=True)
    system.save(options, result | {"targets": report.rows(turns.targets(later))})


if __name__ == "__main__":
    main()
