"""`crossfill handoff show|verify|diff FILE`: what is in `.handoff` files, whether it is whole, and how two differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pipeline.capture import Capture, Reader
from pipeline.cli import view, waterfall
from pipeline.deviation import Deviation, Measure
from pipeline.errors import CaptureError, ConfigError
from pipeline.page import page_count

MAX_ROWS = 48  # of a table; a longer one shows every n-th page
_SHOWN_TOKENS = 24


def add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--plot", type=Path, metavar="PNG", help="of diff: a heat map of layers by tokens")
    command.add_argument("--tolerance", type=float, metavar="X", help="of diff: relative RMS of a token that counts")


def run(options: argparse.Namespace, verb: str, files: Sequence[Path]) -> int:
    """The exit status: 1 where a file is not whole or two differ. Raises CaptureError, ConfigError."""
    return VERBS[verb](options, files)


def _show(options: argparse.Namespace, files: Sequence[Path]) -> int:
    for file in _some(files, "show"):
        with open_capture(file) as reader:
            capture = reader.capture
        if options.json:
            print(json.dumps(asdict(capture), indent=2))
        else:
            Console().print(draw(capture, file))
    return 0


def _verify(options: argparse.Namespace, files: Sequence[Path]) -> int:
    """Every file is looked at, whatever is wrong with others."""
    wrong = 0
    for file in _some(files, "verify"):
        try:
            with open_capture(file) as reader:
                capture = reader.verify()
            said = f"whole: {_contents(capture)}, every digest is right"
        except CaptureError as error:
            wrong += 1
            said = f"BROKEN: {error}"
        print(json.dumps({"file": str(file), "said": said}) if options.json else f"{file}: {said}")
    return 1 if wrong else 0


def _diff(options: argparse.Namespace, files: Sequence[Path]) -> int:
    if len(files) != 2:
        raise ConfigError(f"`handoff diff` compares two files, {len(files)} were named")
    with open_capture(files[0]) as ours, open_capture(files[1]) as theirs:
        if ours.capture.redacted or theirs.capture.redacted:
            return _diff_digests(ours.capture, theirs.capture)
        found = compare(ours, theirs, options.tolerance)
    report(found, options, f"{files[0].name} against {files[1].name}")
    return 1 if found.first else 0


def open_capture(file: Path) -> OpenCapture:
    """Raises CaptureError, also where the file cannot be opened."""
    return OpenCapture(file)


class OpenCapture(ExitStack):
    """A Reader over a file that is closed at the end of the block."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def __enter__(self) -> Reader:  # type: ignore[override]
        try:
            return Reader(self.enter_context(self._file.open("rb")))
        except OSError as error:
            raise CaptureError(f"cannot read {self._file}: {error.strerror}") from error


def load(file: Path) -> Capture:
    """The head of a file that was verified to its end. Raises CaptureError."""
    with open_capture(file) as reader:
        return reader.verify()


def compare(ours: Reader, theirs: Reader, tolerance: float | None = None) -> Deviation:
    """The pages that both have. Raises CaptureError for captures of different prompts or models."""
    a, b = ours.capture, theirs.capture
    if a.request.token_ids != b.request.token_ids:
        at = next(
            (i for i, (x, y) in enumerate(zip(a.request.token_ids, b.request.token_ids, strict=False)) if x != y),
            min(a.prompt_tokens, b.prompt_tokens),
        )
        raise CaptureError(f"the two are captures of different prompts: they part at token {at}")
    if a.contract.page_shape != b.contract.page_shape:
        raise CaptureError(f"the two are of different models: {a.contract.page_shape} and {b.contract.page_shape}")
    found = Deviation(a.contract.layers, *([tolerance] if tolerance is not None else []))
    mine, others = ours.pages(), theirs.pages()
    for our_page, their_page in zip(mine, others, strict=False):
        found.add(our_page, their_page)
    for rest in (mine, others):  # to the end of both: what was compared must be whole
        for _ in rest:
            pass
    return found


def _diff_digests(ours: Capture, theirs: Capture) -> int:
    """A redacted capture tells no more than which pages are equal to the last bit."""
    pairs = list(zip(_digests(ours), _digests(theirs), strict=False))
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    where = "equal to the last bit" if first is None else f"equal up to page {first}, which differs"
    print(f"{len(pairs)} pages: {where} (redacted: there is nothing but digests to compare)")
    return 0 if first is None else 1


def _digests(capture: Capture) -> tuple[str, ...]:
    if not capture.redacted:
        raise CaptureError("one of the two is redacted and the other is not: there is nothing to compare")
    return capture.page_digests


def report(found: Deviation, options: argparse.Namespace, title: str) -> None:
    """Tables or JSON, and the picture where one was asked for."""
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        Console().print(tables(found, title))
    if options.plot:
        from pipeline.cli import heatmap  # here: matplotlib is an extra, and slow to import

        heatmap.write(found, options.plot, title)
        if not options.json:
            print(f"heat map: {options.plot}")


