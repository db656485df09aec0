"""Transfer: a prompt's pages coming to D, over as many attempts of P as it takes.

D alone says from which page on: a page that was verified and imported never travels again, whoever sends the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from pipeline import codec
from pipeline.broker import stream
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.record import Accept, Snapshot
from pipeline.broker.stream import PageReader
from pipeline.engines.base import Admission
from pipeline.errors import CrossfillError, DeadlineError, PageServerError, PeerError
from pipeline.frame import AbortedError, Commit, FrameReader
from pipeline.handoff import Attempts, Event
from pipeline.header import require
from pipeline.page import page_count
from pipeline.request import Request
from pipeline.stages.drain import Part, PrefillFailedError

T = TypeVar("T")
NO_TOKENS = Commit(0)  # of a prompt whose first token D computes, or that it holds


class TransferError(Exception):
    """`error` is P's, the wire's or the page server's, not D's, and nobody is left to send again: computing the prompt
    may still help.

    `attempts`: the last that was tried.
    """

    def __init__(self, error: CrossfillError, attempts: Attempts) -> None:
        super().__init__(str(error))
        self.error = error
        self.attempts = attempts


class Transfer:
    """`await_prefill`, then `receive` once D has room. Both try again with another attempt of P."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._prefill_attempt = part.record.attempt("prefill")
        self._next = 0
        self._streaming = False  # the record says that this attempt's pages come in
        self._wanted = page_count(part.request.transfer_tokens)

    def await_prefill(self) -> None:
        """Wait until P has begun. Raises TransferError, QuarantinedError."""
        self._trying(self._await_prefill)

    def receive(self, admission: Admission) -> Commit:
        """Import every page that `admission` does not hold; returns P's first tokens. Raises as `await_prefill`."""
        self._next = admission.held_pages
        return self._trying(lambda: self._receive(admission))

    def _trying(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except PageServerError as error:  # ours: whoever sends again would send to the same one
                raise TransferError(error, self._attempts) from error
            except (PeerError, DeadlineError) as error:
                self._resend(error)

    def _resend(self, error: CrossfillError) -> None:
        """Have the rest sent by another attempt of P. Raises TransferError when there is none to be had."""
        part, attempts, seen = self._part, self._attempts, self._part.watch.look()
        part.check()
        info = error.cause if isinstance(error, PrefillFailedError) else ErrorInfo.of(error)
        # What cannot succeed when tried again is tried elsewhere, and so is a queue that nobody has served in time.
        elsewhere = not info.retryable or seen is None or not seen.begun("prefill")
        if not part.services.dispatch.resend(part.handoff_id, attempts, info, elsewhere=elsewhere):
            raise TransferError(error, attempts) from error
        self._prefill_attempt += 1
        self._streaming = False

    @property
    def _attempts(self) -> Attempts:
        return Attempts(self._prefill_attempt, self._part.attempt)

    @property
    def _codecs(self) -> tuple[str, ...]:
        """What we take."""
        return codec.understood(self._part.services.settings.broker.codec)

    def _await_prefill(self) -> None:
        def begun(seen: Snapshot) -> bool | None:
            self._part.require_prefill()
            return seen.begun("prefill") or None

        self._part.watch.wait_for(begun, self._part.services.settings.handoff.queue_s, "a prefill worker")

    def _receive(self, admission: Admission) -> Commit:
        part, services = self._part, self._part.services
        self._await_prefill()
        self._accept()
        if self._whole():
            return NO_TOKENS
        try:
            with closing(self._reader()) as reader:
                commit = self._import(admission, reader)
        except (PrefillFailedError, AbortedError, DeadlineError):
            if not self._whole():
                raise
            return NO_TOKENS  # every page is here and verified: only P's last word is missing
        _require_first_tokens(part.request, commit, services.contract.vocab_size)
        return commit

    def _whole(self) -> bool:
        """P has nothing that D still needs."""
        return self._next == self._wanted and not self._part.request.first_token

    def _accept(self) -> None:
        """What came under an older pair of attempts and was not imported goes, and is sent again."""
        part, services = self._part, self._part.services
        if services.address is not None:
            services.ledger.place(part.handoff_id, part.attempt, services.address)
        server = services.pages.at(services.address)
        stream.raise_fence(server, part.handoff_id, self._attempts, services.settings.broker)
        part.mark("accepted")
        accept = Accept(self._attempts.prefill, self._attempts.decode, self._next, self._codecs)
        services.ledger.accept(part.handoff_id, accept, part.fields)

    def _import(self, admission: Admission, reader: PageReader) -> Commit:
        part, services = self._part, self._part.services
        while True:
            item = reader.read(services.settings.handoff.progress_s)
            if isinstance(item, Commit):
                part.mark("last_page_in")
                return item
            admission.import_page(item)
            reader.imported()
            self._next += 1
            if not self._streaming:
                self._streaming = True
                part.mark("first_page_in")
                services.ledger.advance(part.handoff_id, "decode", part.attempt, Event.IMPORT, part.fields)

    def _reader(self) -> PageReader:
        part, services, request = self._part, self._part.services, self._part.request
        frames = FrameReader(
            request.handoff_id,
            self._attempts,
            services.contract.page_shape,
            *part.addresses(),
            first_page=self._next,
            transfer_tokens=request.transfer_tokens,
            codecs=self._codecs,
        )
        server = services.pages.at(services.address)
        return PageReader(server, frames, services.settings.broker, part.check, part.require_prefill)


def _require_first_tokens(request: Request, commit: Commit, vocab_size: int) -> None:
    """Raise FrameError unless P sent a token for each sample where it was asked for them, else none; logprobs too."""
    sampling, said = request.sampling, commit.first_tokens
    wanted = sampling.n * request.first_token
    require(len(said) == wanted, "number of first tokens", wanted, said)
    require(all(token < vocab_size for token in said), "first token", f"below {vocab_size}", said)
    logprobs = 0 if sampling.logprobs is None else wanted
    require(len(commit.first_logprobs) == logprobs, "logprobs of first tokens", logprobs, commit.first_logprobs)
