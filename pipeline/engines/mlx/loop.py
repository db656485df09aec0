"""Loop: the one thread that may touch the model. Between its steps it runs what other threads ask of it.

Knows threads only, no MLX. A command is short; a step is one prefill chunk and one decode step at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from pipeline.errors import EngineError

Command = Callable[[], None]


class Loop:
    """`step()` is run again and again while it returns True; then the thread sleeps until a command arrives.

    An exception that escapes `step` ends the thread: `on_death` gets it. `on_end` runs last, on the thread.
    """

    def __init__(self, name: str, step: Callable[[], bool], on_death: Callable[[Exception], None], on_end: Command):
        self._step = step
        self._on_death = on_death
        self._on_end = on_end
        self._arrived = threading.Condition()
        self._inbox: deque[tuple[Command, Future[None]]] = deque()
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Command) -> Future[None]:
        """Have `command` run soon. The future holds its exception, or EngineError once the thread has ended."""
        future: Future[None] = Future()
        with self._arrived:
            if self._ended:
                future.set_exception(EngineError("the engine has ended"))
            else:
                self._inbox.append((command, future))
                self._arrived.notify()
        return future

    def call(self, command: Command) -> None:
        """Have `command` run and wait for that. Raises what it raises, and EngineError when the thread has ended."""
        self.post(command).result()

    def wake(self) -> None:
        """Let `step` look again."""
        self.post(lambda: None)

    def stop(self) -> None:
        """End the thread after the step that is running. Idempotent."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        self._thread.join()

    def _run(self) -> None:
        busy = False
        try:
            while self._obey(busy):
                busy = self._step()
        except Exception as error:  # whatever it is, nobody may be left waiting
            self._on_death(error)
        finally:
            self._end()
            self._on_end()

    def _obey(self, busy: bool) -> bool:
        """Run every waiting command, sleeping for one unless `busy`. False when the thread is to end."""
        with self._arrived:
            self._arrived.wait_for(lambda: busy or self._inbox or self._stopping)
            commands = list(self._inbox)
            self._inbox.clear()
        for command, future in commands:
            try:
                command()
            except Exception as error:  # belongs to whoever gave the command
                future.set_exception(error)
            else:
                future.set_result(None)
        return not self._stopping

    def _end(self) -> None:
        with self._arrived:
            self._ended = True
            left = list(self._inbox)
            self._inbox.clear()
        for _, future in left:
            future.set_exception(EngineError("the engine has ended"))
