"""The two pages for operators, in a real browser on a running system: what they show, and that hostile names stay text.

`CROSSFILL_SCREENSHOTS=DIR` keeps pictures of them (those in docs/images were made so).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from werkzeug.serving import make_server

from pipeline.broker import dashboard, queue
from pipeline.broker.connect import connect
from pipeline.broker.queue import PREFILL_JOB, JobSpec
from pipeline.broker.registry import Registry, Replica
from pipeline.broker.worker import ConcurrentWorker
from pipeline.contract import Contract
from pipeline.errors import EngineError
from pipeline.settings import BrokerSettings
from tests.browser import Browser, browser
from tests.scenarios.system import System, eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
HOSTILE = "<img src=x onerror=document.title='pwned'>"
CONTRACT = Contract("w", "t", "c", layers=1, kv_heads=1, head_dim=8, vocab_size=64, context_length=128)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


def _picture(chromium: Browser, name: str) -> None:
    if directory := os.environ.get("CROSSFILL_SCREENSHOTS"):
        chromium.screenshot(Path(directory) / f"{name}.png")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_dashboard_shows_what_went_on(cheap: System, chromium: Browser, dark: bool) -> None:
    answers = [cheap.complete([5, 6, 7] * 60, "reference->reference") for _ in range(2)]
    cheap.complete([5, 6, 7] * 20, "local:reference") if not dark else None
    newest = cheap.settled() and cheap.http.get("/handoffs?recent=1").json()["handoffs"][0]
    handoff_id = newest["handoff_id"] if dark else answers[-1].trace["handoff_id"]
    chromium.errors.clear()
    chromium.open(f"{cheap.url}/dashboard#{handoff_id}", dark=dark)
    chromium.wait("document.querySelectorAll('.bars .track').length >= 3")
    chromium.wait("document.querySelector('#link').textContent === 'live'")
    assert {"ref-p", "ref-d"} <= set(chromium.text("#replicas").split())
    assert "decode.ref-d" in chromium.text("#queues")
    rows = chromium.text("#handoffs")
    assert handoff_id[:12] in rows
    assert "reference → reference" in rows
    detail = chromium.text("#detail")
    assert handoff_id in detail
    assert "3 pages" in detail
    assert "ref-p" in detail
    labels = chromium.evaluate("[...document.querySelectorAll('.bars > span:nth-child(3n+1)')].map(e => e.innerText)")
    assert labels == ["queue", "D makes room", "prefill", "pages out", "wire", "import", "commit to first token"]
    chromium.evaluate("document.querySelectorAll('.zoom button')[1].click()")
    chromium.wait("document.querySelector('.bars').innerText.includes('decode')")
    _require_bars_in_order(cheap, chromium, handoff_id)
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 25)" if dark else "rgb(246, 247, 249)")
    assert chromium.errors == []
    _picture(chromium, f"dashboard-{'dark' if dark else 'light'}")


def _require_bars_in_order(system: System, chromium: Browser, handoff_id: str) -> None:
    """Each bar lies where the trace's marks say, in hundredths of the whole."""
    marks = system.http.get(f"/handoffs/{handoff_id}").json()["marks_ms"]
    last = max(marks.values())
    drawn = chromium.evaluate(
        "[...document.querySelectorAll('.track i')].map(e => [parseFloat(e.style.left), parseFloat(e.style.width)])"
    )
    prefill = (marks["prefill_started"] / last * 100, (marks["prefill_ended"] - marks["prefill_started"]) / last * 100)
    decode = (marks["first_token"] / last * 100, (marks["finished"] - marks["first_token"]) / last * 100)
    assert drawn[2] == pytest.approx(prefill, abs=0.1)
    assert drawn[-1] == pytest.approx(decode, abs=0.1)


def test_a_click_opens_a_handoff_and_a_stranger_is_said(cheap: System, chromium: Browser) -> None:
    trace = cheap.complete([9, 8, 7] * 60, "reference->reference").trace
    chromium.open(f"{cheap.url}/dashboard")
    chromium.wait(f"document.querySelector('tr[data-id=\"{trace['handoff_id']}\"]') !== null")
    assert chromium.evaluate("document.querySelector('#detail').hidden") is True
    chromium.evaluate(f"document.querySelector('tr[data-id=\"{trace['handoff_id']}\"] button').click()")
    chromium.wait(f"document.querySelector('#detail').innerText.includes('{trace['handoff_id']}')")
    chromium.evaluate(f"location.hash = '{'f' * 32}'")
    chromium.wait("document.querySelector('#detail').innerText.startsWith('Nothing is known of handoff ffff')")


