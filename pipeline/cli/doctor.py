"""`crossfill doctor`: check broker, replicas, contracts and link, and say of each what to do.

Exit status 1 when a check failed. A warning is something that works now and may not later.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.broker import connect
from pipeline.broker.connect import ServerInfo
from pipeline.broker.operator import Link, Operator, PagesView
from pipeline.broker.registry import Replica
from pipeline.budget import require_fits
from pipeline.cli import queues, view
from pipeline.contract import Contract
from pipeline.errors import BrokerError, ConfigError
from pipeline.settings import MIB, Settings

Level = Literal["ok", "warn", "fail"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
SLOW_TRIP_MS = 20.0
SLOW_LINK_MB_S = 20.0  # a page of a small model is about a megabyte: below this the link, not prefill, sets the pace
SKEW_MS = 1000.0
FAILED_SHARE = 0.1  # of recent handoffs


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what to change; it is empty when all is well."""

    name: str
    level: Level
    found: str
    advice: str = ""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("doctor", help="check broker, replicas, contracts and link; say what to do")
    view.add_broker_flags(command)
    command.add_argument("--json", action="store_true", help="a JSON list of checks")
    command.add_argument(
        "--self-test", action="store_true", help="no broker needed: hand over between the engines installed here"
    )
    command.add_argument("--timeout", type=float, default=600.0, help="of --self-test, seconds for engines to start")
    command.set_defaults(handler=run)


def run(options: argparse.Namespace) -> int:
    if options.self_test:
        from pipeline.cli import selftest  # here: it needs all that `crossfill up` needs

        return selftest.run(Console(), options.timeout)
    settings = view.settings(options)
    with view.operator(options) as operator:
        checks = examine(operator, settings)
    if options.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        Console().print(table(checks))
    return status(checks)


def status(checks: Sequence[Check]) -> int:
    return int(any(check.level == "fail" for check in checks))


def table(checks: Sequence[Check]) -> Table:
    found = Table(box=None, pad_edge=False)
    found.add_column("")
    found.add_column("check", no_wrap=True)
    found.add_column("found", overflow="fold")
    found.add_column("what to do", overflow="fold")
    for check in checks:
        level = f"[{COLOURS[check.level]}]{check.level}[/]"
        found.add_row(level, check.name, escape(check.found), escape(check.advice))
    return found


def examine(operator: Operator, settings: Settings) -> list[Check]:
    """Every check; only the first two where no broker answers."""
    where = f"{connect.redact(settings.broker.url)}, budget {view.mib(settings.broker.budget_bytes)}"
    checks = [Check("settings", "ok", where)]
    try:
        info = operator.server()
    except BrokerError as error:
        return [*checks, Check("broker", "fail", "no answer", str(error))]
    checks += [broker(info), policy(info), memory(info, settings), *_timed(operator)]
    try:
        replicas = operator.replicas()
        found = [*fleet(replicas, settings), *map(page_server, operator.pages(replicas))]
        return [*checks, *found, *traffic(operator, replicas)]
    except BrokerError as error:
        return [*checks, Check("broker", "fail", "it went away while it was looked at", str(error))]


# -- the broker


def broker(info: ServerInfo) -> Check:
    return _required("broker", f"{info.kind} {connect.dotted(info.version)}", lambda: connect.require_version(info))


def policy(info: ServerInfo) -> Check:
    return _required("eviction", info.policy, lambda: connect.require_policy(info))


def memory(info: ServerInfo, settings: Settings) -> Check:
    """`maxmemory` 0 is no limit: then the host's memory is, and the kernel ends the broker instead."""
    if not info.maxmemory_bytes:
        needed = settings.broker.budget_bytes + connect.margin_bytes(settings.broker.budget_bytes)
        advice = f"set `maxmemory {needed}` or more, so that the broker refuses instead of being killed"
        return Check("memory", "warn", "maxmemory is not set", advice)
    found = f"maxmemory {view.mib(info.maxmemory_bytes)}"
    return _required("memory", found, lambda: connect.require_memory(info, settings.broker.budget_bytes))


