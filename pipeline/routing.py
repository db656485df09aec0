"""Routing: which replica decodes a prompt, and which engine computes its KV. Pure: replicas in, a route out.

Only replicas of the asked contract whose context window holds the prompt are candidates. A decode replica is
picked by name (its load is known); a prefill engine by its queue, which any replica of that engine may serve.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from pipeline.contract import Contract, require_equal
from pipeline.errors import (
    ContextLengthError,
    ContractMismatchError,
    CrossfillError,
    InvalidParameterError,
    KvRoomError,
    NoReplicaError,
    RequestError,
    UnsupportedFeatureError,
)

HEADER = "X-Crossfill-Route"
_DECODERS_LOOKED_AT = 4
_ENGINE = r"[a-z][a-z0-9_]*"
_LOCAL = re.compile(rf"local:({_ENGINE})")
_PAIR = re.compile(rf"({_ENGINE})->({_ENGINE})")


class Candidate(Protocol):
    """What routing reads of a replica; the registry's `Replica` is one."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def contract(self) -> Contract: ...
    @property
    def can_prefill(self) -> bool: ...
    @property
    def needs_first_token(self) -> bool: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def slots(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def load(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What the client asked for: engine names, None where it leaves the choice to us. `local`: no handoff."""

    prefill: str | None = None
    decode: str | None = None
    local: bool = False

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(name for name in (self.prefill, self.decode) if name)


@dataclass(frozen=True, slots=True)
class Route:
    """`prefill_*` None: the decode replica computes the prompt itself."""

    prefill_engine: str | None
    prefill_queue: str | None
    decode_replica: str
    decode_queue: str
    decode_engine: str

    def __str__(self) -> str:
        return f"{self.prefill_engine}->{self.decode_engine}" if self.prefill_engine else f"local:{self.decode_engine}"


def parse(text: str | None) -> Wish:
    """`auto` (or nothing), `vllm->mlx`, `local:mlx`. Raises InvalidParameterError."""
    text = (text or "auto").strip()
    if text == "auto":
        return Wish()
    if match := _LOCAL.fullmatch(text):
        return Wish(decode=match[1], local=True)
    if match := _PAIR.fullmatch(text):
        return Wish(prefill=match[1], decode=match[2])
    raise InvalidParameterError(HEADER, f"{HEADER} must be `auto`, `PREFILL->DECODE` or `local:DECODE`.")


def choose(
    replicas: Iterable[Candidate],
    contract: Contract,
    prompt_tokens: int,
    wish: Wish,
    *,
    known: Collection[str] = (),
    pending: Mapping[str, int] | None = None,
    needs: frozenset[str] = frozenset(),
) -> Route:
    """The route of one prompt, over engines that have all the `needs` of its sampling.

    `known` are engine names that may be absent just now (their wish is a 503, not a 400); `pending` counts per
    replica the handoffs a caller has sent and not seen end, which the replica's own load report may not hold yet.
    Raises InvalidParameterError (UnsupportedFeatureError for a need), ContextLengthError, KvRoomError, NoReplicaError;
    ContractMismatchError when who could have served the wish serves another model.
    """
    alive = [replica for replica in replicas if not replica.load.get("draining")]
    _require_known(wish, {*known, *(replica.engine for replica in alive)})
    serving = _fitting([r for r in alive if r.contract.digest == contract.digest], prompt_tokens)
    try:
        decoder, prefill = _pair(serving, wish, prompt_tokens, pending or {}, needs)
    except NoReplicaError:
        _require_same_model(alive, contract, wish)
        raise
    return _route(decoder, prefill, contract.digest)


def ways(
    replicas: Iterable[Candidate],
    contract: Contract,
    prompt_tokens: int,
    wish: Wish,
    *,
    pending: Mapping[str, int] | None = None,
    needs: frozenset[str] = frozenset(),
    prefer: Collection[str] = (),
) -> list[Route]:
    """Every route that could serve the prompt, handoffs first, then by the decoders' load; empty where `choose` raises.

    Of many decoders the least busy are looked at, and those of `prefer` (replica names: who holds its prefix).
    One whose slots are all taken is left out while another has room.
    """
    serving = [r for r in _serving(replicas, contract) if prompt_tokens < room(r)]
    with contextlib.suppress(NoReplicaError, UnsupportedFeatureError):
        able = _able(_decoders(serving, wish), needs)
        able.sort(key=lambda r: (_decode_load(r, pending or {}), r.name))
        free = [r for r in able if _decode_load(r, pending or {}) < 1]
        found = partial(_pairs, serving, wish=wish, prompt_tokens=prompt_tokens, needs=needs, prefer=prefer)
        pairs = found(free) or found(able)
        return [_route(d, p, contract.digest) for d, p in sorted(pairs, key=lambda pair: pair[1] is None)]
    return []


def _pairs(
    serving: Sequence[Candidate],
    decoders: Sequence[Candidate],
    *,
    wish: Wish,
    prompt_tokens: int,
    needs: frozenset[str],
    prefer: Collection[str],
) -> list[tuple[Candidate, str | None]]:
    """With the first few of `decoders` that anybody can compute the prompt for, and with those of `prefer`."""
    found: list[tuple[Candidate, str | None]] = []
    looked_at = 0
    for decoder in decoders:
        if looked_at < _DECODERS_LOOKED_AT or decoder.name in prefer:
            prefills = _prefills_for(serving, decoder, wish, prompt_tokens, needs)
            found += [(decoder, prefill) for prefill in prefills]
            looked_at += bool(prefills)
    return found


def _prefills_for(
    serving: Sequence[Candidate], decoder: Candidate, wish: Wish, prompt_tokens: int, needs: frozenset[str]
) -> list[str | None]:
    """Engines that can compute a prompt for `decoder`, None for itself."""
    drawn = needs if decoder.needs_first_token else frozenset[str]()
    others = [r for r in serving if _prefills(r) and r.name != decoder.name and wish.prefill in (None, r.engine)]
    unable = {r.engine for r in others if not drawn <= r.features}  # any replica of an engine may take the job
    nothing_to_move = decoder.can_prefill and prompt_tokens == 1
    engines = [] if wish.local or nothing_to_move else sorted({r.engine for r in others} - unable)
    return [*engines, *([None] if decoder.can_prefill and wish.prefill is None else [])]


def resend(
    replicas: Iterable[Candidate],
    contract: Contract,
    tokens: int,
    route: Route,
    *,
    elsewhere: bool = False,
    drawn: frozenset[str] = frozenset(),
) -> Route | None:
    """`route` with a prefill engine that is alive now, its own first; None where none is but the decoder itself.

    `tokens` of context must fit. `elsewhere`: its own engine is no choice. `drawn`: features that P needs.
    """
    able = [
        replica
        for replica in _serving(replicas, contract)
        if _prefills(replica) and replica.name != route.decode_replica and tokens < room(replica)
        if drawn <= replica.features
    ]
    if elsewhere:
        able = [replica for replica in able if replica.engine != route.prefill_engine]
    if not able:
        return None
    best = min(able, key=lambda r: (r.engine != route.prefill_engine, _prefill_load(r), r.name)).engine
    return replace(route, prefill_engine=best, prefill_queue=prefill_queue(best, contract.digest))


def take_over(
    replicas: Iterable[Candidate], contract: Contract, tokens: int, lost: Route, needs: frozenset[str] = frozenset()
) -> Route:
    """The route that goes on where `lost` cannot: the same engines where they live, else others.

    `tokens` of context must fit. Raises NoReplicaError.
    """
    alive = list(replicas)
    same = Wish(lost.prefill_engine, lost.decode_engine, local=lost.prefill_engine is None)
    for wish in (same, Wish(decode=lost.decode_engine), Wish(prefill=lost.prefill_engine), Wish()):
        with contextlib.suppress(NoReplicaError, RequestError, ContractMismatchError):
            return choose(alive, contract, tokens, wish, known=same.engines, needs=needs)
    raise NoReplicaError("no other decode replica is alive for this model")


def _serving(replicas: Iterable[Candidate], contract: Contract) -> list[Candidate]:
    return [r for r in replicas if not r.load.get("draining") and r.contract.digest == contract.digest]


def _prefills(replica: Candidate) -> bool:
    return _has(replica, "prefill") and replica.can_prefill


def _require_same_model(alive: Sequence[Candidate], contract: Contract, wish: Wish) -> None:
    """A replica of a wished engine (any engine without a wish) that differs is named with the fields that do."""
    for replica in alive:
        if not wish.engines or replica.engine in wish.engines:
            require_equal(contract, replica.contract)


def _require_known(wish: Wish, known: set[str]) -> None:
    for engine in wish.engines:
        if known and engine not in known:
            raise InvalidParameterError(HEADER, f"Unknown engine `{engine}`: choose one of {', '.join(sorted(known))}.")


def _fitting(serving: list[Candidate], prompt_tokens: int) -> list[Candidate]:
    fitting = [replica for replica in serving if prompt_tokens < room(replica)]
    if serving and not fitting:
        context = max(replica.contract.context_length for replica in serving)
        if prompt_tokens < context:
            raise KvRoomError(max(map(room, serving)), prompt_tokens, "prompt")
        raise ContextLengthError(context, prompt_tokens, "prompt")
    return fitting


def room(replica: Candidate) -> int:
    """Tokens of prompt and answer that fit: the context window, or the KV pool where that is smaller."""
    context = replica.contract.context_length
    return min(context, replica.kv_tokens or context)


def _pair(
    serving: Sequence[Candidate], wish: Wish, prompt_tokens: int, pending: Mapping[str, int], needs: frozenset[str]
) -> tuple[Candidate, str | None]:
    """The decode replica, and the engine that computes the prompt or None.

    A decoder that needs P's first token needs a P that can draw it as asked: where there is none, another decoder is
    tried. Raises NoReplicaError, UnsupportedFeatureError.
    """
    able = _able(_decoders(serving, wish), needs)
    able.sort(key=lambda replica: (_decode_load(replica, pending), replica.name))
    failure: CrossfillError | None = None
    for decoder in able:
        if wish.local:
            return decoder, None
        drawn = needs if decoder.needs_first_token else frozenset[str]()
        try:
            return decoder, _prefill_engine(serving, decoder, wish.prefill, prompt_tokens, drawn)
        except (NoReplicaError, UnsupportedFeatureError) as error:
            failure = failure or error
    assert failure is not None  # there is a decoder, and each was refused
    raise failure


def _decoders(serving: Sequence[Candidate], wish: Wish) -> list[Candidate]:
    able = [r for r in serving if _has(r, "decode") and wish.decode in (None, r.engine)]
    if wish.local:
        able = [replica for replica in able if replica.can_prefill]
    if not able:
        kind = f"decode replica of engine `{wish.decode}`" if wish.decode else "decode replica"
        prompts = " that computes prompts itself" if wish.local else ""
        raise NoReplicaError(f"no {kind}{prompts} is alive for this model")
    return able


def _able(replicas: Sequence[Candidate], needs: frozenset[str]) -> list[Candidate]:
    """Those that have all of `needs`. Raises UnsupportedFeatureError, naming what the best of the others lacks."""
    able = [replica for replica in replicas if needs <= replica.features]
    if replicas and not able:
        lacking = min((sorted(needs - replica.features) for replica in replicas), key=lambda some: (len(some), some))
        raise UnsupportedFeatureError(lacking[0], {replica.engine for replica in replicas})
    return able


def _decode_load(replica: Candidate, pending: Mapping[str, int]) -> float:
    """Share of its slots in use. The report lags and counts everybody's, ours is exact and counts only us."""
    running = max(replica.load.get("decode_running", 0), pending.get(replica.name, 0))
    return running / max(replica.slots, 1)


def _prefill_engine(
    serving: Sequence[Candidate], decoder: Candidate, wanted: str | None, prompt_tokens: int, drawn: frozenset[str]
) -> str | None:
    """Another engine if one is alive, else another replica of the same, else None: local.

    `drawn`: what P needs for the first token, where it draws that. Any replica of the engine may take the job, so
    every one of them must be able.
    """
    able = [r for r in serving if _prefills(r)]
    if wanted:
        of_engine = [replica for replica in able if replica.engine == wanted]
        if not of_engine:
            raise NoReplicaError(f"no prefill replica of engine `{wanted}` is alive for this model")
        _able(of_engine, drawn)
        return wanted
    others = [replica for replica in able if replica.name != decoder.name]
    if decoder.can_prefill and (prompt_tokens == 1 or not others):  # one token: there is no KV to move
        return None
    if not others:
        raise NoReplicaError(f"`{decoder.engine}` computes no prompts and no prefill replica is alive for this model")
    others = _able(others, drawn)
    return min(others, key=lambda r: (r.engine == decoder.engine, _prefill_load(r), r.name)).engine


def _prefill_load(replica: Candidate) -> float:
    return replica.load.get("prefill_running", 0) / max(replica.slots, 1)


def decode_queue(replica_name: str) -> str:
    """Every decode replica has a queue of its own."""
    return f"decode.{replica_name}"


def prefill_queue(engine: str, contract_digest: str) -> str:
    """One queue for all prefill replicas of an engine and a model."""
    return f"prefill.{engine}.{contract_digest[:8]}"


def is_queue(name: str) -> bool:
    """Whether a queue of this name can be one of ours."""
    return name.startswith(("decode.", "prefill."))


def queues(replica: Candidate) -> list[str]:
    """The queues that `replica` takes jobs from."""
    prefill = [prefill_queue(replica.engine, replica.contract.digest)] if _has(replica, "prefill") else []
    return prefill + ([decode_queue(replica.name)] if _has(replica, "decode") else [])


def _has(replica: Candidate, role: str) -> bool:
    return replica.role in (role, "both")


def _route(decoder: Candidate, prefill: str | None, contract_digest: str) -> Route:
    return Route(
        prefill_engine=prefill,
        prefill_queue=prefill_queue(prefill, contract_digest) if prefill else None,
        decode_replica=decoder.name,
        decode_queue=decode_queue(decoder.name),
        decode_engine=decoder.engine,
    )
