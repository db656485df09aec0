"""rq-dashboard against the running broker: every queue and job is listed without an error."""

from __future__ import annotations

import pytest

from pipeline.broker.dashboard import create_app
from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_queues_and_jobs_are_listed(cheap: System) -> None:
    cheap.complete([5, 6, 7] * 50, "reference->reference")
    page = create_app(cheap.fleet.settings.broker.url).test_client()
    queues = page.get("/rq/0/data/queues.json").get_json()["queues"]
    names = {queue["name"]: queue for queue in queues}
    prefill = next(name for name in names if name.startswith("prefill.reference."))
    assert "decode.ref-d" in names
    for name in (prefill, "decode.ref-d"):
        assert names[name]["finished_job_registry_count"] >= 1
        for state in ("queued", "started", "finished", "failed"):
            answer = page.get(f"/rq/0/data/jobs/{name}/{state}/8/asc/1.json")
            assert answer.status_code == 200, (name, state)
        jobs = page.get(f"/rq/0/data/jobs/{name}/finished/8/asc/1.json").get_json()["jobs"]
        assert page.get(f"/rq/0/data/job/{jobs[0]['id']}.json").status_code == 200
    workers = {w["name"] for w in page.get("/rq/0/data/workers.json").get_json()["workers"]}
    assert {"ref-p.prefill", "ref-d.decode"} <= {name.rpartition(".")[0] for name in workers}