def _required(name: str, found: str, require: Callable[[], object]) -> Check:
    """What a worker would refuse to start with is a failure here, in the same words."""
    try:
        require()
    except ConfigError as error:
        return Check(name, "fail", found, str(error))
    return Check(name, "ok", found)


def _timed(operator: Operator) -> list[Check]:
    try:
        skew = clock(operator.skew_ms(time.time() * 1000))
        return [*link(operator.link(secrets.token_hex(8), MIB)), skew]
    except BrokerError as error:
        return [Check("link", "fail", "a value of 1 MiB could not be written and read", str(error))]


def link(found: Link) -> list[Check]:
    """Two checks: the round trip every step pays, and the rate every page pays."""
    trip = f"{found.round_trip_ms:.2f} ms a round trip"
    rate = f"{found.write_mb_s:.0f} MB/s out, {found.read_mb_s:.0f} MB/s in, values of 1 MiB"
    slow_trip, slow_rate = found.round_trip_ms > SLOW_TRIP_MS, min(found[1:]) < SLOW_LINK_MB_S
    near = "run the broker near the decode engine: every page takes several round trips" if slow_trip else ""
    fast = "use a faster link, or expect transfer, not prefill, to set the pace" if slow_rate else ""
    return [
        Check("latency", "warn" if slow_trip else "ok", trip, near),
        Check("link", "warn" if slow_rate else "ok", rate, fast),
    ]


def clock(skew_ms: float) -> Check:
    """Nothing in Crossfill compares wall clocks of two hosts; people who read two logs do."""
    found = f"this host is {abs(skew_ms) / 1000:.2f} s {'ahead of' if skew_ms > 0 else 'behind'} the broker"
    if abs(skew_ms) <= SKEW_MS:
        return Check("clock", "ok", found)
    return Check("clock", "warn", found, "set the clock (NTP): handoffs do not mind, but logs cannot be compared")


# -- replicas


def fleet(replicas: Sequence[Replica], settings: Settings) -> Iterator[Check]:
    """Who is alive, whether they can serve, and with whom they share a contract."""
    if not replicas:
        yield Check("replicas", "fail", "none is alive", "start one: `crossfill worker`, or `crossfill up` for all")
        return
    names = ", ".join(f"{replica.name} ({replica.engine}, {replica.role})" for replica in replicas)
    yield Check("replicas", "ok", names)
    groups: dict[str, list[Replica]] = {}
    for replica in replicas:
        groups.setdefault(replica.contract.digest, []).append(replica)
    for members in groups.values():
        yield page(members[0], settings)
        yield from serving(members)
    if len(groups) > 1:
        yield contracts(list(groups.values()))


def page(replica: Replica, settings: Settings) -> Check:
    size = replica.contract.page_shape.page_bytes
    found = f"{replica.model}: {size / 1024:.0f} KiB, {settings.broker.budget_bytes // size} fit the budget"
    return _required("page", found, lambda: require_fits(settings.broker.budget_bytes, size))


def serving(members: Sequence[Replica]) -> Iterator[Check]:
    """Can the replicas of one contract answer, and hand over?"""
    label, alive = _label(members), [replica for replica in members if not replica.load.get("draining")]
    decode = [replica.name for replica in alive if replica.role != "prefill"]
    prefill = [replica.name for replica in alive if replica.role != "decode" and replica.can_prefill]
    if not decode:
        start = "start one with --role decode or both, or `crossfill drain --undo` one that drains"
        yield Check("decode", "fail", f"{label}: no replica decodes; every request is answered with 503", start)
    elif not prefill:
        only = [replica.name for replica in alive if replica.can_prefill]
        level: Level = "warn" if only else "fail"
        yield Check("prefill", level, f"{label}: no replica prefills", "start one with --role prefill or both")
    elif {*prefill, *decode} == {*decode} and len({*prefill, *decode}) == 1:
        advice = "start a second replica of this model: one alone computes its prompts itself"
        yield Check("handoff", "warn", f"{label}: only {decode[0]} is there, nothing is handed over", advice)
    else:
        yield Check("handoff", "ok", f"{label}: {', '.join(prefill)} -> {', '.join(decode)}")


