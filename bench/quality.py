"""What does a lossy codec change? Pages of real text go through it; then the same text is continued from both.

Two questions. With the text's own continuation fed token by token (the reference engine, whose logits are exact and
whole): how far apart are the two distributions, how often is the likeliest token the same, how much more surprising is
the real text? And with each engine's own greedy decoding from imported pages: how many tokens come out equal?
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.codec import Codec
from pipeline.engines.base import Engine
from pipeline.engines.reference.model import KvCache, Model
from pipeline.page import Page, page_count
from pipeline.request import Request, Sampling

ROOT = Path(__file__).parent.parent
TEXTS = {"legal prose": ROOT / "LICENSE", "manual": ROOT / "docs/wire-format.md", "code": ROOT / "pipeline/codec.py"}
WAIT_S = 600.0
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Passage:
    """Token ids of a text: `context` is prefilled, `continuation` is what really follows. `digest`: of those ids."""

    name: str
    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.array([*self.context, *self.continuation], "<u4").tobytes()).hexdigest()[:16]


def passages(model: Path, context: int, continuation: int) -> list[Passage]:
    """The beginning of each text. Raises ValueError where one is too short."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for name, path in TEXTS.items():
        ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(ids) < context + continuation:
            raise ValueError(f"{path.name} has {len(ids)} tokens, {context + continuation} are asked for")
        found.append(Passage(name, tuple(ids[:context]), tuple(ids[context : context + continuation])))
    return found


def export(engine: Engine, context: Sequence[int]) -> list[Page]:
    """The pages a decode engine needs of this prompt, computed afresh."""
    request = _request(context, 1)
    prefill = engine.prefill(request)
    try:
        return [_read(prefill, index) for index in range(page_count(request.transfer_tokens))]
    finally:
        prefill.close()


def _read(prefill: Any, index: int) -> Page:
    if not prefill.wait_ready(index, WAIT_S):
        raise TimeoutError(f"page {index} was not computed within {WAIT_S:.0f} s")
    page: Page = prefill.read(index)
    return page


def through(codec: Codec, pages: Sequence[Page]) -> list[Page]:
    """The pages as they come out at the other end."""
    found = []
    for page in pages:
        raw, dim = page.data.reshape(-1).view(np.uint8).data, page.data.shape[-1]
        data = codec.decode(codec.encode(raw, dim), len(raw), dim)
        found.append(Page(page.index, page.tokens, np.frombuffer(data, np.float16).reshape(page.data.shape)))
    return found


def forced(model: Model, pages: Sequence[Page], passage: Passage) -> Logits:
    """Logits `(continuation, vocab)` before each token of the continuation, the context's KV taken from `pages`."""
    return np.stack(list(_steps(model, pages, passage)))


def _steps(model: Model, pages: Sequence[Page], passage: Passage) -> Iterator[Logits]:
    cache = KvCache(model.shape, len(passage.context) + len(passage.continuation))
    for page in pages:
        cache.append_page(page.data, page.tokens)
    for token in (passage.context[-1], *passage.continuation[:-1]):
        yield model.logits([token], cache)


def distance(exact: Logits, changed: Logits, continuation: Sequence[int]) -> dict[str, float]:
    """KL(exact || changed) in nats, mean and largest; share of equal best tokens; what the real token's negative log
    likelihood gained, in nats a token."""
    log_p, log_q = _log_softmax(exact), _log_softmax(changed)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    rows = np.arange(len(continuation)), np.asarray(continuation)
    return {
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "best_equal": float((exact.argmax(axis=1) == changed.argmax(axis=1)).mean()),
        "nll": float(-log_p[rows].mean()),
        "nll_added": float((log_p[rows] - log_q[rows]).mean()),
    }


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def greedy(engine: Engine, pages: Sequence[Page], context: Sequence[int], count: int) -> list[int]:
    """What `engine` answers from these pages, stop ids ignored."""
    admission = engine.admit(_request(context, count))
    try:
        for page in pages[admission.held_pages :]:
            admission.import_page(page)
        return [token for step in admission.decode() for token in step.token_ids]
    finally:
        admission.close()


def _request(context: Sequence[int], count: int) -> Request:
    """Alone in its salt: nothing an engine holds already is taken instead of what is imported."""
    return Request(
        secrets.token_hex(16), tuple(context), Sampling(max_tokens=count, temperature=0.0), secrets.token_hex(8)
    )


def leading(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )


def report(
    engine: Engine, model: Model, found: Sequence[Passage], pages: Sequence[Sequence[Page]], codec: Codec
) -> list[dict[str, Any]]:
    """One row a passage."""
    rows = []
    for passage, exact in zip(found, pages, strict=True):
        changed, count = through(codec, exact), len(passage.continuation)
        measured = distance(forced(model, exact, passage), forced(model, changed, passage), passage.continuation)
        answers = [greedy(engine, given, passage.context, count) for given in (exact, changed)]
        equal = sum(a == b for a, b in zip(*answers, strict=True))
        row = {
            "text": passage.name,
            "codec": codec.name,
            "decoder": engine.name,
            "context_tokens": len(passage.context),
        }
        row |= {"text_digest": passage.digest, "relative_rms": _relative_rms(exact, changed)}
        rows.append(
            row | measured | {"greedy_tokens": count, "greedy_equal": equal, "greedy_leading": leading(*answers)}
        )
    return rows


def _relative_rms(exact: Sequence[Page], changed: Sequence[Page]) -> float:
    theirs = np.concatenate([page.data.astype(np.float64).reshape(-1) for page in exact])
    ours = np.concatenate([page.data.astype(np.float64).reshape(-1) for page in changed])
    return float(np.sqrt(((ours - theirs) ** 2).sum() / (theirs**2).sum()))
