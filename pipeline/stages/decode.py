"""Decode: take a prompt's KV in, page by verified page, then turn it into tokens.

Nothing is decoded before COMMIT. When the transfer fails, the policy decides: `recompute` lets D compute the
prompt itself, `fail` ends the handoff with the error.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from pipeline.broker import stream
from pipeline.broker.channel import TokenEntry
from pipeline.engines.base import Admission, Engine, TokenStep
from pipeline.errors import CrossfillError, EngineError, HandoffCancelledError, NoReplicaError, PageServerError
from pipeline.frame import Commit
from pipeline.handoff import Attempts, Event
from pipeline.page import PAGE_TOKENS, page_count
from pipeline.stages.drain import Part, Services, insist, taking_part
from pipeline.stages.transfer import NO_TOKENS, Transfer, TransferError

# A lost reply costs the longest wait for one, 5 s, and then the same entry is sent again. Whoever is cut off for longer
# has lost its lease, and what it holds in the engine is better given back.
EMIT_S = 15.0


def run(services: Services, engine: Engine, handoff_id: str) -> dict[str, object]:
    """D's job. Returns a summary for RQ; raises CrossfillError."""
    with taking_part(services, handoff_id, "decode") as part, services.observer.watching(part):
        try:
            admission, first = _admission(part, engine)
            with closing(admission):
                part.watch.on_over(admission.close)
                tokens = _emit(part, admission.decode(first.first_tokens, first.first_logprobs))
        except HandoffCancelledError:
            insist(part.watch.look)  # a broker away just now must not turn a cancel into a failure
            if not part.watch.stopped:  # a stop string is a finish, not a cancel
                raise
            return {"outcome": "stopped"}
    return {"outcome": "finished", "tokens": tokens}


def _admission(part: Part, engine: Engine) -> tuple[Admission, Commit]:
    """Room with every page in it, from P or computed here."""
    if part.record.request.first_token != engine.capabilities.needs_first_token:
        raise EngineError(f"this handoff was routed for another kind of engine than {part.record.route}")
    if part.record.route["prefill_queue"] is None:
        return _local(part, engine), NO_TOKENS
    try:
        return _remote(part, engine)
    except TransferError as lost:
        error, attempts = lost.error, lost.attempts
    if part.record.policy != "recompute":
        raise error
    if not engine.capabilities.can_prefill:
        raise NoReplicaError(f"no prefill replica is left, and {engine.name} computes no prompts: {error}") from error
    _give_up(part, error, attempts)
    return _local(part, engine), NO_TOKENS


def _give_up(part: Part, error: CrossfillError, attempts: Attempts) -> None:
    """Tell P that no page is wanted any more; its writes under `attempts` are stale from here on.

    By a fence, not by a release: it is refused where another D has taken over meanwhile.
    """
    services = part.services
    part.fields["recomputed"] = error.code
    services.ledger.mark(part.handoff_id, "decode", part.attempt, part.fields, publish="recompute")
    part.watch.look()  # a capture goes by what was seen last, and a short answer is over before any notification
    nobody = replace(attempts, prefill=attempts.prefill + 1)
    with suppress(PageServerError):  # then nobody can write there either
        stream.raise_fence(services.pages.at(services.address), part.handoff_id, nobody, services.settings.broker)


def _local(part: Part, engine: Engine) -> Admission:
    limit = part.services.settings.handoff.accept_s
    admission = engine.admit(part.request, local=True, timeout_s=limit, check=part.check)
    try:
        part.mark("admitted")
        _commit(part, held=admission.held_pages, imported=0)
    except BaseException:
        admission.close()
        raise
    return admission


def _remote(part: Part, engine: Engine) -> tuple[Admission, Commit]:
    transfer, limit = Transfer(part), part.services.settings.handoff.accept_s
    transfer.await_prefill()
    tokens = len(part.request.token_ids) + part.request.sampling.max_tokens
    with part.services.share.holding(tokens, limit, part.check):
        admission = engine.admit(part.request, timeout_s=limit, check=part.check)
        try:
            part.watch.on_over(admission.close)
            part.mark("admitted")
            first = transfer.receive(admission)
            held = admission.held_pages
            _commit(part, held=held, imported=page_count(part.request.transfer_tokens) - held)
        except BaseException:
            admission.close()
            raise
    return admission, first


def _commit(part: Part, *, held: int, imported: int) -> None:
    """Every page is there. `held` and `imported` count pages; the record keeps prompt tokens."""
    tokens = part.request.transfer_tokens
    reused = min(held * PAGE_TOKENS, tokens)
    part.mark("committed")
    part.fields |= {"reused_tokens": reused, "imported_tokens": tokens - reused if imported else 0}
    part.services.ledger.advance(part.handoff_id, "decode", part.attempt, Event.COMMIT, part.fields)


def _emit(part: Part, steps: Iterable[TokenStep]) -> int:
    """Log every step; the last one of the last sample and the terminal are one write. What was emitted before a
    takeover counts on, and is not logged again where it is said again."""
    ledger, sent, running = part.services.ledger, part.record.resumed, part.request.sampling.n
    again = [len(said) for said in part.request.again] or [0] * running
    held_tokens = min(int(part.fields["reused_tokens"]), len(part.record.request.token_ids))
    for said in steps:
        running -= said.finish is not None
        step = _fresh(said, again)
        if step is None:
            continue
        part.mark("first_token")
        if not running:
            part.mark("finished")
        entry = TokenEntry(
            seq=sent,
            token_ids=step.token_ids,
            finish=step.finish,
            held_tokens=None if running else held_tokens,
            sample=step.sample,
            logprobs=step.logprobs,
            more=step.finish is not None and running > 0,
        )
        fields = None if running and sent > part.record.resumed else part.fields
        insist(partial(ledger.emit, part.handoff_id, part.attempt, entry, fields), EMIT_S)
        sent += len(step.token_ids)
    return sent


def _fresh(step: TokenStep, again: list[int]) -> TokenStep | None:
    """`step` without what its sample says `again`: so many tokens still, which is counted down. None: nothing is new.

    A sample that had finished finishes again with its last token.
    """
    known = min(again[step.sample], len(step.token_ids))
    if not known:
        return step
    again[step.sample] -= known
    if known == len(step.token_ids):
        return None
    logprobs = None if step.logprobs is None else step.logprobs[known:]
    return replace(step, token_ids=step.token_ids[known:], logprobs=logprobs)
