"""The ACL rule that docs/security.md gives is enough for everything Crossfill does, and for nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from pipeline.broker.embedded import EmbeddedServer
from tests.ports import free_port
from tests.scenarios.system import System, system, worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PASSWORD = "a password"
BUDGET = 1 << 20
ROUTE = "reference->reference"


def _rule() -> list[str]:
    """The words after the user's name in the line that the page tells operators to use."""
    page = Path("docs/security.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^user crossfill (.+)$", page, re.MULTILINE)
    return [word.replace(">PASSWORD", f">{PASSWORD}") for word in line.split()]


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A server where strangers may do nothing and `crossfill` what the page says; the client is the operator's."""
    with EmbeddedServer(tmp_path_factory.mktemp("broker"), BUDGET) as url, Redis.from_url(url) as operator:
        operator.execute_command("ACL", "SETUSER", "crossfill", *_rule())
        operator.execute_command("ACL", "SETUSER", "operator", "on", ">operator", "~*", "&*", "+@all")
        port = operator.connection_pool.connection_kwargs["port"]
        with Redis(port=port, username="operator", password="operator") as client:
            client.execute_command("ACL", "SETUSER", "default", "off")
            yield client


@pytest.fixture(scope="module")
def url(admin: Redis) -> str:
    port = admin.connection_pool.connection_kwargs["port"]
    return f"redis://crossfill:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def guarded(admin: Redis, url: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    small = {"chunk_tokens": 64}
    settings = {
        "api": {"model": tiny_model, "port": free_port()},
        "broker": {"url": url, "budget_bytes": BUDGET},
        "workers": [
            worker(role, "reference", tiny_model, role, engine_settings=small) for role in ("prefill", "decode")
        ],
    }
    with system(settings, tmp_path_factory.mktemp("guarded")) as running:
        yield running


def test_the_rule_is_enough_for_a_handoff_and_a_cancel(guarded: System, admin: Redis) -> None:
    prompt = [5 + i for i in range(200)]
    answer = guarded.complete(prompt, ROUTE)
    assert (answer.finish, answer.trace["imported_tokens"]) == ("length", 199)
    body = {"model": guarded.model, "prompt": prompt, "max_tokens": 700, "ignore_eos": True, "stream": True}
    with guarded.http.stream("POST", "/v1/completions", json=body, headers={"X-Crossfill-Route": ROUTE}) as stream:
        assert next(stream.iter_lines()).startswith("data: {")
    guarded.settled()
    left, _ = guarded.http.get("/handoffs", params={"recent": 2}).json()["handoffs"]
    assert left["state"] == "cancelled"
    assert admin.acl_log() == []


@pytest.mark.parametrize(
    "command", [["CONFIG", "GET", "*"], ["FLUSHALL"], ["KEYS", "*"], ["SET", "elsewhere", "1"], ["ACL", "LIST"]]
)
def test_the_rule_is_not_enough_for_more(admin: Redis, url: str, command: list[str]) -> None:
    with Redis.from_url(url) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


def test_nobody_comes_in_without_a_password(admin: Redis, url: str) -> None:
    port = admin.connection_pool.connection_kwargs["port"]
    with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
