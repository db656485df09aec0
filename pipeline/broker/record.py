"""Record: one handoff as the ledger stores it. Values only; nothing here talks to a server.

A `Snapshot` is the small part (no prompt), read twice a second by everybody who works on a handoff.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline import codec
from pipeline import contract as contracts
from pipeline import request as requests
from pipeline.broker.address import Address
from pipeline.broker.channel import ErrorInfo
from pipeline.contract import Contract
from pipeline.handoff import State
from pipeline.request import Request

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
LOST = "lost_"  # + role and attempt: the worker that died in it, which may be the same one in both roles
_UNSAID = ("raw", "lz4")  # the codecs that a worker takes which does not name them
SMALL = (
    "state",
    "route",
    "policy",
    "owner",
    "accept",
    "page_server",
    "recomputed",
    "capture",
    "at_created",
    "at_dispatched",
    *(f"{role}_{what}" for role in ROLES for what in ("attempt", "begun", "worker", "error")),
)

MARKS = (
    "created",
    "prefill_started",
    "decode_started",
    "admitted",
    "accepted",
    "first_page_out",
    "prefill_ended",
    "last_page_out",
    "first_page_in",
    "last_page_in",
    "committed",
    "first_token",
    "finished",
)
COUNTS = (
    "pages",
    "bytes",
    "imported_tokens",
    "reused_tokens",
    "tokens",
    "resent",
    "taken_over",
    "lost_workers",
)
SHOWN = (  # all that a trace is made of
    *SMALL,
    "prompt_tokens",
    "error",
    "reason",
    *COUNTS,
    *(f"{role}_replica" for role in ROLES),
    *(f"at_{mark}" for mark in MARKS if mark != "created"),
)


@dataclass(frozen=True, slots=True)
class Accept:
    """D's word to one attempt of P: these pages (from `first_page` on) are wanted, packed by one of `codecs`."""

    prefill_attempt: int
    decode_attempt: int
    first_page: int
    codecs: tuple[str, ...] = codec.understood("raw")

    def __str__(self) -> str:
        return f"{self.prefill_attempt}.{self.decode_attempt}.{self.first_page} {','.join(self.codecs)}"

    @classmethod
    def parse(cls, text: str) -> Accept:
        """Of `str(accept)`. Raises ValueError."""
        numbers, _, codecs = text.partition(" ")
        prefill, decode, first_page = map(int, numbers.split("."))
        found = cls(prefill, decode, first_page)
        return replace(found, codecs=tuple(codecs.split(",")) if codecs else _UNSAID)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State and fields: marks (`at_*`, broker ms), counters, who works on it."""

    handoff_id: str
    state: State
    fields: dict[str, str]

    @property
    def route(self) -> dict[str, str | None]:
        return dict(json.loads(self.fields["route"]))

    @property
    def policy(self) -> str:
        return self.fields["policy"]

    @property
    def accept(self) -> Accept | None:
        text = self.fields.get("accept")
        return Accept.parse(text) if text else None

    @property
    def page_server(self) -> Address | None:
        """Where D takes its pages from; None: from the control broker."""
        text = self.fields.get("page_server")
        return Address.parse(text) if text else None

    @property
    def recomputed(self) -> str | None:
        """Why D gave up on P's pages and computes the prompt itself."""
        return self.fields.get("recomputed")

    @property
    def capture(self) -> bool:
        """An operator wants it stored."""
        return "capture" in self.fields

    def number(self, name: str) -> int:
        return int(float(self.fields.get(name, 0)))

    def attempt(self, role: Role) -> int:
        """Of the job that was queued last; 0 where none ever was."""
        return self.number(f"{role}_attempt")

    def begun(self, role: Role) -> bool:
        """The job that was queued last has been begun (or given up), so that nobody will begin it."""
        return self.fields.get(f"{role}_begun", "0.").partition(".")[0] == str(self.attempt(role))

    def worker(self, role: Role) -> str | None:
        """`replica@incarnation` that takes part now."""
        return self.fields.get(f"{role}_worker")

    def error(self, role: Role) -> ErrorInfo | None:
        """What the last attempt of `role` failed with."""
        text = self.fields.get(f"{role}_error")
        return ErrorInfo(**json.loads(text)) if text else None


@dataclass(frozen=True, slots=True)
class Record(Snapshot):
    """All of it. `request` is the client's."""

    request: Request
    contract: Contract

    @property
    def resumed(self) -> int:
        """Tokens that decode replicas before the present one have emitted."""
        return self.number("resumed")

    def lost_with(self, deaths: Mapping[str, str]) -> int:
        """How many workers have died while they took part; `deaths` are fields that may not be in it yet."""
        known = {
            name: worker for name, worker in self.fields.items() if name.startswith(LOST) and name != "lost_workers"
        }
        return len({*known.values(), *deaths.values()})


def snapshot(handoff_id: str, values: Sequence[bytes | str | None], names: Sequence[str] = SMALL) -> Snapshot | None:
    """From the answer to HMGET of `names`; None when the record is gone."""
    there = ((name, value) for name, value in zip(names, values, strict=True) if value is not None)
    fields = {name: value if isinstance(value, str) else value.decode() for name, value in there}
    state = fields.pop("state", None)
    return Snapshot(handoff_id, State(state), fields) if state else None


def record(handoff_id: str, raw: dict[str, str]) -> Record:
    """From all fields of the hash. Raises KeyError, TypeError or ValueError when they are not a record."""
    fields = {name: value for name, value in raw.items() if name not in ("state", "request", "contract")}
    return Record(
        handoff_id=handoff_id,
        state=State(raw["state"]),
        fields=fields,
        request=requests.decode(raw["request"]),
        contract=contracts.decode(raw["contract"]),
    )


def trace(record: Snapshot) -> dict[str, Any]:
    """What may be shown of a handoff, no text. `marks_ms` count from its creation, by the broker's clock.

    `record` may be a snapshot of SHOWN. `replicas` are those that have left last; who works on it now is in `workers`.
    """
    start = float(record.fields.get("at_created", 0.0))
    stamps = {k[3:]: float(v) for k, v in record.fields.items() if k.startswith("at_")}
    marks = {name: round(at - start, 3) for name, at in stamps.items()}
    return {
        "handoff_id": record.handoff_id,
        "state": record.state.value,
        "capture": record.capture,
        "route": record.route,
        "created_ms": round(start),
        "prompt_tokens": record.number("prompt_tokens"),
        **{name: record.number(name) for name in COUNTS},
        "replicas": {role: record.fields.get(f"{role}_replica") for role in ROLES},
        "workers": {role: record.worker(role) for role in ROLES},
        "attempts": {role: record.number(f"{role}_attempt") for role in ROLES},
        "page_server": record.page_server.url if record.page_server else None,
        "recomputed": record.recomputed,
        "error": record.fields.get("error"),
        "reason": record.fields.get("reason"),
        "marks_ms": dict(sorted(marks.items(), key=lambda item: item[1])),
    }
