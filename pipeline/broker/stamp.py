"""Stamp: RQ's own commands for one kind of job, recorded once from RQ and filled in for each job.

To queue a job through RQ takes a millisecond of CPU, nearly all of it for words that are the same every time. So RQ
writes one job of a kind into a pipeline that is never executed, and what differs between two jobs is replaced: the
job's id, the handoff's, two times, and the packed arguments. What a worker or a dashboard finds is byte for byte RQ's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from redis import Redis
from rq.utils import now, utcformat

from pipeline.broker import queue
from pipeline.broker.job import JobSpec
from pipeline.broker.opening import Command
from pipeline.settings import BrokerSettings

_KINDS = 256  # a kind is a route, a role and a model: names of replicas that never come back must not add up
_HANDOFF = b"<the id of a handoff>"  # what stands for it in a recorded job
_TIMES = (b"created_at", b"enqueued_at")


class _Blank(NamedTuple):
    """A word that differs from job to job: which one, and what is written there."""

    command: int
    word: int
    fill: Callable[[_Job], bytes]


class _Job(NamedTuple):
    job_id: bytes
    handoff_id: bytes
    time: bytes


class Stamp:
    """`commands` for another job of the kind that was recorded."""

    def __init__(self, recorded: list[list[bytes]], job_id: bytes) -> None:
        self._commands = recorded
        self._blanks = [
            _Blank(number, at, fill)
            for number, words in enumerate(recorded)
            for at in range(len(words))
            if (fill := _fill(words, at, job_id)) is not None
        ]

    def commands(self, handoff_id: str) -> list[Command]:
        job = _Job(str(uuid4()).encode(), handoff_id.encode(), utcformat(now()).encode())
        made = [list(words) for words in self._commands]
        for command, word, fill in self._blanks:
            made[command][word] = fill(job)
        return [tuple(words) for words in made]


class Stamps:
    """One for each kind of job that was asked for. Bound to the control broker."""

    def __init__(self, client: Redis, settings: BrokerSettings) -> None:
        self._client = client
        self._settings = settings
        self._made: dict[tuple[object, ...], Stamp] = {}

    def has(self, spec: JobSpec) -> bool:
        """Whether its stamp is made. To make the first one, RQ asks the server for its version."""
        return _kind(spec) in self._made

    def commands(self, spec: JobSpec) -> list[Command]:
        """What RQ would send to queue this job. Raises BrokerError."""
        kind = _kind(spec)
        if kind not in self._made:
            if len(self._made) >= _KINDS:
                self._made.clear()
            self._made[kind] = self._record(spec)
        return self._made[kind].commands(spec.handoff_id)

    def _record(self, spec: JobSpec) -> Stamp:
        encode = self._client.get_encoder().encode
        with self._client.pipeline(transaction=True) as pipe:
            pipe.multi()  # RQ wants to find the transaction begun
            job_id = queue.enqueue(pipe, self._client, spec._replace(handoff_id=_HANDOFF.decode()), self._settings)
            sent: list[Any] = pipe.command_stack
            return Stamp([[bytes(encode(word)) for word in args] for args, _ in sent], job_id.encode())


def _kind(spec: JobSpec) -> tuple[object, ...]:
    meta: Mapping[str, str] = spec.meta
    return spec.queue, spec.function, *meta.items()


def _fill(words: list[bytes], at: int, job_id: bytes) -> Callable[[_Job], bytes] | None:
    """What is to be written in place of word `at`; None: it stays."""
    word, before = words[at], words[at - 1]
    if before in _TIMES:
        return lambda job: job.time
    if before == b"data":
        unpacked = zlib.decompress(word)
        return lambda job: zlib.compress(unpacked.replace(_HANDOFF, job.handoff_id))
    if job_id in word:
        return lambda job: word.replace(job_id, job.job_id)
    if _HANDOFF in word:
        return lambda job: word.replace(_HANDOFF, job.handoff_id)
    return None
