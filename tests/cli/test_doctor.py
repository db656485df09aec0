"""`crossfill doctor` on a good set-up and on broken ones: what it finds, what it says to do, how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pipeline.broker.address import Address
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.connect import ServerInfo, margin_bytes
from pipeline.broker.operator import Link
from pipeline.cli import doctor
from pipeline.settings import MIB, BrokerSettings, Settings
from tests.cli.rig import CONTRACT, D, P, Rig

pytestmark = [pytest.mark.usefixtures("server_url"), pytest.mark.parametrize("server_url", ["valkey"], indirect=True)]
BUDGET = Settings().broker.budget_bytes
ROOM = BUDGET + margin_bytes(BUDGET)


@pytest.fixture
def good(rig: Rig) -> Iterator[Rig]:
    """Two replicas of one contract on a broker with room and the right policy."""
    rig.client.config_set("maxmemory", ROOM)
    rig.register(P, D)
    yield rig
    rig.client.config_set("maxmemory-policy", "noeviction")


def _checks(rig: Rig) -> tuple[int, dict[str, Any]]:
    """Exit status, and level, finding and advice by the check's name; of a name that comes twice the worse one."""
    status, said = rig.run("doctor", "--json")
    rank = ["ok", "warn", "fail"]
    found: dict[str, Any] = {}
    for check in json.loads(said):
        if check["name"] not in found or rank.index(check["level"]) > rank.index(found[check["name"]]["level"]):
            found[check["name"]] = check
    return status, found


def _levels(found: dict[str, Any]) -> dict[str, str]:
    return {name: check["level"] for name, check in found.items() if check["level"] != "ok"}


def test_all_is_well(good: Rig) -> None:
    status, found = _checks(good)
    assert (status, _levels(found)) == (0, {})
    assert [*found] == [
        *("settings", "broker", "eviction", "memory", "latency", "link", "clock", "replicas", "page", "handoff"),
        *("queue", "budget", "handoffs"),
    ]
    assert found["handoff"]["found"] == f"tiny [{CONTRACT.digest[:8]}]: mlx-0, vllm-0 -> mlx-0, vllm-0"
    assert found["eviction"]["found"] == "noeviction"
    assert all(check["advice"] == "" for check in found.values())
    assert list(good.client.scan_iter("cf:probe:*")) == []


def test_the_table_says_the_same(good: Rig) -> None:
    status, said = good.run("doctor")
    assert status == 0
    assert [line.split()[:2] for line in said.splitlines() if line.startswith("ok")][:3] == [
        ["ok", "settings"],
        ["ok", "broker"],
        ["ok", "eviction"],
    ]


def test_wrong_eviction_policy(good: Rig) -> None:
    good.client.config_set("maxmemory-policy", "allkeys-lru")
    status, found = _checks(good)
    assert (status, _levels(found)) == (1, {"eviction": "fail"})
    assert found["eviction"]["found"] == "allkeys-lru"
    assert "set `maxmemory-policy noeviction`" in found["eviction"]["advice"]


def test_maxmemory_too_small_for_the_budget(good: Rig) -> None:
    good.client.config_set("maxmemory", 32 * MIB)
    status, found = _checks(good)
    assert (status, _levels(found)) == (1, {"memory": "fail"})
    assert found["memory"]["found"] == "maxmemory 32.0 MiB"
    assert f"needs {ROOM}: raise maxmemory or lower broker.budget_bytes" in found["memory"]["advice"]


def test_contract_mismatch_names_the_fields_side_by_side(good: Rig) -> None:
    other = replace(CONTRACT, weights="v" * 64, context_length=4096)
    good.register(replace(D, name="mac-1", contract=other, role="decode"))
    status, found = _checks(good)
    assert (status, _levels(found)) == (1, {"contracts": "fail", "prefill": "warn"})
    said = found["contracts"]
    assert (
        "mac-1 and mlx-0 differ in weights (vvvvvvvvvvvv... | wwwwwwwwwwww...), context_length (4096 | 2048)"
        in (said["found"])
    )
    assert "crossfill model digest A B" in said["advice"]


def test_no_decode_replica(rig: Rig) -> None:
    rig.client.config_set("maxmemory", ROOM)
    rig.register(replace(P, role="prefill"))
    status, found = _checks(rig)
    assert (status, _levels(found)) == (1, {"decode": "fail"})
    assert "no replica decodes; every request is answered with 503" in found["decode"]["found"]
    assert "--role decode" in found["decode"]["advice"]


def test_page_servers(good: Rig) -> None:
    """Two replicas on one that is well, one on one that is not there, one whose own does not answer it."""
    well = Address(good.url, BUDGET)
    good.register(replace(D, name="d-1", pages=well), replace(D, name="d-2", pages=well))
    status, found = _checks(good)
    assert (status, _levels(found)) == (0, {})
    assert found["pages"]["found"] == f"page server {good.url} of d-1, d-2: 0.0 MiB of 256.0 MiB in flight"
    good.register(replace(D, name="d-3", pages=Address("redis://127.0.0.1:9/0", BUDGET)))
    status, found = _checks(good)
    assert (status, _levels(found)) == (1, {"pages": "fail"})
    assert "page server redis://127.0.0.1:9/0 is unreachable" in found["pages"]["found"]
    assert found["pages"]["advice"].startswith("d-3 takes nothing new until it answers")


