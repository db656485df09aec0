"""`crossfill`, and `python -m pipeline`: finds the command, runs it, turns our errors into one line and an exit status.

Only the chosen command's module is imported: a worker never loads the web framework, the API never an engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from pipeline.errors import ConfigError, CrossfillError

USAGE_ERROR = 2  # argparse's own status for a wrong command line


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "up": Command("pipeline.cli.up", "start broker, workers and API of this machine, and keep them running"),
    "demo": Command("pipeline.cli.demo", "start everything, ask a question in each direction, show the traces, stop"),
    "serve": Command("pipeline.cli.serve", "run the OpenAI-compatible API"),
    "worker": Command("pipeline.cli.worker", "run one replica: an engine in one or two roles"),
    "status": Command("pipeline.cli.status", "show replicas, budget and live handoffs of a running API"),
    "explain": Command("pipeline.cli.explain", "show what each way would cost a prompt, and which one is chosen"),
    "key": Command("pipeline.cli.key", "make, list and revoke API keys"),
    "queues": Command("pipeline.cli.queues", "show the jobs of every queue by where they are"),
    "replicas": Command("pipeline.cli.replicas", "show the replicas that are alive"),
    "handoffs": Command("pipeline.cli.handoffs", "show live and recent handoffs"),
    "capture": Command("pipeline.cli.capture", "store a live handoff as a file, on the machine that decodes it"),
    "replay": Command("pipeline.cli.replay", "decode a stored handoff again, compute it again, or ask it again"),
    "handoff": Command("pipeline.cli.handoff", "show where one handoff spent its time"),
    "cancel": Command("pipeline.cli.cancel", "end a live handoff"),
    "drain": Command("pipeline.cli.drain", "let a replica finish and take nothing new"),
    "doctor": Command("pipeline.cli.doctor", "check broker, replicas, contracts and link; say what to do"),
    "dashboard": Command("pipeline.cli.dashboard", "serve rq-dashboard over the queues"),
    "model": Command("pipeline.cli.model", "write the sample checkpoints; compare two checkpoints"),
}


def parser(chosen: str | None) -> argparse.ArgumentParser:
    """The full parser of the `chosen` command beside one-line entries of all the others."""
    root = argparse.ArgumentParser(prog="crossfill", description="Prefill on one LLM engine, decode on another.")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if name == chosen:
            import_module(command.module).add(commands)
        else:
            commands.add_parser(name, help=command.summary)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    options = parser(chosen).parse_args(arguments)
    try:
        return int(options.handler(options) or 0)
    except CrossfillError as error:
        print(f"crossfill: {error.code}: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
