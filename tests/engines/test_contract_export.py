"""The contract suite, third part: the pages of an admission come out again as they went in, for a capture."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from pipeline.engines.base import Admission, Engine, EngineStats
from pipeline.errors import CrossfillError, EngineError
from pipeline.page import Page, page_count
from pipeline.request import Request, Sampling
from tests.engines.flow import PATIENCE_S, Waiter, deliver, export, import_missing, prompt, read_text, request, settles
from tests.engines.test_contract import relative_rms

LENGTHS = (1, 2, 64, 65, 129, 200, 321)
LONG = Sampling(max_tokens=400, temperature=0.0)


def same(ours: list[Page], theirs: list[Page]) -> bool:
    """Equal to the last bit."""
    return [(p.index, p.tokens) for p in ours] == [(p.index, p.tokens) for p in theirs] and all(
        np.array_equal(a.data, b.data) for a, b in zip(ours, theirs, strict=True)
    )


def kept(engine: Engine, order: Request, *, local: bool = False) -> Admission:
    admission = engine.admit(order, local=local, timeout_s=PATIENCE_S)
    admission.keep_pages()
    return admission


@pytest.mark.role("decode")
@pytest.mark.parametrize("tokens", LENGTHS)
def test_what_was_imported_comes_out_behind_the_last_step(engine: Engine, twin: Engine, tokens: int) -> None:
    order = request(prompt(tokens), to=engine)
    sent = export(twin, order)
    with closing(kept(engine, order)) as admission:
        import_missing(admission, sent)
        assert len(read_text(admission.decode(sent.first_tokens))[0]) == 8
        out = list(admission.export_pages())
        assert same(out, sent)
        for page in out:
            page.data.fill(1)  # a fresh array: nobody else's KV
        assert same(list(admission.export_pages()), sent)


@pytest.mark.role("decode")
def test_imported_pages_come_out_while_others_are_missing(engine: Engine, twin: Engine) -> None:
    order = request(prompt(300), to=engine)
    sent = export(twin, order)
    with closing(kept(engine, order)) as admission:
        assert list(admission.export_pages()) == []
        for page in sent[:3]:
            admission.import_page(page)
        assert same(list(admission.export_pages()), sent[:3])
        for page in sent[3:]:
            admission.import_page(page)
        assert same(list(admission.export_pages()), sent)
        assert len(read_text(admission.decode(sent.first_tokens))[0]) == 8


@pytest.mark.role("decode")
def test_held_pages_come_out_too(engine: Engine, twin: Engine) -> None:
    shared = prompt(192)
    first = request((*shared, *prompt(30, 1)), to=engine)
    deliver(engine, first, export(twin, first))
    order = request((*shared, *prompt(100, 2)), to=engine)
    sent = export(twin, order)
    with closing(kept(engine, order)) as admission:
        assert admission.held_pages == 3
        import_missing(admission, sent)
        read_text(admission.decode(sent.first_tokens))
        out = list(admission.export_pages())
    assert len(out) == page_count(291)
    assert same(out[3:], sent[3:])
    assert all(relative_rms(ours, theirs) <= 5e-3 for ours, theirs in zip(out, sent, strict=True))


@pytest.mark.parametrize("tokens", [1, 65, 200])
def test_a_prompt_that_was_computed_here_comes_out(engine: Engine, twin: Engine, tokens: int) -> None:
    order = request(prompt(tokens))
    with closing(kept(engine, order, local=True)) as admission:
        read_text(admission.decode())
        out = list(admission.export_pages())
    wanted = export(twin, request(prompt(tokens)))
    assert [(page.index, page.tokens) for page in out] == [(page.index, page.tokens) for page in wanted]
    assert all(relative_rms(ours, theirs) <= 5e-3 for ours, theirs in zip(out, wanted, strict=True))


def test_they_come_out_in_the_middle_of_the_text_beside_others(engine: Engine, twin: Engine) -> None:
    """Wanted late, by an operator: while it decodes, in a batch with a longer and a shorter prompt."""
    others = [request(prompt(tokens, tokens), LONG) for tokens in (400, 70)]
    order = request(prompt(200), LONG)
    sent = export(twin, order)
    admissions = [engine.admit(one, local=True, timeout_s=PATIENCE_S) for one in others]
    running = [Waiter(lambda one=one: read_text(one.decode())) for one in admissions]  # type: ignore[misc]
    with closing(engine.admit(order, timeout_s=PATIENCE_S)) as admission:
        import_missing(admission, sent)
        steps = iter(admission.decode())
        for _ in range(20):
            next(steps)
        admission.keep_pages()
        assert same(list(admission.export_pages()), sent)
        next(steps)
        assert same(list(admission.export_pages()), sent)
    for one in admissions:
        one.close()
    for waiter in running:
        waiter.join()


@pytest.mark.role("decode")
def test_nothing_comes_out_of_a_closed_admission(engine: Engine, twin: Engine, baseline: EngineStats) -> None:
    order = request(prompt(200), to=engine)
    admission = kept(engine, order)
    import_missing(admission, export(twin, order))
    admission.close()
    assert settles(engine, baseline)
    with pytest.raises(CrossfillError):
        list(admission.export_pages())


def test_kept_pages_are_given_back(engine: Engine, twin: Engine, baseline: EngineStats) -> None:
    """Kept behind the last step, gone with close; and without `keep_pages` nothing is kept."""
    order = request(prompt(200))
    sent = export(twin, order)
    admission = kept(engine, order)
    import_missing(admission, sent)
    read_text(admission.decode())
    admission.close()
    assert settles(engine, baseline)
    engine.reset_prefix_cache()
    with closing(engine.admit(order, timeout_s=PATIENCE_S)) as careless:
        import_missing(careless, sent)
        read_text(careless.decode())
        assert exported(careless) == []


def exported(admission: Admission) -> list[Page]:
    """What comes out; an engine may also say that nothing does."""
    try:
        return list(admission.export_pages())
    except EngineError:
        return []
