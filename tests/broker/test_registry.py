"""The replica registry: alive means a lease by the server's clock; one process per name."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from redis import Redis

from pipeline.broker import keys
from pipeline.broker import registry as registries
from pipeline.broker.address import Address
from pipeline.broker.registry import Registry, Replica
from pipeline.contract import Contract
from pipeline.errors import ConfigError, StaleAttemptError

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
VLLM = Replica(
    name="vllm-0",
    engine="vllm",
    role="both",
    model="tiny",
    contract=CONTRACT,
    slots=16,
    started_ms=1_700_000_000_000,
    can_prefill=True,
    needs_first_token=False,
    max_running=8,
    features=frozenset({"logprobs", "n"}),
    stats={"running": 1, "free_pages": 7},
    load={"prefill_running": 0, "decode_running": 1},
)
MLX = replace(
    VLLM, name="mlx-0", engine="mlx", role="decode", stats={}, load={}, pages=Address("redis://mac:6379/0", 1 << 28)
)
LONG_S = 60.0


def _let_expire(client: Redis, name: str) -> None:
    client.pexpire(keys.replica(name), 1)
    while client.exists(keys.replica(name)):
        time.sleep(0.002)


def test_encoding_keeps_everything() -> None:
    for replica in (VLLM, MLX):
        assert registries.decode(registries.encode(replica), '{"a": 1}', '{"b": 2}') == replace(
            replica, stats={"a": 1}, load={"b": 2}
        )


def test_a_record_of_an_older_version_promises_no_features_and_no_page_server() -> None:
    fields = json.loads(registries.encode(MLX))
    assert fields.pop("features") == ["logprobs", "n"]
    assert fields.pop("pages") == ["redis://mac:6379/0", 1 << 28]
    found = registries.decode(json.dumps(fields), "{}", "{}")
    assert (found.features, found.pages) == (frozenset(), None)


def test_what_is_registered_is_listed_by_name(redis_client: Redis) -> None:
    mine, other = Registry(redis_client), Registry(redis_client)
    mine.register(VLLM, LONG_S)
    other.register(MLX, 30.0)
    assert Registry(redis_client).list() == [MLX, VLLM]
    assert [mine.holder("vllm-0"), mine.holder("mlx-0"), mine.holder("x")] == [
        mine.incarnation,
        other.incarnation,
        None,
    ]
    assert 30_000 < int(redis_client.pttl(keys.replica("vllm-0"))) <= 60_000
    assert mine.expired() == []


def test_a_heartbeat_renews_the_lease_and_the_gauges(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    registry.register(VLLM, 5.0)
    registry.heartbeat("vllm-0", {"running": 3}, {"decode_running": 2}, LONG_S)
    assert registry.list() == [replace(VLLM, stats={"running": 3}, load={"decode_running": 2})]
    assert 30_000 < int(redis_client.pttl(keys.replica("vllm-0"))) <= 60_000


def test_an_ended_lease_is_the_janitors_and_is_taken_once(redis_client: Redis) -> None:
    mine, janitor, second = Registry(redis_client), Registry(redis_client), Registry(redis_client)
    mine.register(VLLM, LONG_S)
    assert janitor.withdraw("vllm-0") is False  # alive, and not the janitor's
    assert mine.holder("vllm-0")
    _let_expire(redis_client, "vllm-0")
    assert (janitor.list(), janitor.holder("vllm-0"), janitor.expired()) == ([], None, ["vllm-0"])
    assert (janitor.withdraw("vllm-0"), second.withdraw("vllm-0")) == (True, False)
    assert janitor.expired() == []


def test_a_replica_whose_lease_had_ended_comes_back_with_its_next_heartbeat(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    registry.register(VLLM, LONG_S)
    redis_client.flushall()
    registry.heartbeat("vllm-0", {"running": 2}, {}, LONG_S)
    assert registry.list() == [replace(VLLM, stats={"running": 2}, load={})]


def test_withdrawing_leaves_nothing(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    registry.register(VLLM, LONG_S)
    assert registry.withdraw("vllm-0") is True
    assert redis_client.keys("cf:*") == []
    assert registry.withdraw("vllm-0") is False


def test_a_name_that_is_alive_is_refused(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Registry(redis_client), Registry(redis_client)
    first.register(VLLM, 0.3)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        first.heartbeat("vllm-0", {}, {}, LONG_S)  # the holder lives

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(ConfigError, match="'vllm-0' is alive already"):
        second.register(replace(VLLM, slots=1), LONG_S)
    assert len(waits) == 1
    first.register(VLLM, LONG_S)  # the same process may, any time
    assert first.list() == [VLLM]


def test_a_crashed_predecessor_is_waited_for_and_then_locked_out(redis_client: Redis) -> None:
    crashed, successor = Registry(redis_client), Registry(redis_client)
    crashed.register(VLLM, 0.2)
    successor.register(replace(VLLM, slots=1), LONG_S)
    with pytest.raises(StaleAttemptError, match="vllm-0"):
        crashed.heartbeat("vllm-0", {}, {}, LONG_S)
    assert crashed.withdraw("vllm-0") is False
    assert successor.list() == [replace(VLLM, slots=1)]


def test_leases_are_renewed_and_replicas_register_on_a_full_broker(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    registry.register(VLLM, 5.0)
    redis_client.config_set("maxmemory", 1)
    registry.heartbeat("vllm-0", {"running": 9}, {}, LONG_S)
    registry.register(MLX, LONG_S)
    assert registry.list() == [MLX, replace(VLLM, stats={"running": 9}, load={})]
    assert registry.withdraw("vllm-0") is True


@pytest.mark.parametrize("record", [{"replica": "{}"}, {"replica": "[", "stats": "{}", "load": "{}"}, {"x": "y"}])
def test_an_unreadable_record_hides_nobody_else(redis_client: Redis, record: dict[str, str]) -> None:
    registry = Registry(redis_client)
    registry.register(VLLM, LONG_S)
    redis_client.hset(keys.replica("odd"), mapping=record)  # type: ignore[arg-type]
    redis_client.sadd(keys.REPLICAS, "odd")
    assert registry.list() == [VLLM]


def test_a_drain_is_heard_with_the_next_heartbeat_until_it_is_taken_back(redis_client: Redis) -> None:
    worker, operator = Registry(redis_client), Registry(redis_client)
    worker.register(VLLM, LONG_S)
    worker.register(MLX, LONG_S)
    assert worker.heartbeat("vllm-0", {}, {}, LONG_S) is False
    assert operator.drain("vllm-0") is True
    assert worker.heartbeat("vllm-0", {}, {}, LONG_S) is True
    assert worker.heartbeat("mlx-0", {}, {}, LONG_S) is False
    assert operator.drain("vllm-0", undo=True) is True
    assert worker.heartbeat("vllm-0", {}, {}, LONG_S) is False


def test_a_drain_is_for_the_process_that_has_the_name(redis_client: Redis) -> None:
    first, second = Registry(redis_client), Registry(redis_client)
    assert second.drain("vllm-0") is False
    first.register(VLLM, LONG_S)
    second.drain("vllm-0")
    first.withdraw("vllm-0")
    assert redis_client.keys("cf:*") == []
    second.register(VLLM, LONG_S)
    assert second.heartbeat("vllm-0", {}, {}, LONG_S) is False


def test_a_drain_passes_on_a_full_broker(redis_client: Redis) -> None:
    registry = Registry(redis_client)
    registry.register(VLLM, LONG_S)
    redis_client.config_set("maxmemory", 1)
    assert registry.drain("vllm-0") is True
    assert registry.heartbeat("vllm-0", {}, {}, LONG_S) is True
