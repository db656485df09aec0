"""Loop: the one thread that may touch the model. Between its steps it runs what other threads ask of it.

Knows threads only, no MLX. A command is short; a step is one prefill chunk and one decode step at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from pipeline.errors import EngineError

Command = Callable[[], None]


class Stepper(Protocol):
    """What a Loop runs. All three are called on its thread."""

    def step(self) -> bool:
        """Do a little work; True when there is more. An exception that escapes ends the thread."""
        ...

    def die(self, error: Exception) -> None:
        """`step` raised `error`: nobody may be left waiting."""
        ...

    def end(self) -> None:
        """The last thing that runs on the thread."""
        ...


S = TypeVar("S", bound=Stepper)


class Loop(Generic[S]):
    """Builds a Stepper on its own thread and steps it while it has work; then sleeps until a command arrives.

    The constructor raises what `build` raises. `build` gets the loop, to hand it on, not to call it.
    """

    def __init__(self, name: str, build: Callable[[Loop[S]], S]) -> None:
        self._build = build
        self._built: Future[S] = Future()
        self._arrived = threading.Condition()
        self._inbox: deque[tuple[Command, Future[None]]] = deque()
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.stepper = self._built.result()

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
        """End the thread after the step that is running, and wait for that. Idempotent."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            stepper = self._build(self)
        except BaseException as error:  # raised where the loop is constructed
            self._refuse_commands()
            self._built.set_exception(error)
            return
        self._built.set_result(stepper)
        try:
            busy = False
            while self._obey(busy):
                busy = stepper.step()
        except Exception as error:
            stepper.die(error)
        finally:
            self._refuse_commands()
            stepper.end()

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

    def _refuse_commands(self) -> None:
        with self._arrived:
            self._ended = True
            left = list(self._inbox)
            self._inbox.clear()
        for _, future in left:
            future.set_exception(EngineError("the engine has ended"))
