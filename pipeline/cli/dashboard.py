"""`crossfill dashboard`: rq-dashboard over our queues, with the one serializer our jobs have."""

from __future__ import annotations

import argparse

from pipeline.cli import view

PORT = 9181


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("dashboard", help="serve rq-dashboard over the queues")
    view.add_broker_flags(command)
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; there is no login (default 127.0.0.1)"
    )
    command.add_argument("--port", type=int, default=PORT, help=f"port to listen on (default {PORT})")
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    settings = view.settings(options)
    from pipeline.broker import dashboard  # here, so that no other command loads a web framework

    dashboard.main(settings.broker.url, options.port, options.host)
