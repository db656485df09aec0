"""The router: where prompts go at first, what it learns, and what it remembers of prefixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from pipeline.api.router import FRESH_S, Chosen, Router
from pipeline.broker.registry import Replica
from pipeline.contract import Contract
from pipeline.cost import GONE_KEPT
from pipeline.errors import NoReplicaError
from pipeline.request import Request, Sampling
from pipeline.routing import Wish
from pipeline.settings import RoutingSettings

CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=4096)


class Named(NamedTuple):
    name: str
    contract: Contract


MODEL = Named("tiny", CONTRACT)
BOX = Replica("box", "vllm", "prefill", "tiny", CONTRACT, slots=4, started_ms=1)
MAC = Replica("mac", "mlx", "both", "tiny", CONTRACT, slots=4, started_ms=2)
MINI = Replica("mini", "mlx", "decode", "tiny", CONTRACT, slots=4, started_ms=3)


class Fleet:
    """A registry that counts how often it is read."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)
        self.reads = 0

    def read(self) -> list[Replica]:
        self.reads += 1
        return list(self.replicas)


def _router(*replicas: Replica, policy: Any = "cost") -> Router:
    return Router(Fleet(*replicas).read, RoutingSettings(policy=policy))


def _route(router: Router, tokens: int | list[int] = 640, wish: Wish | None = None, salt: str = "") -> Chosen:
    ids = tuple(range(tokens)) if isinstance(tokens, int) else tuple(tokens)
    request = Request("0" * 32, ids, Sampling(max_tokens=4), salt=salt)
    return router.route(request, wish or Wish(), MODEL)


def _trace(chosen: Chosen, prefill_ms: float, exposed_ms: float, held: int = 0, **more: Any) -> dict[str, Any]:
    local = chosen.route.prefill_engine is None
    marks = {"admitted": 5.0, "first_token": 5.0 + prefill_ms}
    if not local:
        marks = {
            "prefill_started": 2.0,
            "prefill_ended": 2.0 + prefill_ms,
            "first_token": 2.0 + prefill_ms + exposed_ms,
        }
    return {"prompt_tokens": 640, "pages": 0 if local else 10, "reused_tokens": held, "marks_ms": marks, **more}


def _play(router: Router, times: int, *, remote: tuple[float, float], local: float) -> list[str]:
    """Prompts one after another, each telling the router what its way took."""
    taken = []
    for salt in range(times):
        chosen = _route(router, salt=str(salt))
        taken.append(str(chosen.route))
        is_local = chosen.route.prefill_engine is None
        router.learn(chosen, _trace(chosen, *((local, 0.0) if is_local else remote)))
    return taken


def test_a_handoff_is_tried_first_then_the_faster_way_is_taken() -> None:
    ways = ["vllm->mlx", "local:mlx"]
    assert _play(_router(BOX, MAC), 5, remote=(20.0, 5.0), local=90.0) == [*ways, *["vllm->mlx"] * 3]
    assert _play(_router(BOX, MAC), 5, remote=(20.0, 90.0), local=60.0) == [*ways, *["local:mlx"] * 3]


def test_a_request_that_says_its_route_and_the_policy_handoff_are_obeyed() -> None:
    router = _router(BOX, MAC)
    _play(router, 3, remote=(20.0, 500.0), local=60.0)
    assert str(_route(router, wish=Wish("vllm", "mlx")).route) == "vllm->mlx"
    assert str(_route(router, wish=Wish(decode="mlx", local=True)).route) == "local:mlx"
    assert _play(_router(BOX, MAC, policy="handoff"), 4, remote=(20.0, 500.0), local=1.0) == ["vllm->mlx"] * 4


def test_a_conversation_goes_back_to_the_decoder_that_holds_it() -> None:
    router = _router(BOX, MINI, replace(MINI, name="mini-2"))
    taken = set()
    for salt in range(8):  # both decoders are known, equally fast
        chosen = _route(router, salt=str(salt))
        taken.add(chosen.route.decode_replica)
        router.learn(chosen, _trace(chosen, 20.0, 40.0))
    assert taken == {"mini", "mini-2"}
    first = _route(router, salt="chat")
    router.learn(first, _trace(first, 20.0, 40.0))
    router.began(first.route)  # busier than the other one, which would have been preferred otherwise
    again = _route(router, 704, salt="chat")
    assert again.route.decode_replica == first.route.decode_replica
    assert _route(router, 704, salt="other").route.decode_replica != first.route.decode_replica


