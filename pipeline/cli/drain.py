"""`crossfill drain REPLICA`: let it finish what it has and take nothing new; `--undo` lets it serve again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from pipeline import routing
from pipeline.broker.operator import Operator
from pipeline.broker.registry import Replica
from pipeline.cli import view
from pipeline.errors import DeadlineError, NoReplicaError

_LOOK_S = 0.25


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("drain", help="let a replica finish and take nothing new")
    command.add_argument("replica", help="its name, as `crossfill replicas` shows it")
    command.add_argument("--undo", action="store_true", help="let it serve again")
    command.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="for it to finish (default 600)")
    view.add_broker_flags(command)
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> None:
    with view.operator(options) as operator:
        if not operator.drain(options.replica, undo=options.undo):
            raise NoReplicaError(f"no replica named {options.replica!r} is alive: `crossfill replicas` lists them")
        done = serves if options.undo else drained
        wait(operator, options.replica, done, options.wait)
        print(f"replica {options.replica} {'serves again' if options.undo else 'is drained: it may be stopped'}")


def wait(operator: Operator, name: str, done: Callable[[Operator, Replica], bool], limit_s: float) -> None:
    """Until `done`, or the replica is gone (stopped: it holds nothing). Prints what is left. Raises DeadlineError."""
    deadline, said = time.monotonic() + limit_s, ""
    while (replica := find(operator, name)) and not done(operator, replica):
        left = remains(operator, replica)
        if time.monotonic() > deadline:
            raise DeadlineError(f"replica {name} is not done after {limit_s:g} s: {left}; it goes on by itself")
        if left != said:
            said = left
            print(f"waiting for replica {name}: {left}", flush=True)
        time.sleep(_LOOK_S)


def find(operator: Operator, name: str) -> Replica | None:
    return next((replica for replica in operator.replicas() if replica.name == name), None)


def drained(operator: Operator, replica: Replica) -> bool:
    """It has heard, runs nothing, and its own queue is empty."""
    return bool(replica.load.get("draining")) and not _running(replica) and not _waiting(operator, replica)


def serves(_: Operator, replica: Replica) -> bool:
    return not replica.load.get("draining")


def remains(operator: Operator, replica: Replica) -> str:
    if not replica.load.get("draining"):
        return "it has not heard yet"
    return f"{_running(replica)} running, {_waiting(operator, replica)} in its queue"


def _running(replica: Replica) -> int:
    return sum(replica.load.get(f"{role}_running", 0) for role in ("prefill", "decode"))


def _waiting(operator: Operator, replica: Replica) -> int:
    """Jobs only it can do: its own decode queue, and a prefill queue that nobody else takes from."""
    others = [other for other in operator.replicas() if other.name != replica.name and not other.load.get("draining")]
    shared = {name for other in others for name in routing.queues(other)}
    found = operator.queues(routing.queues(replica))
    return sum(found[name].queued for name in routing.queues(replica) if name not in shared)
