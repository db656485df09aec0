"""The Lua scripts, one file each in `lua/`, loaded by name.

Each file opens with `#!lua flags=allow-oom` where a handoff needs it to END, then with its KEYS and ARGV.
redis-py reloads a script by itself after a server lost it (NOSCRIPT).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from redis import Redis
from redis.commands.core import Script


class Step(NamedTuple):
    """One call of a script, for whichever connection runs it."""

    script: str
    keys: Sequence[str | bytes]
    args: Sequence[str | bytes | int]


class Scripts:
    """Callable scripts bound to one client: `scripts.run("reserve", keys=[...], args=[...])`."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._loaded: dict[str, Script] = {}

    def run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._client.register_script(source(name))
        return self._loaded[name](keys=keys, args=args)


@cache
def source(name: str) -> str:
    """The text of one script; a line `--@include x` stands for `x.lua` (verbs that several scripts share)."""
    folder = files("pipeline.broker") / "lua"
    text = (folder / f"{name}.lua").read_text()
    return re.sub(r"(?m)^--@include (\w+)$", lambda found: (folder / f"{found[1]}.lua").read_text(), text)


@cache
def digest(name: str) -> str:
    """What a server calls it by: hex SHA-1 of its text."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
