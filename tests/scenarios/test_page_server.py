"""Two real servers, one of them the decode replica's own behind a password: pages cross there, control stays small."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from pipeline.broker import stream
from pipeline.broker.embedded import EmbeddedServer
from tests.faults.rig import page
from tests.ports import free_port
from tests.proxy import Proxy
from tests.scenarios.conftest import LEASE_S
from tests.scenarios.system import System, eventually, system, worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PROMPT = [(17 * i) % 900 + 20 for i in range(1900)]
ROUTE = "reference->reference"
PAGES = 30  # of the 1,899 tokens that move
BUDGET = 1 << 18  # eight pages


class Beside:
    """The page server, behind a hop. It wants its password again whenever it starts."""

    def __init__(self, directory: Path) -> None:
        self.password = secrets.token_hex(8)
        port = free_port()
        self.server = EmbeddedServer(directory, BUDGET, port=port)
        self.hop = Proxy(port)

    def start(self) -> None:
        with Redis.from_url(self.server.start()) as client:
            client.config_set("requirepass", self.password)

    @contextmanager
    def client(self) -> Iterator[Redis]:
        with Redis(port=self.server._port or 0, password=self.password) as found:
            yield found

    def calls(self) -> dict[str, int]:
        with self.client() as found:
            return _calls(found)


def _calls(client: Redis) -> dict[str, int]:
    """How many pages were taken in, and bytes in and out."""
    seen: dict[str, Any] = client.info("everything")
    return {
        "pages": seen.get("cmdstat_xdel", {}).get("calls", 0),
        "in": seen["total_net_input_bytes"],
        "out": seen["total_net_output_bytes"],
    }


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    found = Beside(tmp_path_factory.mktemp("beside"))
    found.start()
    with found.hop:
        yield found
    found.server.stop()


@pytest.fixture(scope="module")
def pair(tiny_model: Path, beside: Beside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder, engine = tmp_path_factory.mktemp("pair"), {"chunk_tokens": 64}
    shared = {"lease_s": LEASE_S, "engine_settings": engine}
    settings = {
        "api": {"model": tiny_model, "port": free_port()},
        "broker": {"budget_bytes": 1 << 20, "pages_password": beside.password},
        "routing": {"policy": "handoff"},
        "handoff": {"queue_s": 60, "accept_s": 60, "progress_s": 60, "retries": 0},
        "workers": [
            worker("ref-p", "reference", tiny_model, "prefill", **shared),
            worker(
                "ref-d",
                "reference",
                tiny_model,
                "decode",
                pages_url=beside.hop.url,
                pages_budget_bytes=BUDGET,
                **shared,
            ),
        ],
    }
    with system(settings, folder) as running:
        yield running


def _at_rest(pair: System, beside: Beside) -> None:
    pair.settled()
    with beside.client() as client:
        eventually(lambda: not any(b"{" in key for key in client.scan_iter("*")))
        assert stream.gauges(client) == (0, 0, 0)


def test_pages_cross_the_page_server_and_none_the_broker(pair: System, beside: Beside) -> None:
    before, control = beside.calls(), _calls(pair.broker)
    answer = pair.complete(PROMPT, ROUTE, max_tokens=4)
    after, control_after = beside.calls(), _calls(pair.broker)
    moved = answer.trace["bytes"]
    assert answer.trace["pages"] == after["pages"] - before["pages"] == PAGES
    assert control_after["pages"] == control["pages"] == 0
    assert after["in"] - before["in"] > moved
    assert after["out"] - before["out"] > moved
    print({name: control_after[name] - control[name] for name in control}, {n: after[n] - before[n] for n in after})
    assert control_after["in"] - control["in"] < moved / 2  # jobs, heartbeats and the prompt's token ids
    assert answer.text == pair.complete(PROMPT, "local:reference", max_tokens=4).text
    assert pair.status()["page_servers"][0]["budget_bytes"] == BUDGET
    assert beside.password not in str(pair.status())
    _at_rest(pair, beside)


def test_the_page_server_is_killed_in_the_midst(pair: System, beside: Beside) -> None:
    """The answer is the same; its replica is unready until the server is back, and nothing is left on either."""
    expected = pair.complete(PROMPT, "local:reference", max_tokens=4).text
    with ThreadPoolExecutor(1) as pool, beside.client() as client:
        with beside.hop.hold(page(6)) as held:
            asked = pool.submit(pair.complete, PROMPT, ROUTE, max_tokens=4)
            assert held.wait(60), "there is no sixth page"
            assert stream.gauges(client).in_flight_bytes > 0
            assert beside.server.pid is not None
            os.kill(beside.server.pid, signal.SIGKILL)
        answer = asked.result(120)
    assert answer.text == expected
    assert answer.trace["recomputed"] == "page_server_unavailable"
    eventually(lambda: pair.http.get("/ready").status_code == 503)
    refused = pair.post(PROMPT, "auto", max_tokens=4)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    (shown,) = pair.status()["page_servers"]
    assert (shown["up"], shown["error"]) == (False, "ref-d cannot reach it")
    beside.server.stop()
    beside.start()
    eventually(lambda: pair.http.get("/ready").status_code == 200)
    assert pair.complete(PROMPT, ROUTE, max_tokens=4).trace["pages"] == PAGES
    _at_rest(pair, beside)