def test_a_decoder_that_holds_the_prompt_computes_the_rest_itself() -> None:
    router = _router(BOX, MAC)
    for tokens, salt in ((640, "a"), (64, "b"), (640, "c"), (64, "d")):
        chosen = _route(router, tokens, salt=salt)
        local = chosen.route.prefill_engine is None
        trace = _trace(chosen, tokens / 4 if local else tokens / 40, 20.0)
        trace |= {"prompt_tokens": tokens, "pages": 0 if local else tokens // 64}
        router.learn(chosen, trace)
    assert str(_route(router, salt="new").route) == "vllm->mlx"  # 16 + 20 against 160 ms
    chosen = _route(router, salt="chat")
    router.learn(chosen, _trace(chosen, 16.0, 20.0))
    assert str(_route(router, 641, salt="chat").route) == "local:mlx"


@pytest.mark.parametrize(
    ("tokens", "way"), [(640, "local:mlx"), (641, "local:mlx"), (704, "local:mlx"), (705, "vllm->mlx")]
)
def test_where_d_holds_every_page_no_prefill_job_is_made(tokens: int, way: str) -> None:
    """Not even where all that is known of D says that it computes slowly. 705 tokens have a page that it lacks."""
    router = _router(BOX, MAC)
    _play(router, 3, remote=(1.0, 1.0), local=9000.0)
    chosen = _route(router, salt="chat")
    router.learn(chosen, _trace(chosen, 1.0, 1.0))
    again = _route(router, tokens, salt="chat")
    assert str(again.route) == way
    assert (again.route.prefill_queue is None) is way.startswith("local")
    assert str(_route(router, tokens, salt="chat", wish=Wish("vllm", "mlx")).route) == "vllm->mlx"


def test_another_process_of_the_same_name_holds_nothing() -> None:
    fleet = Fleet(BOX, MAC)
    router = Router(fleet.read, RoutingSettings())
    chosen = _route(router)
    router.learn(chosen, _trace(chosen, 1.0, 1.0))
    fleet.replicas = [BOX, replace(MAC, started_ms=9)]
    router.fleet(fresh=True)
    fleet.replicas = [BOX, MAC]
    router.fleet(fresh=True)
    assert router._affinity.held_tokens("mac@2", chosen.keys) == 0


@pytest.mark.parametrize("spoiled", [{"resent": 1}, {"taken_over": 1}, {"recomputed": "aborted"}, {"marks_ms": {}}])
def test_what_went_another_way_teaches_nothing(spoiled: dict[str, Any]) -> None:
    router = _router(BOX, MAC)
    for salt in range(3):
        chosen = _route(router, salt=str(salt))
        assert str(chosen.route) == "vllm->mlx"
        router.learn(chosen, _trace(chosen, 1.0, 1.0) | spoiled)


def test_the_registry_is_read_once_in_a_while_and_again_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    fleet = Fleet(BOX, MAC)
    router = Router(fleet.read, RoutingSettings())
    for _ in range(5):
        _route(router)
    assert fleet.reads == 1
    now[0] += FRESH_S
    _route(router)
    assert fleet.reads == 2
    fleet.replicas = []
    now[0] += FRESH_S
    with pytest.raises(NoReplicaError):
        _route(router)
    assert fleet.reads == 4
    fleet.replicas = [BOX, MAC]
    assert str(_route(router, wish=Wish("vllm", "mlx")).route) == "vllm->mlx"


def test_live_counts_what_began_and_has_not_ended() -> None:
    router = _router(BOX, MAC)
    first, second = _route(router).route, _route(router).route
    router.began(first)
    router.began(second)
    assert router.live == 2
    router.ended(first)
    assert router.live == 1


def test_names_that_never_come_back_do_not_add_up() -> None:
    """A fleet that grows and shrinks by itself has ever new names."""
    fleet = Fleet(BOX)
    router = Router(fleet.read, RoutingSettings())
    for number in range(GONE_KEPT + 10):
        fleet.replicas = [BOX, replace(MAC, name=f"mac-{number}")]
        router.fleet(fresh=True)
        for salt in ("a", "b"):
            chosen = _route(router, salt=f"{number}{salt}")
            router.began(chosen.route)
            router.learn(chosen, _trace(chosen, 20.0, 5.0))
            router.ended(chosen.route)
    assert router._pending == {}
    assert len({way.decode for way in router._costs._since}) == GONE_KEPT + 1
    assert len(router._costs._exposed) == 2 * (GONE_KEPT + 1)
    assert len(router._costs._prefill) == len(router._costs._service) == 1 + GONE_KEPT + 1  # vllm's and each mac's own


def test_explain_shows_every_way_best_first() -> None:
    router = _router(BOX, MAC)
    _play(router, 3, remote=(20.0, 5.0), local=90.0)
    shown = router.explain(MODEL, 640)
    assert [(way["way"], way["chosen"], way["total_ms"]) for way in shown] == [
        ("vllm->mac", True, 25.0),
        ("local->mac", False, 90.0),
    ]
    assert router.explain(MODEL, 5000) == []


def test_a_queue_at_the_prefill_engine_counts() -> None:
    fleet = Fleet(BOX, MAC)
    router = Router(fleet.read, RoutingSettings())
    _play(router, 3, remote=(40.0, 5.0), local=90.0)
    fleet.replicas = [replace(BOX, load={"prefill_running": 3}), MAC]
    router.fleet(fresh=True)
    assert str(_route(router, salt="x").route) == "local:mlx"
