"""`crossfill serve`: the HTTP edge. Flags win over the file; with `--broker` and `--model` no file is needed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline.cli import config, lifeline
from pipeline.cli.config import Tree
from pipeline.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("serve", help="run the OpenAI-compatible API")
    command.add_argument("--config", type=Path, help="settings file (default: crossfill.toml, if there is one)")
    command.add_argument("--broker", metavar="URL", help="redis:// or rediss:// URL of the control broker")
    command.add_argument("--model", type=Path, help="checkpoint directory: tokenizer and contract, no weights loaded")
    command.add_argument("--served-name", help="model name for clients (default: the directory's name)")
    command.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default 8000)")
    command.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    if options.parent is not None:
        lifeline.hold(options.parent)
    settings = config.load(config.find(options.config), os.environ, flags(options))
    if settings.api is None:
        raise ConfigError("api.model: which model to serve is not set: add it to the file or pass --model")
    from pipeline.api import app  # here, so that no other command loads a web framework

    app.serve(settings)


def flags(options: argparse.Namespace) -> Tree:
    """The given flags as a settings tree; one that was not given is absent, so it overrides nothing."""
    api = {name: getattr(options, name) for name in ("model", "served_name", "host", "port")}
    given = {name: value for name, value in api.items() if value is not None}
    tree: Tree = {"api": given} if given else {}
    return tree | ({"broker": {"url": options.broker}} if options.broker else {})
