"""Prefill: compute a prompt and send the pages that D asks for, each as soon as it is ready.

Compute starts at once; nothing is written before D's `accept` for this very attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

from pipeline import codec
from pipeline.broker.address import Address
from pipeline.broker.record import Accept, Snapshot
from pipeline.broker.stream import PageWriter
from pipeline.engines.base import Prefill, PrefillEngine, wait_in_slices
from pipeline.errors import CrossfillError, DeadlineError, HandoffCancelledError, StaleAttemptError
from pipeline.frame import FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import page_count
from pipeline.request import Request
from pipeline.stages.drain import Part, Services, require_wanted, taking_part


def run(services: Services, engine: PrefillEngine, handoff_id: str) -> dict[str, object]:
    """P's job. Returns a summary for RQ; raises CrossfillError."""
    with taking_part(services, handoff_id, "prefill") as part, services.observer.watching(part):
        require_wanted(part.record)
        request = part.request
        with closing(engine.prefill(request)) as work:
            wanted = part.watch.wait_for(
                lambda seen: _wanted(seen, part.attempt), services.settings.handoff.accept_s, "accept"
            )
            if wanted.accept.first_page == page_count(request.transfer_tokens) and not request.first_token:
                return {"outcome": "held", "pages": 0}
            with closing(_writer(part, request, wanted)) as writer:
                return _send(part, work, wanted.accept, writer)


class _Wanted(NamedTuple):
    """D's word, and where it waits for the pages: both of one look at the record."""

    accept: Accept
    where: Address | None


def _wanted(seen: Snapshot, attempt: int) -> _Wanted | None:
    accept = seen.accept
    if accept and accept.prefill_attempt == attempt:
        return _Wanted(accept, seen.page_server)  # first: where D held every page, it may have committed by now
    require_wanted(seen)
    return None


def _send(part: Part, work: Prefill, accept: Accept, writer: PageWriter) -> dict[str, object]:
    request = part.request
    work.skip_to(accept.first_page)
    try:
        writer.open()
        for index in range(accept.first_page, page_count(request.transfer_tokens)):
            _await(part, partial(work.wait_ready, index), f"page {index}")
            writer.write(work.read(index))
            if writer.pages_written:
                part.mark("first_page_out")
            if work.done:
                part.mark("prefill_ended")
        if request.first_token:
            _await(part, work.wait_done, "P's first token")
        part.mark("prefill_ended")
        writer.flush()
        if writer.pages_written:
            part.mark("first_page_out")
        part.mark("last_page_out")
        part.fields |= {"pages": writer.pages_written, "bytes": writer.bytes_written}
        part.flush()
        writer.commit(work.first_tokens, work.first_logprobs)
    except (HandoffCancelledError, StaleAttemptError):
        raise
    except CrossfillError as error:
        with contextlib.suppress(CrossfillError):
            writer.abort(error.code, str(error))
        raise
    return {"outcome": "sent", "pages": writer.pages_written, "bytes": writer.bytes_written}


def _await(part: Part, wait: Callable[[float], bool], what: str) -> None:
    limit = part.services.settings.handoff.progress_s
    if not wait_in_slices(wait, limit, part.check):
        raise DeadlineError(f"{what} was not computed within {limit:g} s")
    part.check()


def _writer(part: Part, request: Request, wanted: _Wanted) -> PageWriter:
    services, accept = part.services, wanted.accept
    attempts = Attempts(accept.prefill_attempt, accept.decode_attempt)
    chosen = codec.spoken(services.settings.broker.codec, accept.codecs)
    frames = FrameWriter(request.handoff_id, attempts, services.contract.page_shape, *part.addresses(), codec=chosen)
    server, settings = services.pages.at(wanted.where), services.pages.settings(wanted.where)
    return PageWriter(server, frames, settings, part.check)