def contracts(groups: Sequence[Sequence[Replica]]) -> Check:
    """Two contracts of one model name are a mistake; two models are none."""
    first, *others = groups
    shown = [difference(first[0], other[0]) for other in others]
    found = f"{len(groups)} contracts: " + "; ".join(shown)
    models = [{replica.model for replica in group} for group in groups]
    if len({name for names in models for name in names}) == sum(map(len, models)):
        return Check("contracts", "ok", found)
    advice = (
        "these replicas cannot hand over to each other: give them the same checkpoint (`crossfill model digest A B`)"
    )
    return Check("contracts", "fail", found, advice)


def difference(ours: Replica, theirs: Replica) -> str:
    """The fields that differ, side by side."""
    return f"{ours.name} and {theirs.name} differ in " + ", ".join(
        f"{name} ({_short(a)} | {_short(b)})" for name, (a, b) in _different(ours.contract, theirs.contract).items()
    )


def _different(ours: Contract, theirs: Contract) -> dict[str, tuple[object, object]]:
    a, b = asdict(ours), asdict(theirs)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else f"{text[:12]}..."


def _label(members: Sequence[Replica]) -> str:
    return f"{members[0].model} [{members[0].contract.digest[:8]}]"


def page_server(seen: PagesView) -> Check:
    """As the broker: what its replica would refuse to start with is a failure here."""
    name, budget = f"page server {seen.address.url}", seen.address.budget_bytes
    if seen.info is None or seen.gauges is None:
        advice = f"{', '.join(seen.replicas)} takes nothing new until it answers: start it, or change pages_url"
        return Check("pages", "fail", f"{name}: {seen.error}", advice)

    def require() -> None:
        assert seen.info is not None
        connect.require_version(seen.info, name)
        connect.require_policy(seen.info, name)
        connect.require_memory(seen.info, budget, name)

    held = f"{view.mib(seen.gauges.in_flight_bytes)} of {view.mib(budget)} in flight"
    return _required("pages", f"{name} of {', '.join(seen.replicas)}: {held}", require)


# -- what goes on


def traffic(operator: Operator, replicas: Sequence[Replica]) -> Iterator[Check]:
    """Jobs nobody takes, bytes nobody owns, handoffs that failed."""
    yield from waiting(queues.look(operator), {replica.name: replica.slots for replica in replicas})
    rows = operator.handoffs()
    live = [row for row in rows if row["live"]]
    gauges = operator.budget()
    held = f"{view.mib(gauges.in_flight_bytes)} in flight, {gauges.waiters} waiting, {len(live)} live"
    if gauges.in_flight_bytes and not live:
        yield Check(
            "budget", "warn", held, "bytes without a handoff: leases give them back by themselves within a minute"
        )
    else:
        yield Check("budget", "ok", held)
    failed = [row for row in rows if row["state"] == "failed"]
    codes = ", ".join(sorted({str(row["error"]) for row in failed}))
    found = f"{len(rows) - len(live)} ended lately, {len(failed)} failed" + (f": {codes}" if failed else "")
    many = len(failed) > FAILED_SHARE * max(1, len(rows))
    advice = "`crossfill handoffs` lists them, `crossfill handoff ID` shows how far each came" if many else ""
    yield Check("handoffs", "warn" if many else "ok", found, advice)


def waiting(rows: queues.Rows, slots: dict[str, int]) -> Iterator[Check]:
    for row in rows:
        room = sum(slots[name] for name in row["replicas"])
        found = f"{row['queue']}: {row['queued']} waiting, {row['started']} running"
        if row["queued"] and not row["replicas"]:
            yield Check(
                "queue", "fail", found, "no replica takes from it: start one, or wait for the deadline to end them"
            )
        elif row["queued"] > room:
            yield Check("queue", "warn", found, f"more than its {room} slots: add a replica, or raise slots")
        elif row["replicas"]:
            yield Check("queue", "ok", found)
