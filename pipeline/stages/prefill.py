"""Prefill: compute a prompt and send the pages that D asks for, each as soon as it is ready.

Compute starts at once; nothing is written before D's `accept` for this very attempt.
"""

from __future__ import annotations

import contextlib
from contextlib import closing

from pipeline import prefix
from pipeline.broker.ledger import Accept, Record
from pipeline.broker.stream import PageWriter
from pipeline.engines.base import Prefill, PrefillEngine
from pipeline.errors import CrossfillError, DeadlineError, HandoffCancelledError, StaleAttemptError
from pipeline.frame import FrameWriter
from pipeline.handoff import Attempts
from pipeline.page import page_count
from pipeline.request import Request
from pipeline.stages.drain import Part, Services, taking_part

_SLICE_S = 0.25  # how often a blocked wait looks whether the work is still wanted


def run(services: Services, engine: PrefillEngine, handoff_id: str) -> dict[str, object]:
    """P's job. Returns a summary for RQ; raises CrossfillError."""
    with taking_part(services, handoff_id, "prefill") as part:
        request = part.record.request
        with closing(engine.prefill(request)) as work:
            accept = part.watch.wait_for(
                lambda record: _accept_for(record, part.attempt), services.settings.handoff.accept_s, "accept"
            )
            if accept.first_page == page_count(request.transfer_tokens):
                return {"outcome": "held", "pages": 0}
            return _send(part, work, accept)


def _accept_for(record: Record, attempt: int) -> Accept | None:
    accept = record.accept
    return accept if accept and accept.prefill_attempt == attempt else None


def _send(part: Part, work: Prefill, accept: Accept) -> dict[str, object]:
    request = part.record.request
    writer = _writer(part, request, accept)
    work.skip_to(accept.first_page)
    try:
        writer.open()
        for index in range(accept.first_page, page_count(request.transfer_tokens)):
            _await_page(part, work, index)
            writer.write(work.read(index))
            part.mark("first_page_out")
            if work.done:
                part.mark("prefill_ended")
        part.mark("prefill_ended")
        part.mark("last_page_out")
        part.fields |= {"pages": writer.pages_written, "bytes": writer.bytes_written}
        part.flush()
        writer.commit(work.first_tokens)
    except (HandoffCancelledError, StaleAttemptError):
        raise
    except CrossfillError as error:
        with contextlib.suppress(CrossfillError):
            writer.abort(error.code, str(error))
        raise
    return {"outcome": "sent", "pages": writer.pages_written, "bytes": writer.bytes_written}


def _await_page(part: Part, work: Prefill, index: int) -> None:
    waited = 0.0
    while not work.wait_ready(index, _SLICE_S):
        part.check()
        waited += _SLICE_S
        if waited > part.services.settings.handoff.progress_s:
            raise DeadlineError(f"page {index} was not computed within {waited:g} s")
    part.check()


def _writer(part: Part, request: Request, accept: Accept) -> PageWriter:
    services = part.services
    start = prefix.seed(services.contract.digest, request.salt)
    frames = FrameWriter(
        request.handoff_id,
        Attempts(accept.prefill_attempt, accept.decode_attempt),
        services.contract.page_shape,
        prefix.chain(start, request.token_ids[: request.transfer_tokens]),
        prefix.prompt_digest(start, request.token_ids),
    )
    return PageWriter(services.pages, services.blocking, frames, services.settings.broker, part.check)
