"""Fleet: command lines, environments, order of the end. The children are small scripts in place of `python`."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import config
from pipeline.cli.fleet import API, Fleet, StartError
from pipeline.errors import ConfigError
from tests.ports import free_port

RECORDER = """#!{python}
import json, os, signal, sys, time
name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else "api"
def end(*_):
    with open({log!r}, "a") as log: log.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(json.dumps([sys.argv[1:], os.environ.get("OMP_NUM_THREADS"), os.environ["GIVEN"]]), flush=True)
time.sleep(600)
"""


def tree(python: Path, port: int, **broker: Any) -> config.Tree:
    worker = {"engine": "reference", "model": "m", "python": str(python)}
    return {
        "broker": broker,
        "api": {"model": "m", "port": port},
        "workers": [worker | {"name": "a"}, worker | {"name": "b"}],
    }


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(RECORDER.format(python=sys.executable, log=str(tmp_path / "ends")))
    script.chmod(0o755)
    return script


@pytest.fixture
def fleet(tmp_path: Path, recorder: Path) -> Iterator[Fleet]:
    settings = config.load(None, {}, tree(recorder, free_port(), url="redis://127.0.0.1:9/0"))
    made = Fleet(settings, tmp_path / "run", {"GIVEN": "yes", "PATH": "/usr/bin:/bin"})
    yield made
    made.stop(grace_s=5.0)


def output_of(fleet: Fleet, name: str) -> Any:
    each = next(child for child in fleet.children if child.name == name)
    while not (text := each.tail()):
        assert each.status is None
    return json.loads(text.splitlines()[0])


def test_workers_get_the_resolved_settings_and_their_environment(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    argv, threads, given = output_of(fleet, "b")
    file = tmp_path / "run/settings.json"
    assert argv[:2] == ["-m", "pipeline"]
    assert argv[2:7] == ["worker", "--config", str(file), "--name", "b"]
    assert argv[7] == "--parent"
    assert given == "yes"
    assert threads == ("1" if sys.platform == "linux" else None)
    assert config.load(file, {}) == fleet.settings


def test_a_broker_given_by_url_is_used_and_none_is_started(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    assert fleet.settings.broker.url == "redis://127.0.0.1:9/0"
    assert not (tmp_path / "run/broker").exists()


def test_without_a_url_an_own_broker_is_started_and_ended(tmp_path: Path, recorder: Path) -> None:
    fleet = Fleet(config.load(None, {}, tree(recorder, free_port())), tmp_path / "run", {"GIVEN": ""})
    try:
        fleet.start()
        port = int(fleet.settings.broker.url.rpartition(":")[2].removesuffix("/0"))
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(16) == b"+PONG\r\n"
    finally:
        fleet.stop(grace_s=5.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_stop_ends_all_and_is_idempotent(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    output_of(fleet, "a")
    output_of(fleet, "b")
    children = fleet.children
    assert [child.name for child in children] == ["a", "b", API]
    assert fleet.stop(grace_s=30.0) == []
    assert all(child.status is not None for child in children)
    assert sorted((tmp_path / "ends").read_text().split()) == ["a", "b"]
    assert fleet.children == []
    assert fleet.stop() == []


def test_a_child_that_ends_before_it_is_ready_is_reported_with_its_log(fleet: Fleet, recorder: Path) -> None:
    recorder.write_text(f"#!{sys.executable}\nprint('no such engine'); raise SystemExit(2)\n")
    fleet.start()
    with pytest.raises(StartError, match=r"(?s)(a|b) ended with status 2; the end of .*no such engine"):
        for _ in fleet.wait_ready(60.0):
            pass


def test_a_dead_worker_is_buried_and_the_rest_serves(
    fleet: Fleet, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(recorder))  # an API that lives: there is no model for a real one
    fleet.start()
    a, b, _ = fleet.children
    assert fleet.serves
    a.kill()
    assert a.join(60.0)
    assert a in fleet.dead()
    fleet.bury(a)
    assert a not in fleet.children
    b.kill()
    assert b.join(60.0)
    assert not fleet.serves


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, recorder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fleet = Fleet(config.load(None, {}, tree(recorder, port)), tmp_path / "run", {})
        with pytest.raises(ConfigError, match=rf"api\.port: cannot listen on 127\.0\.0\.1:{port}"):
            fleet.start()
    assert fleet.children == []


def test_an_absent_interpreter_is_named(tmp_path: Path) -> None:
    settings = config.load(None, {}, tree(tmp_path / "none", free_port(), url="redis://127.0.0.1:9/0"))
    fleet = Fleet(settings, tmp_path / "run", {})
    with pytest.raises(ConfigError, match=r"workers: a: python = .*none does not exist"):
        fleet.start()


@pytest.mark.parametrize(("missing", "message"), [("api", "api.model"), ("workers", "workers: none")])
def test_incomplete_settings_are_refused(tmp_path: Path, recorder: Path, missing: str, message: str) -> None:
    incomplete = tree(recorder, 1)
    del incomplete[missing]
    with pytest.raises(ConfigError, match=message):
        Fleet(config.load(None, {}, incomplete), tmp_path, {})
