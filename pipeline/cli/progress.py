"""Progress: what each starting process is doing, as a live table in a terminal and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipeline.cli.child import Child


class StartProgress:
    """Context manager; feed it `update(name -> ready)`. `clock` in seconds."""

    def __init__(
        self, console: Console, children: Sequence[Child], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._children = children
        self._clock = clock
        self._start = clock()
        self._ready_s: dict[str, float] = {}
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> StartProgress:
        for each in self._children:
            self._line(f"{each.name}: starting (pid {each.pid}, log {each.log})")
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, ready: dict[str, bool]) -> None:
        for name in (name for name, is_ready in ready.items() if is_ready and name not in self._ready_s):
            self._ready_s[name] = self._clock() - self._start
            self._console.print(f"[green]{name}[/]: ready after {self._ready_s[name]:.1f} s")
        if self._live:
            self._live.update(self._table(), refresh=True)

    def _line(self, text: str) -> None:
        if not self._live:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, show_header=False)
        for each in self._children:
            if each.name not in self._ready_s:
                elapsed = f"{self._clock() - self._start:4.0f} s"
                table.add_row(f"[bold]{each.name}[/]", "loading", elapsed, f"[dim]{_last_line(each)[:80]}[/]")
        return table


def _last_line(each: Child) -> str:
    lines = each.tail(lines=1).splitlines()
    return lines[-1].replace("[", r"\[") if lines else ""
