"""Opening: all that begins a handoff, as one step. Nothing here talks to a server.

One script, so that a handoff is there with every job or not at all, in one global order; and with a latest time, so
that what a server reads after the client was refused does not begin behind everybody's back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TypeAlias

from pipeline import contract as contracts
from pipeline import request as requests
from pipeline.broker import keys
from pipeline.broker.payload import Word
from pipeline.broker.scripts import Step
from pipeline.contract import Contract
from pipeline.handoff import State
from pipeline.request import Request

_ARRAY, _STR = Struct(">BH").pack, Struct(">BI").pack
Command: TypeAlias = Sequence[Word]  # the second word is its key


def fields(
    request: Request, contract: Contract, route: Mapping[str, str | None], owner: str, policy: str, traceparent: str
) -> dict[str, Word]:
    """A new record, but for its time. `traceparent` is the span that P's and D's belong under."""
    return {
        "state": State.CREATED.value,
        "request": requests.encode(request),
        "contract": contracts.encode(contract),
        "route": json.dumps(dict(route)),
        "policy": policy,
        "owner": owner,
        "prompt_tokens": len(request.token_ids),
        "traceparent": traceparent,
        "decode_attempt": 1,
        "prefill_attempt": 1 if route.get("prefill_queue") else 0,
    }


def step(
    handoff_id: str,
    record: Mapping[str, Word],
    jobs: Sequence[Command],
    now_ms: float,
    ttl_ms: int,
    owner: tuple[str, int] | None = None,
    within_ms: int | None = None,
) -> Step:
    """`jobs` are RQ's commands. `owner`: who asks lives, for so many ms more: a broker that came back empty has
    forgotten it, and nobody works for the dead. Nothing begins later than `within_ms` after `now_ms`, by the broker's
    clock.
    """
    names = keys.HandoffKeys(handoff_id)
    created = repr(now_ms)
    commands: list[Command] = [
        ("HSET", names.record, *(word for pair in record.items() for word in pair), "at_created", created),
        ("PEXPIRE", names.record, ttl_ms),
        ("ZADD", keys.LIVE, created, handoff_id),
        *jobs,
    ]
    if owner:
        commands.insert(0, ("SET", keys.owner(owner[0]), "1", "PX", owner[1]))
    touched = dict.fromkeys(_key(command) for command in commands)
    latest = "" if within_ms is None else repr(now_ms + within_ms)
    return Step("begin", tuple(touched), (latest, packed(commands)))


def packed(commands: Sequence[Command]) -> bytes:
    """As MessagePack, every word a str: the cmsgpack of a server's Lua reads no bin, which msgspec makes of bytes."""
    parts = [_ARRAY(0xDC, len(commands))]
    for command in commands:
        parts.append(_ARRAY(0xDC, len(command)))
        for word in command:
            data = word if isinstance(word, bytes) else str(word).encode()
            parts += (_STR(0xDB, len(data)), data)
    return b"".join(parts)


def _key(command: Command) -> str | bytes:
    key = command[1]
    assert not isinstance(key, int)
    return key
