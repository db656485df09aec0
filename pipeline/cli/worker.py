"""`crossfill worker`: one replica. Named in a settings file, or described by flags alone."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from pipeline import log
from pipeline.cli import config, lifeline
from pipeline.errors import ConfigError, EngineError
from pipeline.settings import Settings, WorkerSettings

DESCRIBING = ("engine", "model", "role", "slots", "pages_url")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("worker", help="run one replica: an engine in one or two roles")
    command.add_argument("--config", type=Path, help="settings file (default: crossfill.toml, if there is one)")
    command.add_argument("--name", help="replica: an entry of the file's [[workers]], or a new unique name")
    command.add_argument("--broker", metavar="URL", help="redis:// or rediss:// URL of the control broker")
    command.add_argument("--engine", help="reference, mlx, vllm or sglang")
    command.add_argument("--model", type=Path, help="checkpoint directory")
    command.add_argument("--role", choices=("prefill", "decode", "both"), help="default both")
    command.add_argument("--slots", type=int, help="jobs at once, per role (default 16)")
    command.add_argument(
        "--pages-url", metavar="URL", help="decode: a Redis/Valkey of its own for pages (default: the broker)"
    )
    command.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    if options.parent is not None:
        lifeline.hold(options.parent)
    broker = {"broker": {"url": options.broker}} if options.broker else {}
    settings = config.load(config.find(options.config), os.environ, broker)
    worker = choose(settings, options)
    from pipeline.workers import runtime  # here, so that no other command loads an engine's environment

    log.setup(settings.observe.log_format, worker.name)
    try:
        runtime.run(settings, worker)
    except EngineError as error:
        print(f"crossfill: {error.code}: {error}", file=sys.stderr)
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End at once: everything is drained and closed, and taking down an interpreter full of torch lasts ten seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def choose(settings: Settings, options: argparse.Namespace) -> WorkerSettings:
    """The file's worker of that name, with the given flags over it; without one, a worker of flags. ConfigError."""
    given = {field: value for field in DESCRIBING if (value := getattr(options, field)) is not None}
    named = {worker.name: worker for worker in settings.workers}
    if options.name in named:
        base = named[options.name].model_dump(exclude_unset=True)
    elif options.name is None and not given and len(named) == 1:
        base = next(iter(named.values())).model_dump(exclude_unset=True)
    else:
        base = {"name": options.name}
        if missing := [flag for flag in ("name", "engine", "model") if (base | given).get(flag) is None]:
            known = ", ".join(named) or "none"
            raise ConfigError(f"no worker {options.name!r} in the file ({known}) and no --{missing[0]} to describe one")
    return config.validate({"workers": [base | given]}, "the flags").workers[0]