def test_a_page_server_that_its_replica_does_not_reach(good: Rig) -> None:
    lame = {"draining": 1, "page_server_down": 1}
    good.register(replace(D, name="d-1", pages=Address(good.url, BUDGET), load=lame))
    status, found = _checks(good)
    assert (status, _levels(found)) == (1, {"pages": "fail"})
    assert found["pages"]["found"] == f"page server {good.url}: d-1 cannot reach it"


def test_a_page_server_that_is_too_small(good: Rig) -> None:
    good.register(replace(D, name="d-1", pages=Address(good.url, 2 * BUDGET)))
    status, found = _checks(good)
    assert (status, _levels(found)) == (1, {"pages": "fail"})
    assert "raise maxmemory or lower pages_budget_bytes" in found["pages"]["advice"]


def test_unreachable_broker(rig: Rig) -> None:
    rig.url = "redis://:secret@127.0.0.1:9/0"
    status, found = _checks(rig)
    assert (status, [*found], _levels(found)) == (1, ["settings", "broker"], {"broker": "fail"})
    assert "check broker.url and that the server runs" in found["broker"]["advice"]
    assert "secret" not in str(found)


def test_no_replica_at_all(rig: Rig) -> None:
    status, found = _checks(rig)
    assert (status, _levels(found)) == (1, {"memory": "warn", "replicas": "fail"})
    assert "crossfill worker" in found["replicas"]["advice"]
    assert f"set `maxmemory {ROOM}` or more" in found["memory"]["advice"]


def test_a_queue_without_a_replica_and_one_that_is_too_long(good: Rig) -> None:
    good.registry.withdraw("mlx-0")
    good.ask()
    status, found = _checks(good)
    assert (status, _levels(found)["queue"]) == (1, "fail")
    assert found["queue"]["found"] == "decode.mlx-0: 1 waiting, 0 running"
    rows = [{"queue": "q", "queued": 9, "started": 1, "replicas": ["a", "b"]}]
    (check,) = doctor.waiting(rows, {"a": 4, "b": 4})
    assert (check.level, check.advice) == ("warn", "more than its 8 slots: add a replica, or raise slots")


def test_bytes_without_a_handoff_and_failed_handoffs_are_seen(good: Rig) -> None:
    good.client.set("cf:budget:total", 3 * MIB)
    handoff_id = good.ask()
    assert good.ledger.fail(handoff_id, ErrorInfo("engine_failed", "no", retryable=True, http_status=502))
    good.ledger.release(handoff_id)
    status, found = _checks(good)
    assert (status, _levels(found)) == (0, {"budget": "warn", "handoffs": "warn"})
    assert found["budget"]["found"] == "3.0 MiB in flight, 0 waiting, 0 live"
    assert found["handoffs"]["found"] == "1 ended lately, 1 failed: engine_failed"


def _levels_of(checks: list[doctor.Check]) -> list[str]:
    return [check.level for check in checks]


def test_a_slow_link_is_a_warning() -> None:
    assert _levels_of(doctor.link(Link(0.2, 500, 400))) == ["ok", "ok"]
    assert _levels_of(doctor.link(Link(30.0, 500, 400))) == ["warn", "ok"]
    assert _levels_of(doctor.link(Link(0.2, 500, 5))) == ["ok", "warn"]


def test_a_clock_that_is_off_is_a_warning() -> None:
    assert doctor.clock(-900).level == "ok"
    late = doctor.clock(-2500)
    assert (late.level, late.found) == ("warn", "this host is 2.50 s behind the broker")
    assert doctor.clock(61_000).found == "this host is 61.00 s ahead of the broker"


def test_an_old_server_fails() -> None:
    check = doctor.broker(ServerInfo("redis", (6, 2, 7), "r", 0, "noeviction"))
    assert (check.level, check.found, check.advice) == (
        "fail",
        "redis 6.2.7",
        "the broker is redis 6.2.7: 7.0 or newer is needed",
    )


def test_a_page_that_does_not_fit_the_budget_fails() -> None:
    size = CONTRACT.page_shape.page_bytes
    small = Settings(broker=BrokerSettings(budget_bytes=size - 1))
    assert doctor.page(P, Settings(broker=BrokerSettings(budget_bytes=3 * size))).level == "ok"
    check = doctor.page(P, small)
    assert (check.level, f"set budget_bytes to {size} or more" in check.advice) == ("fail", True)


def test_who_can_hand_over() -> None:
    def levels(*members: Any) -> list[tuple[str, str]]:
        return [(check.name, check.level) for check in doctor.serving(members)]

    assert levels(P, D) == [("handoff", "ok")]
    assert levels(replace(P, role="prefill"), replace(D, role="decode")) == [("handoff", "ok")]
    assert levels(P) == [("handoff", "warn")]
    assert levels(replace(D, role="decode")) == [("prefill", "warn")]
    assert levels(replace(D, role="decode", can_prefill=False)) == [("prefill", "fail")]
    assert levels(replace(P, load={"draining": 1}), replace(D, role="prefill")) == [("decode", "fail")]


def test_two_models_are_no_mistake() -> None:
    other = replace(D, model="qwen", contract=replace(CONTRACT, weights="q"))
    check = doctor.contracts([[P], [other]])
    assert (check.level, check.advice) == ("ok", "")
    assert "vllm-0 and mlx-0 differ in weights (wwwwwwwwwwww... | q)" in check.found