def as_json(found: Deviation) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "total": found.total()._asdict(),
        "tolerance": found.tolerance,
        "first": found.first._asdict() if found.first else None,
        "layers": [found.layer(at)._asdict() for at in range(found.layers)],
        "pages": [found.page(at)._asdict() for at in range(found.pages)],
    }


def tables(found: Deviation, title: str) -> RenderableType:
    total = found.total()
    parts: list[RenderableType] = [
        f"[bold]{escape(title)}[/]: {found.tokens} tokens, max abs {total.max_abs:.3g}, "
        f"relative RMS {total.relative_rms:.2e}, cosine {total.cosine:.6f}",
        _verdict(found),
        "",
    ]
    if found.pages:
        parts.append(_table("layer", [(str(at), found.layer(at)) for at in range(found.layers)]))
        spans = [(found.span(at), found.page(at)) for at in range(found.pages)]
        parts += ["", _table("tokens", [(f"{span.start}-{span.stop - 1}", measure) for span, measure in spans])]
    return Group(*parts)


def _verdict(found: Deviation) -> str:
    if found.first is None:
        return f"[green]no token differs by more than {found.tolerance:g} of its page's scale[/]: rounding"
    token, layer, plane, relative = found.first
    return (
        f"[red]the first divergence is at token {token} (page {token // 64}), layer {layer}, {plane}[/]: "
        f"{relative:.2g} of its page's scale, {found.tolerance:g} is tolerated"
    )


def _table(heading: str, rows: Sequence[tuple[str, Measure]]) -> Table:
    table = Table(heading, box=None, pad_edge=False)
    for name in ("max abs", "relative RMS", "cosine"):
        table.add_column(name, justify="right")
    table.add_column("")
    every = -(-len(rows) // MAX_ROWS)
    largest = max(measure.relative_rms for _, measure in rows) or 1.0
    for label, measure in rows[::every]:
        drawn = "█" * round(20 * min(1.0, measure.relative_rms / largest)) if largest < float("inf") else ""
        cells = (f"{measure.max_abs:.3g}", f"{measure.relative_rms:.2e}", f"{measure.cosine:.6f}")
        table.add_row(label, *cells, f"[cyan]{drawn}[/]")
    if every > 1:
        table.caption = f"every {every}th of {len(rows)} rows"
    return table


def draw(capture: Capture, file: Path) -> RenderableType:
    """Everything but the pages, for people. Of a redacted one, what there is."""
    request, trace = capture.request, capture.trace
    sampling = {name: value for name, value in asdict(request.sampling).items() if value not in (None, (), 0, 0.0)}
    facts = Table.grid(padding=(0, 2))
    rows = {
        "file": str(file),
        "handoff": request.handoff_id,
        "state": f"{trace.get('state', 'unknown')}{f': {capture.error}' if capture.error else ''}",
        "decoded on": capture.engine,
        "contents": _contents(capture),
        "prompt": f"{capture.prompt_tokens} tokens{f': {_tokens(request.token_ids)}' if request.token_ids else ''}",
        **{f"sample {at}": f"{_tokens(said)} ({capture.finishes[at]})" for at, said in enumerate(capture.tokens)},
        "sampling": ", ".join(f"{name} {value}" for name, value in sampling.items()),
        "model": f"weights {capture.contract.weights[:12]}, {capture.contract.layers} layers",
        "versions": ", ".join(f"{name} {version}" for name, version in capture.versions.items()),
    }
    for name, value in rows.items():
        facts.add_row(name, escape(value))
    if "route" not in trace:
        return facts
    return Group(facts, "", escape(waterfall.title(trace)), waterfall.table(trace))


def _contents(capture: Capture) -> str:
    if capture.redacted:
        return f"redacted: the digests of {len(capture.page_digests)} pages"
    wanted = page_count(capture.request.transfer_tokens)
    size = view.mib(capture.pages * capture.contract.page_shape.page_bytes)
    return f"{capture.pages} of {wanted} pages ({size}), of which D held {capture.held_pages}"


def _tokens(token_ids: Sequence[int]) -> str:
    more = f" ... {len(token_ids) - _SHOWN_TOKENS} more" if len(token_ids) > _SHOWN_TOKENS else ""
    return " ".join(map(str, token_ids[:_SHOWN_TOKENS])) + more if token_ids else "nothing"


def _some(files: Sequence[Path], verb: str) -> Sequence[Path]:
    if not files:
        raise ConfigError(f"`handoff {verb}` needs the name of a .handoff file")
    return files


VERBS: dict[str, Callable[[argparse.Namespace, Sequence[Path]], int]] = {
    "show": _show,
    "verify": _verify,
    "diff": _diff,
}
