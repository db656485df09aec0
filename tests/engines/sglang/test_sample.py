"""Texts that SGLang decodes, without SGLang: what is cut, how logprobs join, and how further samples come to decode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import logprob
from pipeline.engines.base import TokenStep
from pipeline.engines.sglang.admission import SglangAdmission
from pipeline.engines.sglang.message import Kind, Message
from pipeline.engines.sglang.sample import End
from pipeline.errors import EngineError, HandoffCancelledError
from pipeline.logprob import TokenLogprob
from pipeline.page import Page, PageShape
from pipeline.request import Request, Sampling

SHAPE = PageShape(layers=1, kv_heads=1, head_dim=2)
STOP = 9


class Host:
    """An engine that keeps what it is asked for. A link that takes every page."""

    def __init__(self) -> None:
        self.aborted: list[int] = []
        self.joined: list[Any] = []
        self.said: list[Message] = []
        self.copied: list[tuple[int, int, int]] = []  # room, page, what is in it
        self.link: Any = SimpleNamespace(shape=SHAPE, batch=1, say=self._say, copy_in=self._copy_in)
        self.on_commit: Callable[[], None] = lambda: None

    def _say(self, message: Message) -> None:
        self.said.append(message)
        self.on_commit()

    def _copy_in(self, room: int, page: int, pages: Any) -> bool:
        self.copied.append((room, page, int(pages.max())))
        return True

    def abort(self, ticket: Any) -> None:
        self.aborted.append(ticket.room)
        if ticket.closed:
            ticket.end()

    def join(self, ticket: Any) -> None:
        self.joined.append(ticket)

    def moved(self) -> None:
        pass


def admitted(
    tokens: int, *, n: int = 1, limit: int = 8, held: int = 0, imports: bool = True, **asked: Any
) -> tuple[Host, SglangAdmission]:
    """With every page imported, unless told otherwise; page i is full of i + 1."""
    host = Host()
    request = Request("h", tuple(range(tokens)), Sampling(limit, stop_token_ids=(STOP,), **asked), first_token=True)
    rooms = list(range(1, n + 1))
    admission = SglangAdmission(rooms, [request] * n, host, End(frozenset([STOP]), limit))
    admission.on_message(Message(Kind.ADMITTED, 1, held))
    if imports:
        import_all(admission)
        host.copied.clear()
    return host, admission


def import_all(admission: SglangAdmission) -> None:
    tokens = admission.request.transfer_tokens
    for index in range(admission.held_pages, admission.pages):
        data = np.full(SHAPE.array, index + 1, np.float16)
        admission.import_page(Page(index, min(64, tokens - 64 * index), data))


def say(ticket: Any, *tokens: int, finished: str | None = None) -> None:
    ticket.on_output(list(tokens), finished, {})


def tell(ticket: Any, token: int, value: float) -> None:
    data = logprob.pack([TokenLogprob(token, value, ((token, value),))])
    ticket.on_message(Message(Kind.LOGPROB, ticket.room, value=token, data=data))


def ids(steps: Sequence[TokenStep]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def test_ps_token_is_handed_out_at_once_and_cut_from_what_sglang_sends() -> None:
    host, admission = admitted(70)
    steps = admission.decode([5])
    assert host.said == [Message(Kind.COMMIT, 1, value=5)]
    assert next(steps) == TokenStep((5,))
    say(admission, 5, 6)
    say(admission, 7, STOP, 8)
    assert list(steps) == [TokenStep((6,)), TokenStep((7, STOP), "stop")]
    assert (host.aborted, admission.tokens_sampled) == ([1], 4)


def test_a_step_waits_for_its_logprobs() -> None:
    _, admission = admitted(70, logprobs=1)
    steps = admission.decode([5], [TokenLogprob(5, -0.5)])
    assert next(steps) == TokenStep((5,), logprobs=(TokenLogprob(5, -0.5),))
    tell(admission, 6, -1.0)  # before its token
    say(admission, 5)
    say(admission, 6, STOP)
    assert not admission.steps
    tell(admission, STOP, -2.0)  # behind it
    expected = tuple(TokenLogprob(token, value, ((token, value),)) for token, value in ((6, -1.0), (STOP, -2.0)))
    assert list(steps) == [TokenStep((6, STOP), "stop", logprobs=expected)]


@pytest.mark.parametrize("how", ["told", "closed", "failed"])
def test_a_text_is_not_forgotten_while_its_logprobs_are_on_their_way(how: str) -> None:
    """They come through another connection than SGLang's last output, which may be quicker."""
    _, admission = admitted(70, logprobs=1, limit=2)
    steps = admission.decode([5], [TokenLogprob(5, -0.5)])
    say(admission, 5, 6, finished="length")
    admission.end()
    assert admission.ended
    assert not admission.over
    if how == "told":
        tell(admission, 6, -1.0)
        assert ids(list(steps)) == [5, 6]
    elif how == "closed":
        admission.close()
    else:
        admission.fail(EngineError("SGLang's scheduler is gone"))
    assert admission.over


def test_logprobs_that_p_owes_are_missed() -> None:
    _, admission = admitted(70, logprobs=1)
    with pytest.raises(EngineError, match="1 first tokens came with 0 logprobs"):
        admission.decode([5])


