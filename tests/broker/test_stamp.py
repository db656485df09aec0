"""A stamped job is byte for byte what RQ would have written for it."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis import Redis

from pipeline.broker import queue, stamp
from pipeline.broker.job import DECODE_JOB, PREFILL_JOB, JobSpec, fetch, open_queue
from pipeline.broker.stamp import Stamps
from pipeline.settings import BrokerSettings

SETTINGS = BrokerSettings(handoff_ttl_s=900, result_ttl_s=50, failure_ttl_s=500)
NOON = datetime(2026, 11, 30, 12, 0, 0, 123456, tzinfo=UTC)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
D = JobSpec("decode.mac-0", DECODE_JOB, "0123456789abcdef" * 2, {"model": "tiny", "route": "vllm->mlx"})
P = JobSpec("prefill.vllm.12345678", PREFILL_JOB, "f" * 32, {"model": "模型 ✓ \r\n", "route": "vllm->mlx"})


def _freeze(monkeypatch: pytest.MonkeyPatch, moment: datetime, job_id: uuid.UUID) -> None:
    for module in ("rq.job", "rq.queue", stamp.__name__):
        monkeypatch.setattr(f"{module}.now", lambda: moment)
    for module in ("rq.job", stamp.__name__):
        monkeypatch.setattr(f"{module}.uuid4", lambda: job_id)


def _by_rq(client: Redis, spec: JobSpec) -> list[tuple[bytes, ...]]:
    """The words of the commands that RQ would send."""
    encode: Any = client.get_encoder().encode
    with client.pipeline() as pipe:
        pipe.multi()
        queue.enqueue(pipe, client, spec, SETTINGS)
        return [tuple(bytes(encode(word)) for word in args) for args, _ in pipe.command_stack]


@pytest.mark.parametrize("spec", [D, P])
def test_the_commands_are_those_of_rq(redis_client: Redis, monkeypatch: pytest.MonkeyPatch, spec: JobSpec) -> None:
    stamps = Stamps(redis_client, SETTINGS)
    assert not stamps.has(spec)
    first = stamps.commands(spec._replace(handoff_id="e" * 32))
    assert stamps.has(spec)
    _freeze(monkeypatch, NOON, ID)
    commands = stamps.commands(spec)
    assert commands == _by_rq(redis_client, spec)
    assert len(commands) == len(first) == 7
    _freeze(monkeypatch, NOON + timedelta(microseconds=1), uuid.UUID(int=7))
    assert stamps.commands(spec) == _by_rq(redis_client, spec)
    assert redis_client.keys("*") == []  # nothing is sent


def test_what_two_jobs_share_is_recorded_once(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[JobSpec] = []
    enqueue = queue.enqueue

    def record(pipe: Any, client: Redis, spec: JobSpec, settings: BrokerSettings) -> str:
        recorded.append(spec)
        return enqueue(pipe, client, spec, settings)

    monkeypatch.setattr(queue, "enqueue", record)
    stamps = Stamps(redis_client, SETTINGS)
    for spec in (D, P, D._replace(handoff_id="e" * 32), P, D._replace(meta={"model": "other"})):
        stamps.commands(spec)
    assert [(spec.queue, spec.meta.get("model")) for spec in recorded] == [
        ("decode.mac-0", "tiny"),
        ("prefill.vllm.12345678", P.meta["model"]),
        ("decode.mac-0", "other"),
    ]


def test_kinds_that_never_come_back_do_not_add_up(redis_client: Redis) -> None:
    stamps = Stamps(redis_client, SETTINGS)
    for number in range(300):
        stamps.commands(D._replace(queue=f"decode.{number}"))
    assert len(stamps._made) <= 256
    assert stamps.has(D._replace(queue="decode.299"))


@pytest.mark.parametrize("spec", [D, P])
def test_a_worker_finds_the_job_that_was_meant(redis_client: Redis, spec: JobSpec) -> None:
    stamps = Stamps(redis_client, SETTINGS)
    stamps.commands(spec._replace(handoff_id="e" * 32))
    for command in stamps.commands(spec):
        redis_client.execute_command(*command)
    waiting = open_queue(redis_client, spec.queue)
    [job_id] = waiting.job_ids
    job = fetch(redis_client, waiting, job_id)
    assert job is not None
    assert (job.id, job.func_name, job.handoff_id) == (job_id, spec.function, spec.handoff_id)
    assert job.meta == {"state": "live", **spec.meta}
    assert (job.ttl, job.result_ttl, job.failure_ttl, job.timeout) == (900, 50, 500, -1)
    assert job.created_at == job.enqueued_at
    assert redis_client.smembers("rq:queues") == {f"rq:queue:{spec.queue}".encode()}
    assert 890 < redis_client.ttl(job.key) <= 900


def test_a_foreign_function_gets_no_stamp(redis_client: Redis) -> None:
    with pytest.raises(ValueError, match=r"os\.system is not a job of ours"):
        Stamps(redis_client, SETTINGS).commands(D._replace(function="os.system"))
