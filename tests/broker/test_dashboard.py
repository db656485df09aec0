"""rq-dashboard over real jobs in every state: each page answers, shows the right numbers, and unpickles nothing."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

rq_serializers = pytest.importorskip("rq.serializers")
web = pytest.importorskip("rq_dashboard.web", reason="the dashboard extra is not installed")

from pipeline.broker import queue  # noqa: E402
from pipeline.broker.connect import connect  # noqa: E402
from pipeline.broker.dashboard import create_app  # noqa: E402
from pipeline.broker.queue import PREFILL_JOB, JobSpec  # noqa: E402
from pipeline.broker.worker import ConcurrentWorker  # noqa: E402
from pipeline.errors import EngineError, HandoffCancelledError  # noqa: E402
from pipeline.settings import BrokerSettings  # noqa: E402

NAME = "prefill.vllm.0a1b2c3d"
REGISTRIES = ("queued", "started", "finished", "failed", "canceled", "deferred", "scheduled")
Get = Callable[[str], Any]


@pytest.fixture
def get(server_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Get]:
    """The app's pages; RQ's process-wide default is put back afterwards."""
    monkeypatch.setattr(rq_serializers, "PickleSerializer", rq_serializers.PickleSerializer)
    monkeypatch.setattr(web.config, "serializer", web.config.serializer)
    app = create_app(server_url)
    browser = app.test_client()

    def get(path: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rq-dashboard's own code
            answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.get_data(as_text=True)[:500])
        return answer.get_json() if path.endswith(".json") else answer.get_data(as_text=True)

    yield get
    app.redis_conn.close()


def _work(gate: threading.Event) -> Callable[[str], Mapping[str, object]]:
    def handle(handoff_id: str) -> Mapping[str, object]:
        if handoff_id == "bad":
            raise EngineError("no kernel")
        if handoff_id == "gone":
            raise HandoffCancelledError("the client is gone")
        if handoff_id.startswith("slow"):
            gate.wait(60)
        return {"pages": 3}

    return handle


@pytest.fixture
def jobs(server_url: str, redis_client: Redis) -> Iterator[dict[str, str]]:
    """One job finished, one failed, one cancelled, two started and one queued behind them, on a worker at work."""
    gate = threading.Event()
    names = ("good", "bad", "gone", "slow-1", "slow-2", "waiting")
    with connect(server_url) as client, client.pipeline() as pipe:
        meta = {"model": "m"}
        ids = {
            name: queue.enqueue(pipe, client, JobSpec(NAME, PREFILL_JOB, name, meta), BrokerSettings())
            for name in names
        }
        pipe.execute()
        handlers = {PREFILL_JOB: _work(gate)}
        worker = ConcurrentWorker(
            NAME, client, handlers, slots=2, name="vllm-0", settings=BrokerSettings(), poll_s=0.05
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            deadline = time.monotonic() + 20
            while worker.running != 2 or queue.queue_lengths(client, [NAME]) != {NAME: 1}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield ids
        finally:
            gate.set()
            worker.request_stop()
            thread.join(60)


def test_the_queue_list_counts_every_state(get: Get, jobs: dict[str, str]) -> None:
    (row,) = get("/rq/0/data/queues.json")["queues"]
    counts = {name: row[f"{name}_job_registry_count"] for name in REGISTRIES[1:]}
    assert (row["name"], row["count"]) == (NAME, 1)
    assert counts == {"started": 2, "finished": 1, "failed": 1, "canceled": 1, "deferred": 0, "scheduled": 0}
    assert "queues" in get("/rq/")


def test_every_list_of_jobs_shows_its_jobs(get: Get, jobs: dict[str, str]) -> None:
    expected = {
        "queued": ["waiting"],
        "started": ["slow-1", "slow-2"],
        "finished": ["good"],
        "failed": ["bad"],
        "canceled": ["gone"],
        "deferred": [],
        "scheduled": [],
    }
    for registry in REGISTRIES:
        assert "<html" in get(f"/rq/0/view/jobs/{NAME}/{registry}/8/asc/1")
        listed = get(f"/rq/0/data/jobs/{NAME}/{registry}/8/asc/1.json")["jobs"]
        assert sorted(job["description"] for job in listed) == [f"prefill {name}" for name in expected[registry]]
        assert {job["id"] for job in listed} == {jobs[name] for name in expected[registry]}


@pytest.mark.parametrize(("name", "status", "result", "why", "meta"), [
    ("good", "finished", {"pages": 3}, None, {"state": "live", "pages": 3}),
    ("bad", "failed", None, "EngineError: no kernel", {"state": "failed", "error": "engine_failed"}),
    ("gone", "canceled", None, "the client is gone", {"state": "cancelled"}),
    ("slow-1", "started", None, None, {"state": "live"}),
    ("waiting", "queued", None, None, {"state": "live"}),
])  # fmt: skip
def test_the_page_of_one_job(
    get: Get, jobs: dict[str, str], name: str, status: str, result: object, why: str | None, meta: dict[str, object]
) -> None:
    assert "<html" in get(f"/rq/0/view/job/{jobs[name]}")
    page = get(f"/rq/0/data/job/{jobs[name]}.json")
    assert (page["status"], page["result"]) == (status, result)
    assert json.loads(page["metadata"]) == {"model": "m"} | meta
    assert (why in page["exc_info"]) if why else page["exc_info"] is None


def test_the_worker_is_shown_busy(get: Get, jobs: dict[str, str]) -> None:
    (row,) = get("/rq/0/data/workers.json")["workers"]
    assert (row["queues"], row["state"], row["pid"]) == ([NAME], "busy", os.getpid())
    assert row["name"].startswith("vllm-0.")
    assert row["current_job"]["job_id"] in (jobs["slow-1"], jobs["slow-2"])
    assert "<html" in get("/rq/0/view/workers")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_planted_pickle_is_not_loaded_by_any_page(get: Get, redis_client: Redis, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    fields: dict[str, str | bytes] = {
        "created_at": "2026-01-01T00:00:00.000000Z",
        "status": "queued",
        "origin": NAME,
        "description": "planted",
    }
    for field, value in (fields | dict.fromkeys(("data", "meta", "result"), bomb)).items():
        redis_client.hset("rq:job:planted", field, value)
    redis_client.sadd("rq:queues", f"rq:queue:{NAME}")
    redis_client.rpush(f"rq:queue:{NAME}", "planted")
    get("/rq/0/data/queues.json")
    assert len(get(f"/rq/0/data/jobs/{NAME}/queued/8/asc/1.json")["jobs"]) == 1
    get("/rq/0/view/job/planted")
    assert list(tmp_path.iterdir()) == []


def test_jobs_cannot_be_deleted_from_it(server_url: str, get: Get, jobs: dict[str, str], redis_client: Redis) -> None:
    app = create_app(server_url)
    answer = app.test_client().post(f"/rq/job/{jobs['good']}/delete")
    app.redis_conn.close()
    assert answer.get_json() == {"status": "DISABLED"}
    assert redis_client.exists(f"rq:job:{jobs['good']}") == 1


def test_the_root_leads_to_it(server_url: str, get: Get) -> None:
    app = create_app(server_url)
    answer = app.test_client().get("/")
    app.redis_conn.close()
    assert (answer.status_code, answer.headers["Location"]) == (302, "/rq/")