@pytest.mark.parametrize("held", [0, 1, 3])
def test_kept_pages_begin_with_those_that_were_held(held: int) -> None:
    host, admission = admitted(200, held=held, imports=False)
    host.link.copy_out = lambda room, page, count: np.full((count, *SHAPE.array), page + 1, np.float16)
    admission.keep_pages()
    import_all(admission)
    admission.keep_pages()  # too late to change anything
    pages = list(admission.export_pages())
    assert [(page.index, page.tokens, int(page.data.max())) for page in pages] == [
        (0, 64, 1), (1, 64, 2), (2, 64, 3), (3, 8, 4),
    ]  # fmt: skip


def test_pages_that_are_gone_are_not_kept() -> None:
    host, admission = admitted(200, held=2, imports=False)
    host.link.copy_out = lambda *_: None
    admission.keep_pages()
    with pytest.raises(EngineError, match="keep_pages"):
        admission.export_pages()


def test_a_fault_in_the_plug_in_ends_the_text() -> None:
    _, admission = admitted(70)
    steps = admission.decode([5])
    admission.on_message(Message(Kind.FAILED, 1, data=b"no token may follow"))
    assert next(steps).token_ids == (5,)
    with pytest.raises(EngineError, match="no token may follow"):
        next(steps)


@pytest.mark.parametrize(("tokens", "held", "tail"), [(70, 1, [(2, 1, 2)]), (128, 2, []), (40, 0, [(2, 0, 1)])])
def test_a_further_sample_joins_behind_the_first_and_gets_the_tail(tokens: int, held: int, tail: list[Any]) -> None:
    host, admission = admitted(tokens, n=2)
    steps = admission.decode([5, 15])
    assert [next(steps), next(steps)] == [TokenStep((5,)), TokenStep((15,), sample=1)]
    assert host.joined == []  # the pages are in no cache yet
    say(admission, 5, 6)
    say(admission, STOP)
    assert ids([next(steps), next(steps)]) == [6, STOP]
    (sibling,) = host.joined
    assert host.aborted == []  # its pages must stay until the other has found them
    sibling.on_message(Message(Kind.ADMITTED, 2, held))
    host.on_commit = lambda: say(sibling, 15, 16, STOP)
    assert list(steps) == [TokenStep((16, STOP), "stop", sample=1)]
    assert host.copied == tail
    assert host.said[1:] == [Message(Kind.COMMIT, 2, value=15)]
    assert sorted(host.aborted) == [1, 2]


def test_the_first_sample_runs_on_until_the_others_have_its_pages() -> None:
    """SGLang was told a few tokens more than the limit."""
    host, admission = admitted(70, n=2, limit=2)
    steps = admission.decode([5, 15])
    say(admission, 5, 6)
    say(admission, 7)
    assert ids([next(steps) for _ in range(3)]) == [5, 15, 6]
    assert host.aborted == []
    (sibling,) = host.joined
    sibling.on_message(Message(Kind.ADMITTED, 2, 1))
    host.on_commit = lambda: say(sibling, 15, 16, finished="length")
    assert list(steps) == [TokenStep((16,), "length", sample=1)]
    assert host.aborted == [1]


def test_a_sample_that_stops_on_ps_token_needs_no_sglang() -> None:
    host, admission = admitted(70, n=3)
    steps = admission.decode([5, STOP, STOP])
    say(admission, 5, STOP)
    assert [(step.token_ids, step.finish, step.sample) for step in steps] == [
        ((5,), None, 0),
        ((STOP,), "stop", 1),
        ((STOP,), "stop", 2),
        ((STOP,), "stop", 0),
    ]
    assert host.joined == []
    assert host.aborted == [1]


def test_pages_that_were_evicted_meanwhile_are_missed() -> None:
    host, admission = admitted(200, n=2)
    steps = admission.decode([5, 15])
    say(admission, 5, 6)
    assert [next(steps).token_ids for _ in range(3)] == [(5,), (15,), (6,)]
    host.joined[0].on_message(Message(Kind.ADMITTED, 2, 1))
    with pytest.raises(EngineError, match="no longer holds 3 pages"):
        next(steps)


def test_a_sample_that_fails_fails_all() -> None:
    host, admission = admitted(70, n=2)
    steps = admission.decode([5, 15])
    say(admission, 5, 6)
    assert [next(steps).token_ids for _ in range(3)] == [(5,), (15,), (6,)]
    host.joined[0].fail(EngineError("SGLang aborted the request"))
    with pytest.raises(EngineError, match="SGLang aborted"):
        next(steps)


def test_close_ends_every_sample_and_wakes_the_job() -> None:
    host, admission = admitted(70, n=3)
    steps = admission.decode([5, 15, 25])
    say(admission, 5, 6)
    assert [next(steps).token_ids for _ in range(4)] == [(5,), (15,), (25,), (6,)]
    waking: list[BaseException] = []

    def wait() -> None:
        try:
            next(steps)
        except BaseException as error:
            waking.append(error)

    job = threading.Thread(target=wait)
    job.start()
    admission.close()
    job.join(60)
    assert [type(error) for error in waking] == [HandoffCancelledError]
    assert sorted(host.aborted) == [1, 2, 3]
    assert all(sample.ended for sample in (admission, *host.joined))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_first_tokens_as_samples(count: int) -> None:
    _, admission = admitted(70, n=2)
    with pytest.raises(EngineError, match=f"goes on from 2 first tokens, {count} came"):
        admission.decode([5] * count)
