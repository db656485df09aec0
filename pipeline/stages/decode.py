"""Decode: take a prompt's KV in, page by verified page, then turn it into tokens.

Nothing is decoded before COMMIT. When the transfer fails, the policy decides: `recompute` lets D compute the
prompt itself, `fail` ends the handoff with the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

from pipeline.broker import stream
from pipeline.broker.channel import TokenEntry
from pipeline.broker.record import Accept
from pipeline.broker.stream import PageReader
from pipeline.engines.base import Admission, Engine, TokenStep
from pipeline.errors import CrossfillError, DeadlineError, EngineError, HandoffCancelledError, PeerError
from pipeline.frame import Commit, FrameReader
from pipeline.handoff import Attempts, Event
from pipeline.header import require
from pipeline.page import PAGE_TOKENS, page_count
from pipeline.request import Request
from pipeline.stages.drain import Part, Services, insist, taking_part


def run(services: Services, engine: Engine, handoff_id: str) -> dict[str, object]:
    """D's job. Returns a summary for RQ; raises CrossfillError."""
    with taking_part(services, handoff_id, "decode") as part:
        try:
            admission, first_tokens = _admission(part, engine)
            with closing(admission):
                part.watch.on_over(admission.close)
                tokens = _emit(part, admission.decode(first_tokens))
        except HandoffCancelledError:
            insist(part.watch.look)  # a broker away just now must not turn a cancel into a failure
            if not part.watch.stopped:  # a stop string is a finish, not a cancel
                raise
            return {"outcome": "stopped"}
    return {"outcome": "finished", "tokens": tokens}


def _admission(part: Part, engine: Engine) -> tuple[Admission, tuple[int, ...]]:
    """Room with every page in it, from P or computed here."""
    if part.record.request.first_token != engine.capabilities.needs_first_token:
        raise EngineError(f"this handoff was routed for another kind of engine than {part.record.route}")
    if part.record.route["prefill_queue"] is None:
        return _local(part, engine), ()
    try:
        return _remote(part, engine)
    except _TransferError as lost:
        error = lost.error
    if part.record.policy != "recompute" or not engine.capabilities.can_prefill:
        raise error
    _give_up(part, error)
    return _local(part, engine), ()


class _TransferError(Exception):
    """`error` is P's or the wire's, not D's: computing the prompt here may still help."""

    def __init__(self, error: CrossfillError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _transfer() -> Iterator[None]:
    """What goes wrong in here is not D's own failure."""
    try:
        yield
    except (PeerError, DeadlineError) as error:
        raise _TransferError(error) from error


def _give_up(part: Part, error: CrossfillError) -> None:
    """Tell P that no page is wanted any more; its writes are stale from here on."""
    part.fields["recomputed"] = error.code
    part.services.ledger.mark(part.handoff_id, "decode", part.attempt, part.fields, publish="recompute")
    stream.release(part.services.pages, part.handoff_id)


def _local(part: Part, engine: Engine) -> Admission:
    limit = part.services.settings.handoff.accept_s
    admission = engine.admit(part.record.request, local=True, timeout_s=limit, check=part.check)
    try:
        part.mark("admitted")
        _commit(part, held=admission.held_pages, imported=0)
    except BaseException:
        admission.close()
        raise
    return admission


def _remote(part: Part, engine: Engine) -> tuple[Admission, tuple[int, ...]]:
    limits = part.services.settings.handoff
    with _transfer():
        prefill_attempt = part.watch.wait_for(
            lambda seen: seen.number("prefill_attempt") or None, limits.queue_s, "a prefill worker"
        )
    admission = engine.admit(part.record.request, timeout_s=limits.accept_s, check=part.check)
    try:
        part.watch.on_over(admission.close)
        part.mark("admitted")
        with _transfer():
            return admission, _receive(part, admission, Attempts(prefill_attempt, part.attempt))
    except BaseException:
        admission.close()
        raise


def _receive(part: Part, admission: Admission, attempts: Attempts) -> tuple[int, ...]:
    """Say what is wanted, import it, and return P's first tokens."""
    services, request = part.services, part.record.request
    wanted = page_count(request.transfer_tokens)
    first_page = admission.held_pages
    stream.raise_fence(services.pages, request.handoff_id, attempts, services.settings.broker)
    part.mark("accepted")
    services.ledger.accept(request.handoff_id, Accept(attempts.prefill, attempts.decode, first_page), part.fields)
    first_tokens: tuple[int, ...] = ()
    if first_page < wanted or request.first_token:  # where D holds every page, P's first token still comes
        with closing(_reader(part, attempts, first_page)) as reader:
            first_tokens = _import(part, admission, reader)
        _require_first_tokens(request, first_tokens, services.contract.vocab_size)
    _commit(part, held=first_page, imported=wanted - first_page)
    return first_tokens


def _require_first_tokens(request: Request, first_tokens: Sequence[int], vocab_size: int) -> None:
    """Raise FrameError unless P sent the one token it was asked for, or none where none was asked for."""
    require(len(first_tokens) == request.first_token, "number of first tokens", int(request.first_token), first_tokens)
    require(all(token < vocab_size for token in first_tokens), "first token", f"below {vocab_size}", first_tokens)


def _import(part: Part, admission: Admission, reader: PageReader) -> tuple[int, ...]:
    services = part.services
    while True:
        item = reader.read(services.settings.handoff.progress_s)
        if isinstance(item, Commit):
            part.mark("last_page_in")
            return item.first_tokens
        admission.import_page(item)
        reader.imported()
        if "at_first_page_in" not in part.fields:
            part.mark("first_page_in")
            services.ledger.advance(part.handoff_id, "decode", part.attempt, Event.IMPORT, part.fields)


def _commit(part: Part, *, held: int, imported: int) -> None:
    """Every page is there. `held` and `imported` count pages; the record keeps prompt tokens."""
    tokens = part.record.request.transfer_tokens
    reused = min(held * PAGE_TOKENS, tokens)
    part.mark("committed")
    part.fields |= {"reused_tokens": reused, "imported_tokens": tokens - reused if imported else 0}
    part.services.ledger.advance(part.handoff_id, "decode", part.attempt, Event.COMMIT, part.fields)


def _emit(part: Part, steps: Iterable[TokenStep]) -> int:
    """Log every step; the last one of the last sample and the terminal are one write."""
    ledger, sent, running = part.services.ledger, 0, part.record.request.sampling.n
    for step in steps:
        part.mark("first_token")
        running -= step.finish is not None
        if not running:
            part.mark("finished")
        entry = TokenEntry(
            seq=sent,
            token_ids=step.token_ids,
            finish=step.finish,
            held_tokens=None if running else int(part.fields["reused_tokens"]),
            sample=step.sample,
            logprobs=step.logprobs,
            more=step.finish is not None and running > 0,
        )
        fields = None if running and sent else part.fields
        ledger.emit(part.handoff_id, part.attempt, entry, fields)
        sent += len(step.token_ids)
    return sent


def _reader(part: Part, attempts: Attempts, first_page: int) -> PageReader:
    services, request = part.services, part.record.request
    frames = FrameReader(
        request.handoff_id,
        attempts,
        services.contract.page_shape,
        *part.addresses(),
        first_page=first_page,
        transfer_tokens=request.transfer_tokens,
    )
    return PageReader(services.pages, frames, services.settings.broker, part.check, part.require_prefill)
