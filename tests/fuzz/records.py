"""Records: what lies in the broker as JSON or as an RQ job, changed by somebody who may write there.

Each reader may refuse with the errors it names and with nothing else: those its callers are prepared for. What it takes
must come out the same when it is written and read once more.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rq.exceptions import DeserializationError, NoSuchJobError
from rq.serializers import JSONSerializer

from pipeline import contract as contracts
from pipeline import request as requests
from pipeline.broker import channel, record, registry
from pipeline.broker.channel import TokenEntry
from pipeline.broker.job import PREFILL_JOB, HandoffJob
from pipeline.contract import Contract
from pipeline.errors import PeerError
from pipeline.request import Request, Sampling

JSON = Any
ID = "00112233445566778899aabbccddeeff"
CONTRACT = Contract("a" * 64, "b" * 64, "c" * 64, 2, 2, 32, 1024, 8192)
REQUEST = Request(ID, (1, 2, 3), Sampling(max_tokens=4, stop_token_ids=(0,)), salt="s")
HOSTILE: tuple[JSON, ...] = (
    None, True, 0, -1, 1 << 80, 1e308, "", "x" * 300, "../../etc/passwd", "{tag}*", "\r\nX: y", "\x00", "é\ud83d",
    [], {}, [[]], {"a": {}}, "cos\nsystem\n(S'true'\ntR.", [None] * 40,
)  # fmt: skip
_BROKEN = (KeyError, TypeError, ValueError)
_REMOVED = (AttributeError, LookupError, AssertionError, OverflowError, NoSuchJobError)  # `fetch` removes such a job


class Broken(AssertionError):
    """A reader fell over `data`."""

    def __init__(self, name: str, why: str, data: object) -> None:
        super().__init__(f"{name}: {why}: {data!r}")


@dataclass(frozen=True, slots=True)
class Reader:
    """`read` a mutation of `valid`; it may raise `refusals`."""

    valid: JSON
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = _BROKEN


def _record(data: bytes) -> object:
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise TypeError
    return record.trace(record.record(ID, {str(name): str(value) for name, value in fields.items()}))


def _snapshot(data: bytes) -> object:
    """What the janitor and every watch look at."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise TypeError
    values = [None if name not in fields else str(fields[name]).encode(errors="replace") for name in record.SMALL]
    seen = record.snapshot(ID, values)
    return seen and (seen.route, seen.policy, seen.accept, seen.number("prefill_attempt"), seen.error("prefill"))


def _job(data: bytes) -> object:
    """A job's hash as it lies there: whatever `data` says is its payload, its callbacks and its counters."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise TypeError
    job = HandoffJob(ID, connection=_Nobody(), serializer=JSONSerializer)  # type: ignore[arg-type]
    job.restore({str(name).encode(errors="replace"): _bytes(value) for name, value in fields.items()})
    if job._success_callback_name or job._failure_callback_name or job.webhooks or job.retries_left:
        raise Broken("job", "it brought something to execute", data)
    return str(job.func_name), job.handoff_id


class _Nobody:
    """RQ wants a connection for a job; reading one needs none."""

    connection_pool = None


def _bytes(value: JSON) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else json.dumps(value).encode()


_JOB = {
    "data": json.dumps([PREFILL_JOB, None, [ID], {}]),
    "created_at": "2026-01-01T00:00:00.000000Z",
    "enqueued_at": "2026-01-01T00:00:00.000000Z",
    "origin": "prefill.reference.00000000",
    "description": "prefill",
    "timeout": "-1",
    "result_ttl": "60",
    "failure_ttl": "600",
    "status": "queued",
    "meta": "{}",
    "success_callback_name": "os.system",
    "failure_callback_name": "os.system",
    "retries_left": "3",
    "webhooks": "[]",
}
_RECORD = {
    "state": "created",
    "request": requests.encode(REQUEST),
    "contract": contracts.encode(CONTRACT),
    "route": json.dumps({"prefill_queue": "p", "decode_queue": "d", "decode_replica": "d-0"}),
    "policy": "fail",
    "owner": "api-1",
    "accept": "1.1.0",
    "at_created": "1000.5",
    "prefill_attempt": "1",
    "prefill_error": json.dumps({"code": "x", "message": "y", "retryable": True, "http_status": 502}),
}
_REPLICA = registry.Replica("d-0", "reference", "decode", "tiny", CONTRACT, 4, 1)
READERS: dict[str, Reader] = {
    "request": Reader(json.loads(requests.encode(REQUEST)), requests.decode),
    "contract": Reader(json.loads(contracts.encode(CONTRACT)), contracts.decode),
    "record": Reader(_RECORD, _record),
    "snapshot": Reader(_RECORD, _snapshot),
    "replica": Reader(json.loads(registry.encode(_REPLICA)), lambda data: registry.decode(data, "{}", "{}")),
    "token entry": Reader(json.loads(TokenEntry(0, (1, 2), "stop").encode()), channel.decode, (PeerError,)),
    "job": Reader(_JOB, _job, (*_BROKEN, *_REMOVED, PeerError, DeserializationError)),
}


def mutated(valid: JSON, rng: random.Random) -> bytes:
    """One or a few nodes replaced, dropped or doubled; sometimes the text itself is damaged."""
    tree = json.loads(json.dumps(valid))
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = _changed(tree, rng)
    data = json.dumps(tree).encode()
    if rng.random() < 0.15:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(rng.choice((0, 1, 3))) + data[at + rng.choice((0, 1, 5)) :]
    return data


def _changed(tree: JSON, rng: random.Random) -> JSON:
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(HOSTILE))
    key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    what = rng.random()
    if what < 0.15:
        del tree[key]
    elif what < 0.3 and isinstance(tree, dict):
        tree[rng.choice(("", "extra", "handoff_id", "__class__"))] = copy.deepcopy(rng.choice(HOSTILE))
    else:
        tree[key] = _changed(tree[key], rng)
    return tree


def run(seed: int, count: int) -> Counter[str]:
    """Feed `count` records; returns "<reader> taken" and "<reader> refused" counts. Raises Broken."""
    rng, seen = random.Random(seed), Counter[str]()
    readers = list(READERS.items())
    for _ in range(count):
        name, reader = rng.choice(readers)
        data = mutated(reader.valid, rng)
        try:
            reader.read(data)
        except Broken:
            raise
        except reader.refusals:
            seen[f"{name} refused"] += 1
        except Exception as error:
            raise Broken(name, f"{type(error).__name__}: {error}", data) from error
        else:
            seen[f"{name} taken"] += 1
    return seen
