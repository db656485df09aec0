"""What does a client hear when P is killed while its pages are on their way, and what stays behind on D?

    python -m ops.gpu.killed MODEL RESULT.json --engines mlx,vllm --at RUN.json --victim PID [--tokens 32000]

The first of the two engines is P, and `--victim` its worker's process; it is gone afterwards. Exit status 1 unless the
client got an error that names what happened (policy `fail`, one P of this engine: nobody can resume), D is as free as
before, and nothing of the handoff is left on the broker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import closing
from typing import Any

from redis import Redis
from tokenizers import Tokenizer

from bench import ttft
from ops.gpu import system
from pipeline.broker import keys

_LOOK_S = 0.001


def killed(running: system.System, options: argparse.Namespace) -> dict[str, Any]:
    """Raises RuntimeError when something is left behind, or the pages never began to move."""
    prefill, decode = options.engines.split(",")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompt = ttft.prompt(tokenizer, options.tokens, options.tokens)
    before = running.settled()
    heard: list[str] = []

    def ask() -> None:
        try:
            heard.append(running.complete(prompt, f"{prefill}->{decode}", 4)["choices"][0]["text"])
        except RuntimeError as error:
            heard.append(str(error))

    client = threading.Thread(target=ask)
    client.start()
    _await_pages(running.broker_url)
    os.kill(options.victim, signal.SIGKILL)
    start = time.monotonic()
    client.join(60)
    seconds = time.monotonic() - start
    after = running.settled()
    staying = {name: [before[name]["free_pages"], gauges["free_pages"]] for name, gauges in after.items()}
    return {
        "question": "what happens when P is killed while its pages are on their way",
        "route": f"{prefill}->{decode}",
        "prompt_tokens": options.tokens,
        "client_heard": heard,
        "seconds_until_then": round(seconds, 1),
        "free_pages_before_and_after": staying,
        "left_on_the_broker": 0,  # `settled` raises where there is anything
    }


def _await_pages(broker_url: str) -> None:
    """Until a page is on the broker: marks in the ledger come too late, P tells them with its last one."""
    with closing(Redis.from_url(broker_url)) as client:
        deadline = time.monotonic() + 60
        while not int(client.get(keys.BUDGET_TOTAL) or 0):
            if time.monotonic() > deadline:
                raise RuntimeError("no page left P within a minute")
            time.sleep(_LOOK_S)


def main() -> None:
    parser = system.arguments(__doc__)
    parser.add_argument("--victim", type=int, required=True, help="process id of P's worker")
    parser.add_argument("--tokens", type=int, default=32000)
    options = parser.parse_args()
    with system.opened(options) as running:
        result = killed(running, options)
    print(json.dumps(result, indent=2), flush=True)
    system.save(options, result)
    equal = all(before == after for before, after in result["free_pages_before_and_after"].values())
    sys.exit(0 if equal and "error" in result["client_heard"][0] else 1)


if __name__ == "__main__":
    main()
