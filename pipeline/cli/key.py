"""`crossfill key`: make, list and revoke the API keys of a running or future API. No restart is needed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline.api import keyring
from pipeline.cli import config
from pipeline.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("key", help="make, list and revoke API keys")
    command.add_argument("--config", type=Path, help="settings file whose api.keys_file is meant")
    command.add_argument("--file", type=Path, help="the keys' file itself")
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key and print it: it is shown this once")
    new.add_argument("name", help="whose key it is; shown by `list`")
    new.set_defaults(handler=_new)
    actions.add_parser("list", help="names of all keys").set_defaults(handler=_list)
    revoke = actions.add_parser("revoke", help="remove a key: requests that carry it are refused from now on")
    revoke.add_argument("name")
    revoke.set_defaults(handler=_revoke)


def _new(options: argparse.Namespace) -> None:
    print(keyring.new(_file(options), options.name))


def _list(options: argparse.Namespace) -> None:
    for name in sorted(keyring.read(_file(options)).values()):
        print(name)


def _revoke(options: argparse.Namespace) -> None:
    keyring.revoke(_file(options), options.name)


def _file(options: argparse.Namespace) -> Path:
    if options.file is not None:
        return Path(options.file)
    settings = config.load(config.find(options.config), os.environ)
    if settings.api is None or settings.api.keys_file is None:
        raise ConfigError("api.keys_file: which file holds the keys is not set: add it to the settings or pass --file")
    return settings.api.keys_file
