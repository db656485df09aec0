"""Routing against hand-made fleets: the answers are written down, not computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pipeline import routing
from pipeline.contract import Contract
from pipeline.errors import (
    ContextLengthError,
    ContractMismatchError,
    InvalidParameterError,
    KvRoomError,
    NoReplicaError,
    UnsupportedFeatureError,
)
from pipeline.routing import Route, Wish

CONTRACT = Contract(
    weights="w", tokenizer="t", config="c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=4096
)
OTHER = Contract(
    weights="x", tokenizer="t", config="c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=4096
)
SHORT = Contract(
    weights="w", tokenizer="t", config="c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=128
)
EIGHT = CONTRACT.digest[:8]


@dataclass(frozen=True)
class Fake:
    name: str
    engine: str
    role: str = "both"
    contract: Contract = CONTRACT
    can_prefill: bool = True
    needs_first_token: bool = False
    features: frozenset[str] = frozenset()
    slots: int = 16
    kv_tokens: int = 0
    load: dict[str, int] = field(default_factory=dict)


MLX, VLLM = Fake("mac", "mlx"), Fake("box", "vllm")


def choose(*replicas: Fake, wish: str = "auto", tokens: int = 100, **more: object) -> str:
    return str(routing.choose(replicas, CONTRACT, tokens, routing.parse(wish), **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        (None, Wish()),
        ("", Wish()),
        ("auto", Wish()),
        (" vllm->mlx ", Wish("vllm", "mlx")),
        ("local:mlx", Wish(decode="mlx", local=True)),
    ],
)
def test_a_wish_is_read(text: str | None, wish: Wish) -> None:
    assert routing.parse(text) == wish


@pytest.mark.parametrize("text", ["mlx", "->mlx", "vllm->", "local:", "a->b->c", "vllm -> mlx", "local:../x"])
def test_a_wish_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        routing.parse(text)
    assert caught.value.param == "X-Crossfill-Route"


def test_a_route_names_replica_and_queues() -> None:
    found = routing.choose([MLX, VLLM], CONTRACT, 100, Wish("vllm", "mlx"))
    assert found == Route("vllm", f"prefill.vllm.{EIGHT}", "mac", "decode.mac", "mlx")
    assert routing.choose([MLX, VLLM], CONTRACT, 100, Wish(decode="mlx", local=True)) == Route(
        None, None, "mac", "decode.mac", "mlx"
    )


def test_auto_crosses_engines_when_it_can() -> None:
    assert choose(MLX, VLLM) == "mlx->vllm"  # equal load: by name, box before mac
    assert choose(MLX) == "local:mlx"
    assert choose(MLX, Fake("mac2", "mlx")) == "mlx->mlx"
    assert choose(Fake("mac", "mlx", "decode"), Fake("mac2", "mlx", "prefill")) == "mlx->mlx"
    assert choose(Fake("mac", "mlx", "decode"), Fake("mac2", "mlx", "prefill"), VLLM, wish="auto") == "mlx->vllm"


def test_auto_takes_the_least_loaded() -> None:
    busy = Fake("box", "vllm", load={"decode_running": 3})
    assert choose(MLX, busy) == "vllm->mlx"
    half = Fake("box", "vllm", slots=2, load={"decode_running": 1})
    quarter = Fake("mac", "mlx", slots=16, load={"decode_running": 4})
    assert choose(half, quarter) == "vllm->mlx"
    assert choose(MLX, VLLM, pending={"box": 1}) == "vllm->mlx"
    third = Fake("ref", "reference", role="prefill")
    assert choose(Fake("box", "vllm", load={"prefill_running": 2, "decode_running": 9}), MLX, third) == "reference->mlx"


def test_one_token_has_nothing_to_move() -> None:
    assert choose(MLX, VLLM, tokens=1) == "local:vllm"


def test_an_engine_that_cannot_prefill_always_gets_a_prefill() -> None:
    sglang = Fake("s", "sglang", role="decode", can_prefill=False)
    assert choose(sglang, Fake("m", "mlx", "prefill"), tokens=1) == "mlx->sglang"
    with pytest.raises(NoReplicaError, match="`sglang` computes no prompts"):
        choose(sglang)
    with pytest.raises(NoReplicaError, match="engine `sglang` that computes prompts itself"):
        choose(sglang, wish="local:sglang")


@pytest.mark.parametrize(
    ("fleet", "wish", "says"),
    [
        ((), "auto", "no decode replica is alive"),
        ((Fake("m", "mlx", "prefill"),), "auto", "no decode replica is alive"),
        ((VLLM, Fake("m", "mlx", "prefill")), "vllm->mlx", "no decode replica of engine `mlx`"),
        ((MLX, Fake("v", "vllm", "decode")), "vllm->mlx", "no prefill replica of engine `vllm`"),
    ],
)
def test_what_is_missing_is_named(fleet: tuple[Fake, ...], wish: str, says: str) -> None:
    with pytest.raises(NoReplicaError, match=says):
        choose(*fleet, wish=wish)


def test_an_unknown_engine_is_the_clients_fault_an_absent_one_is_not() -> None:
    with pytest.raises(InvalidParameterError, match="Unknown engine `tpu`: choose one of mlx, vllm"):
        choose(MLX, VLLM, wish="tpu->mlx")
    with pytest.raises(NoReplicaError):
        choose(MLX, wish="vllm->mlx", known={"vllm"})
    with pytest.raises(NoReplicaError):
        choose(wish="vllm->mlx")


def test_a_replica_whose_window_is_too_short_is_passed_over() -> None:
    short = Fake("a", "reference", contract=SHORT)
    assert choose(short, MLX, tokens=127) == "mlx->reference"
    assert choose(short, MLX, tokens=128) == "local:mlx"
    with pytest.raises(ContextLengthError, match="maximum context length is 128 tokens"):
        choose(short, tokens=128)


def test_queues_of_a_replica() -> None:
    assert routing.queues(MLX) == [f"prefill.mlx.{EIGHT}", "decode.mac"]
    assert routing.queues(Fake("p", "mlx", "prefill")) == [f"prefill.mlx.{EIGHT}"]
    assert routing.queues(Fake("d", "mlx", "decode")) == ["decode.d"]
    assert all(map(routing.is_queue, [*routing.queues(MLX), "decode.d"]))
    assert not any(map(routing.is_queue, ["mail", "decode", "x.decode.d"]))


@pytest.mark.parametrize("wish", ["vllm->mlx", "local:vllm", "mlx->vllm"])
def test_a_replica_of_another_model_is_named_with_the_fields(wish: str) -> None:
    with pytest.raises(ContractMismatchError, match=r"weights \(w here, x there\)"):
        choose(MLX, Fake("box", "vllm", contract=OTHER), wish=wish)


def test_a_fleet_of_strangers_only_is_a_mismatch() -> None:
    with pytest.raises(ContractMismatchError, match="weights"):
        choose(Fake("m", "mlx", contract=OTHER))


def test_a_busy_fleet_does_not_hide_behind_a_stranger() -> None:
    assert choose(MLX, Fake("box", "vllm", contract=OTHER)) == "local:mlx"


# Features


def ways(*replicas: Fake, wish: str = "auto", tokens: int = 100, **more: Any) -> list[tuple[str, str]]:
    found = routing.ways(replicas, CONTRACT, tokens, routing.parse(wish), **more)
    return [(str(route), route.decode_replica) for route in found]


def test_every_way_handoffs_first() -> None:
    assert ways(MLX, VLLM) == [
        ("mlx->vllm", "box"),
        ("vllm->mlx", "mac"),
        ("local:vllm", "box"),
        ("local:mlx", "mac"),
    ]
    assert ways(MLX, VLLM, wish="vllm->mlx") == [("vllm->mlx", "mac")]
    assert ways(MLX, VLLM, wish="local:mlx") == [("local:mlx", "mac")]
    assert ways(MLX, VLLM, tokens=1) == [("local:vllm", "box"), ("local:mlx", "mac")]


def test_no_way_is_no_error() -> None:
    assert ways() == ways(MLX, tokens=CONTRACT.context_length) == ways(MLX, wish="vllm->mlx") == []


def test_of_many_decoders_the_least_busy_and_the_preferred_are_looked_at_and_no_full_one() -> None:
    macs = [replace(MLX, name=f"mac-{n}", role="decode", load={"decode_running": n}, slots=7) for n in range(8)]
    looked = [name for way, name in ways(VLLM, *macs) if way == "vllm->mlx"]
    assert looked == ["mac-0", "mac-1", "mac-2"]  # and `box` itself, that is four
    assert "mac-5" in [name for _, name in ways(VLLM, *macs, prefer={"mac-5"})]
    assert "mac-7" not in [name for _, name in ways(VLLM, *macs, prefer={"mac-7"})]
    assert [name for _, name in ways(replace(VLLM, role="prefill"), macs[7])] == ["mac-7", "mac-7"]


def test_decoders_that_nobody_computes_for_do_not_hide_the_one_that_can_itself() -> None:
    """Where `choose` finds a route, `ways` does."""
    helpless = [Fake(f"box-{n}", "sglang", "decode", can_prefill=False, needs_first_token=True) for n in range(4)]
    assert ways(*helpless, replace(MLX, role="decode")) == [("local:mlx", "mac")]
    full = replace(MLX, role="decode", load={"decode_running": 16})
    assert choose(*helpless, full) == "local:mlx"
    assert ways(*helpless, full) == [("local:mlx", "mac")]


GRAMMAR, BOTH = frozenset({"grammar"}), frozenset({"grammar", "n"})


def test_only_who_has_what_is_needed_decodes() -> None:
    able, busy = Fake("a", "mlx", features=BOTH), {"decode_running": 15}
    assert choose(VLLM, able, needs=GRAMMAR) == "vllm->mlx"
    assert choose(VLLM, Fake("a", "mlx", features=BOTH, load=busy), needs=GRAMMAR) == "vllm->mlx"
    assert choose(VLLM, able, needs=GRAMMAR, wish="local:mlx") == "local:mlx"


@pytest.mark.parametrize(
    ("fleet", "wish", "feature", "engines"),
    [
        ((VLLM, MLX), "auto", "grammar", "mlx, vllm"),
        ((VLLM, Fake("a", "mlx", features=GRAMMAR)), "auto", "n", "mlx, vllm"),
        ((VLLM, Fake("a", "mlx", features=BOTH)), "mlx->vllm", "grammar", "vllm"),
        ((VLLM, Fake("a", "mlx", features=BOTH)), "local:vllm", "grammar", "vllm"),
    ],
)
def test_a_feature_nobody_has_is_named(fleet: tuple[Fake, ...], wish: str, feature: str, engines: str) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        choose(*fleet, wish=wish, needs=BOTH)
    assert (caught.value.feature, caught.value.param, caught.value.reason) == (
        feature,
        feature,
        "unsupported_parameter",
    )
    assert f"`{feature}` cannot be done" in str(caught.value)
    assert f"({engines})" in str(caught.value)


def test_who_draws_the_first_token_needs_it_too() -> None:
    decoder = Fake("a", "sglang", role="decode", can_prefill=False, needs_first_token=True, features=BOTH)
    able = Fake("z", "mlx", role="prefill", features=GRAMMAR)
    assert choose(decoder, VLLM, able, needs=GRAMMAR, wish="mlx->sglang") == "mlx->sglang"
    assert choose(decoder, Fake("b", "vllm", role="prefill"), able, needs=GRAMMAR) == "mlx->sglang"
    with pytest.raises(UnsupportedFeatureError, match=r"\(vllm\)"):
        choose(decoder, VLLM, able, needs=GRAMMAR, wish="vllm->sglang")
    other = Fake("y", "reference", features=GRAMMAR, load={"decode_running": 5})
    # SGLang is idle, but nobody could draw its first token: the busier one takes it.
    assert choose(decoder, Fake("b", "vllm", role="prefill"), other, needs=GRAMMAR, wish="auto") == "reference->sglang"
    alone = Fake("y", "reference", role="decode", features=GRAMMAR, load={"decode_running": 5}, can_prefill=True)
    assert choose(decoder, Fake("b", "vllm", role="prefill"), alone, needs=GRAMMAR) == "vllm->reference"


# -- room


def test_a_prompt_goes_where_its_kv_fits() -> None:
    small, large = Fake("a", "mlx", kv_tokens=256), Fake("b", "mlx", kv_tokens=1024)
    assert routing.choose([small, large], CONTRACT, 255, Wish()).decode_replica == "a"
    assert routing.choose([small, large], CONTRACT, 256, Wish()).decode_replica == "b"
    with pytest.raises(KvRoomError, match="more than 1024 tokens, the answer included") as caught:
        routing.choose([small, large], CONTRACT, 1024, Wish())
    assert (caught.value.http_status, caught.value.limit) == (400, 1024)
    with pytest.raises(ContextLengthError):
        routing.choose([small, large], CONTRACT, 4096, Wish())


# -- again

MLX_LOST = Route("vllm", f"prefill.vllm.{EIGHT}", "mac", "decode.mac", "mlx")


@pytest.mark.parametrize(
    ("alive", "chosen"),
    [
        ([Fake("box", "vllm", "prefill"), Fake("mac-1", "mlx"), Fake("any", "sglang")], "vllm->mac-1"),
        (
            [Fake("p", "sglang", "prefill"), Fake("mac-1", "mlx", "decode"), Fake("any", "reference", "decode")],
            "sglang->mac-1",
        ),
        ([Fake("box", "vllm", "prefill"), Fake("any", "sglang", "decode")], "vllm->any"),
        ([Fake("any", "sglang")], "None->any"),
    ],
)
def test_whoever_takes_over_is_as_like_as_can_be(alive: list[Fake], chosen: str) -> None:
    route = routing.take_over(alive, CONTRACT, 100, MLX_LOST)
    assert f"{route.prefill_engine}->{route.decode_replica}" == chosen


@pytest.mark.parametrize(
    "alive",
    [[], [Fake("box", "vllm", "prefill")], [Fake("mac-1", "mlx", contract=OTHER)], [Fake("s", "mlx", contract=SHORT)]],
)
def test_nobody_takes_over(alive: list[Fake]) -> None:
    with pytest.raises(NoReplicaError):
        routing.take_over(alive, CONTRACT, 200, MLX_LOST)


@pytest.mark.parametrize(
    ("alive", "elsewhere", "engine"),
    [
        ([Fake("box", "vllm"), Fake("m", "mlx")], False, "vllm"),
        ([Fake("box", "vllm"), Fake("m", "mlx")], True, "mlx"),
        ([Fake("mac", "mlx")], False, None),
        ([Fake("box", "vllm", load={"draining": 1}), Fake("m", "mlx")], False, "mlx"),
        ([Fake("box", "vllm", "decode")], False, None),
        ([Fake("box", "vllm", can_prefill=False)], False, None),
        ([Fake("box", "vllm", kv_tokens=100)], False, None),
    ],
)
def test_whoever_sends_again_is_of_the_same_engine_where_it_lives(
    alive: list[Fake], elsewhere: bool, engine: str | None
) -> None:
    route = routing.resend(alive, CONTRACT, 100, MLX_LOST, elsewhere=elsewhere)
    assert (route and (route.prefill_engine, route.decode_replica)) == (engine and (engine, "mac"))
