"""Child: one process that `crossfill up` started: its log, its end, the way it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 20


class Child:
    """Runs `argv` with its output in `log` (truncated first). In a session of its own, so that a Ctrl-C in the
    terminal reaches the parent only, which then stops its children in order."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """None while it runs, else its exit status; negative: the signal that killed it."""
        return self._process.poll()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log."""
        with self.log.open(encoding="utf-8", errors="replace") as text:
            return "".join(deque(text, maxlen=lines)).rstrip()

    def epitaph(self) -> str:
        """How it ended, for people."""
        code = self.status
        how = f"status {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"{self.name} ended with {how}; the end of {self.log}:\n{self.tail()}"

    def terminate(self) -> None:
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it and to what it started: they share its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """True once it has ended; False after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def stop(children: Sequence[Child], grace_s: float) -> list[Child]:
    """SIGTERM to all at once, SIGKILL to those still there after `grace_s`, whom it returns."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    late = [child for child in children if not child.join(max(0.0, deadline - time.monotonic()))]
    for child in late:
        child.kill()
    for child in late:
        child.join(grace_s)
    return late