def test_names_of_other_machines_stay_text(cheap: System, chromium: Browser) -> None:
    registry = Registry(cheap.broker)
    registry.register(Replica(HOSTILE, HOSTILE, "both", HOSTILE, CONTRACT, slots=1, started_ms=0), 60)
    try:
        chromium.errors.clear()
        chromium.open(f"{cheap.url}/dashboard")
        chromium.wait("document.querySelector('#replicas').innerText.includes('onerror')")
        assert chromium.evaluate("document.title") == "Crossfill"
        assert chromium.evaluate("document.querySelectorAll('img').length") == 0
        assert HOSTILE in chromium.text("#replicas")
        assert chromium.errors == []
    finally:
        registry.withdraw(HOSTILE)
        cheap.broker.srem("rq:queues", f"rq:queue:decode.{HOSTILE}")


def test_the_page_says_when_the_api_is_gone(cheap: System, chromium: Browser) -> None:
    chromium.open(f"{cheap.url}/dashboard")
    chromium.wait("document.querySelector('#link').textContent === 'live'")
    chromium.evaluate("window.fetch = async () => { throw new Error('connection refused') }")
    chromium.wait("document.querySelector('#link').className === 'lost'")
    assert chromium.text("#link") == "connection refused"


# -- rq-dashboard


@pytest.fixture
def rq_page(cheap: System) -> Iterator[str]:
    """`crossfill dashboard`'s application on a port, on a broker of its own database of jobs."""
    import rq.serializers

    before = rq.serializers.PickleSerializer
    server = make_server("127.0.0.1", 0, dashboard.create_app(cheap.fleet.settings.broker.url), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{dashboard.PREFIX}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        rq.serializers.PickleSerializer = before


@pytest.fixture
def jobs(cheap: System) -> Iterator[str]:
    """A queue with one job queued, started, finished and failed each, by a worker of ours."""
    name, gate, url = "prefill.demo", threading.Event(), cheap.fleet.settings.broker.url
    settings = BrokerSettings(url=url)

    def handle(handoff_id: str) -> dict[str, object]:
        if handoff_id.startswith("bad"):
            raise EngineError("the device is out of memory")
        if handoff_id.startswith("slow"):
            gate.wait(600)
        return {"outcome": "sent", "pages": 3, "bytes": 2_359_296}

    with connect(url) as client:
        worker = ConcurrentWorker(
            name, client, {PREFILL_JOB: handle}, slots=1, name="demo.prefill", settings=settings, poll_s=0.1
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            for handoff in ("good", "bad", "slow", "next"):
                _enqueue(client, name, f"{handoff}-{secrets.token_hex(4)}", settings)
            eventually(lambda: _lengths(client, name) == [1, 1, 1, 1])
            yield name
        finally:
            gate.set()
            worker.request_stop()
            thread.join(60)
            _forget(client, name)


def _enqueue(client: Redis, name: str, handoff_id: str, settings: BrokerSettings) -> None:
    meta = {"model": "tiny", "route": "vllm->mlx"}
    with client.pipeline() as pipe:
        queue.enqueue(pipe, client, JobSpec(name, PREFILL_JOB, handoff_id, meta), settings)
        pipe.execute()


def _lengths(client: Redis, name: str) -> list[int]:
    from pipeline.broker.tally import tallies

    return [*tallies(client, [name])[name][:4]]


def _forget(client: Redis, name: str) -> None:
    """Nothing of it stays for other tests."""
    for key in [*client.scan_iter(f"rq:*{name}*")]:
        client.unlink(key)
    client.srem("rq:queues", f"rq:queue:{name}")


def test_rq_dashboard_shows_jobs_in_every_state(rq_page: str, jobs: str, chromium: Browser) -> None:
    chromium.open(f"{rq_page}/0/view/queues", width=1560, height=560)
    counts = "[...document.querySelectorAll('tr')].filter(r => r.innerText.startsWith('prefill.demo'))[0]?.innerText"
    shown = chromium.wait(counts)
    assert shown.split()[:7] == ["prefill.demo", "1", "0", "0", "1", "1", "1"]  # the zeros: deferred, scheduled
    _picture(chromium, "rq-dashboard-queues")
    for state, job in (("failed", "bad"), ("finished", "good"), ("started", "slow"), ("queued", "next")):
        chromium.open(f"{rq_page}/0/view/jobs/{jobs}/{state}/8/desc/1", width=1560, height=560)
        chromium.wait(f"document.body.innerText.includes('prefill {job}-')")
        if state == "failed":
            _picture(chromium, "rq-dashboard-failed")
