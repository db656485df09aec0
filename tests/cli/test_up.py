"""`crossfill up` and `crossfill demo` as a user runs them, on the reference engine. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.cli.client import fetch
from pipeline.sample import tiny
from tests.cli.process import alive
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PID = re.compile(r"^(\w[\w-]*): starting \(pid (\d+), log ", re.MULTILINE)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("up") / "tiny-llama")


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    port = free_port()
    worker = f'engine = "reference"\nmodel = "{model}"\n'
    file = tmp_path / "crossfill.toml"
    file.write_text(
        f'[api]\nmodel = "{model}"\nport = {port}\n'
        f'[[workers]]\nname = "p"\nrole = "prefill"\n{worker}'
        f'[[workers]]\nname = "d"\nrole = "decode"\n{worker}'
    )
    return file


def command(name: str, config: Path) -> list[str]:
    flags = ["--config", str(config), "--run-dir", str(config.parent / "run")]
    return [sys.executable, "-m", "pipeline", name, *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


@contextmanager
def running(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`up` once it says that it serves, and what it has printed so far."""
    with subprocess.Popen(
        command("up", config), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        try:
            printed = ""
            while "Ctrl-C stops everything" not in printed:
                line = up.stdout.readline()
                assert line, printed
                printed += line
            yield up, printed
        finally:
            up.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_stops_in_order(config: Path, number: signal.Signals) -> None:
    with running(config) as (up, printed):
        pids = {name: int(pid) for name, pid in PID.findall(printed)}
        assert sorted(pids) == ["api", "d", "p"]
        url = re.search(r"serves at (\S+)/v1", printed)
        assert url
        status = fetch(f"{url[1]}/status")
        assert status
        assert sorted(replica["name"] for replica in status["replicas"]) == ["d", "p"]
        up.send_signal(number)
        rest, _ = up.communicate()
    assert up.returncode == 0, rest
    assert rest.splitlines()[-2:] == ["stopping: API, workers, broker", "stopped"]
    assert [name for name, pid in pids.items() if alive(pid)] == []


def test_the_curl_command_that_up_prints_works(config: Path) -> None:
    with running(config) as (_, printed):
        line = next(line for line in printed.splitlines() if line.startswith("curl "))
        done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"finish_reason"' in done.stdout


def test_a_killed_up_takes_everything_along(config: Path) -> None:
    with running(config) as (up, printed):
        pids = [int(pid) for _, pid in PID.findall(printed)]
        assert all(map(alive, pids))
        up.kill()
        up.wait()
    while any(map(alive, pids)):  # the kernel does it; the test's timeout bounds this
        pass


def test_a_worker_that_dies_is_reported_and_comes_back_while_the_api_goes_on(config: Path) -> None:
    with running(config) as (up, printed):
        pids = {name: int(pid) for name, pid in PID.findall(printed)}
        url = re.search(r"serves at (\S+)/v1", printed)
        assert url
        before = _started(url[1])
        os.kill(pids["p"], signal.SIGKILL)
        assert up.stdout is not None
        assert up.stdout.readline().startswith("p ended with signal SIGKILL; the end of ")
        while "p is started again" not in up.stdout.readline():
            pass
        while _started(url[1]).get("p", before["p"]) == before["p"]:  # the test's timeout bounds this
            time.sleep(0.1)
        assert _started(url[1])["d"] == before["d"]
        assert alive(pids["api"])
        assert alive(pids["d"])


def _started(url: str) -> dict[str, int]:
    """When each replica that is alive was started, by the broker's clock."""
    status = fetch(f"{url}/status") or {"replicas": []}
    return {replica["name"]: replica["started_ms"] for replica in status["replicas"]}


def test_a_worker_that_cannot_start_ends_up_with_its_log(config: Path) -> None:
    config.write_text(config.read_text().replace('engine = "reference"', 'engine = "nonsense"', 1))
    done = subprocess.run(command("up", config), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "start_failed: p ended with status 2; the end of " in done.stderr
    assert "config_invalid: unknown engine 'nonsense'" in done.stderr
    assert done.stdout.splitlines()[-1] == "stopped"


def test_demo_shows_a_handoff_and_stops(config: Path) -> None:
    argv = [*command("demo", config), "--max-tokens", "8"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    title = re.search(
        r"^reference -> reference, (\d+) pages, [\d.]+ MiB, (\d+) prompt tokens: (\d+) imported, 0 reused$",
        done.stdout,
        re.MULTILINE,
    )
    assert title, done.stdout
    pages, prompt, imported = map(int, title.groups())
    assert imported == prompt - 1
    assert pages == -(-imported // 64)
    assert done.stdout.splitlines()[-1] == "demo done"
