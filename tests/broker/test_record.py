"""What the ledger stores of a handoff, read back: values only, no server."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from pipeline import contract as contracts
from pipeline import request as requests
from pipeline.broker import record as records
from pipeline.broker.channel import ErrorInfo
from pipeline.broker.record import SHOWN, SMALL, Accept, Record, Snapshot
from pipeline.contract import Contract
from pipeline.handoff import State
from pipeline.request import Request, Sampling

ID = "0" * 32
CONTRACT = Contract("w", "t", "c", layers=2, kv_heads=2, head_dim=32, vocab_size=1024, context_length=2048)
REQUEST = Request(ID, (7, 8, 9), Sampling(max_tokens=4, stop_token_ids=(2,)), salt="s")
ROUTE = {"prefill_queue": None, "decode_replica": "d-0"}
ERROR = ErrorInfo("engine_failed", "no", retryable=True, http_status=502)
STORED = {
    "state": "streaming",
    "request": requests.encode(REQUEST),
    "contract": contracts.encode(CONTRACT),
    "route": json.dumps(ROUTE),
    "policy": "recompute",
    "owner": "api-1",
    "prompt_tokens": "3",
    "at_created": "1000.5",
    "at_accepted": "1250.25",
    "at_decode_started": "1100.1239",
    "decode_attempt": "2",
    "decode_begun": "1.token",
    "decode_worker": "d-0@ab",
    "prefill_attempt": "1",
    "prefill_begun": "1.token",
    "prefill_error": json.dumps(asdict(ERROR)),
    "accept": "1.2.3",
    "pages": "4",
    "bytes": "8192",
}


def _snapshot(**fields: str) -> Snapshot:
    found = records.snapshot(
        ID, [(STORED | fields)[name].encode() if name in STORED | fields else None for name in SMALL]
    )
    assert found is not None
    return found


def test_the_small_part_holds_no_prompt() -> None:
    assert SMALL == (
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
        "prefill_attempt",
        "prefill_begun",
        "prefill_worker",
        "prefill_error",
        "decode_attempt",
        "decode_begun",
        "decode_worker",
        "decode_error",
    )


def test_a_snapshot_reads_its_fields() -> None:
    seen = _snapshot()
    assert (seen.handoff_id, seen.state) == (ID, State.STREAMING)
    assert seen.route == ROUTE
    assert seen.policy == "recompute"
    assert seen.accept == Accept(prefill_attempt=1, decode_attempt=2, first_page=3, codecs=("raw", "lz4"))
    assert seen.recomputed is None
    assert (seen.worker("prefill"), seen.worker("decode")) == (None, "d-0@ab")
    assert (seen.error("prefill"), seen.error("decode")) == (ERROR, None)
    assert (seen.number("decode_attempt"), seen.number("prefill_attempt"), seen.number("tokens")) == (2, 1, 0)
    assert (seen.attempt("decode"), seen.begun("decode")) == (2, False)  # a new job is queued
    assert (seen.attempt("prefill"), seen.begun("prefill")) == (1, True)
    assert "state" not in seen.fields
    assert seen.fields["owner"] == "api-1"


def test_a_snapshot_says_why_d_recomputed() -> None:
    assert _snapshot(recomputed="peer_error").recomputed == "peer_error"


def test_a_record_that_is_gone() -> None:
    assert records.snapshot(ID, [None] * len(SMALL)) is None
    assert records.snapshot(ID, [None, *[b"1"] * (len(SMALL) - 1)]) is None  # without a state it is none


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        records.snapshot(ID, [None])


@pytest.mark.parametrize(("stored", "number"), [("3", 3), ("1250.25", 1250), ("-1", -1)])
def test_numbers_are_whole(stored: str, number: int) -> None:
    assert Snapshot(ID, State.CREATED, {"n": stored}).number("n") == number


def test_a_record_is_the_snapshot_and_what_is_to_do() -> None:
    found = records.record(ID, STORED)
    assert isinstance(found, Record)
    assert (found.request, found.contract, found.state) == (REQUEST, CONTRACT, State.STREAMING)
    assert found.fields == {k: v for k, v in STORED.items() if k not in ("state", "request", "contract")}
    assert (found.route, found.accept, found.error("prefill")) == (ROUTE, Accept(1, 2, 3, ("raw", "lz4")), ERROR)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "asleep"),
        ("state", None),
        ("request", "{}"),
        ("request", "["),
        ("contract", '{"x": 1}'),
        ("contract", None),
    ],
)
def test_what_is_no_record_is_refused(field: str, value: str | None) -> None:
    stored = {k: v for k, v in (STORED | {field: value}).items() if v is not None}
    with pytest.raises((KeyError, TypeError, ValueError)):
        records.record(ID, stored)


def test_a_trace_shows_numbers_and_no_text() -> None:
    more = {"recomputed": "peer_error", "error": "engine_failed", "reason": "operator", "prefill_replica": "p-0"}
    again = {"resent": "1", "taken_over": "2", "lost_workers": "3"}
    shown = records.trace(records.record(ID, STORED | more | again))
    assert shown == {
        "handoff_id": ID,
        "state": "streaming",
        "capture": False,
        "route": ROUTE,
        "created_ms": 1000,
        "prompt_tokens": 3,
        "pages": 4,
        "bytes": 8192,
        "imported_tokens": 0,
        "reused_tokens": 0,
        "tokens": 0,
        "replicas": {"prefill": "p-0", "decode": None},
        "workers": {"prefill": None, "decode": "d-0@ab"},
        "attempts": {"prefill": 1, "decode": 2},
        "page_server": None,
        "recomputed": "peer_error",
        "resent": 1,
        "taken_over": 2,
        "lost_workers": 3,
        "error": "engine_failed",
        "reason": "operator",
        "marks_ms": {"created": 0.0, "decode_started": 99.624, "accepted": 249.75},
    }
    assert list(shown["marks_ms"]) == ["created", "decode_started", "accepted"]  # in order of time


def test_a_trace_needs_nothing_of_the_prompt() -> None:
    values = [STORED[name].encode() if name in STORED else None for name in SHOWN]
    seen = records.snapshot(ID, values, SHOWN)
    assert seen is not None
    assert {"request", "contract"} & set(SHOWN) == set()
    assert records.trace(seen) == records.trace(records.record(ID, STORED))


def test_accept_says_what_it_takes() -> None:
    assert str(Accept(1, 2, 3)) == "1.2.3 raw,lz4,zstd"
    for accept in (Accept(1, 2, 3), Accept(9, 8, 0, ("raw",)), Accept(1, 1, 0, ("raw", "int8"))):
        assert Accept.parse(str(accept)) == accept
    assert Accept.parse("1.2.3") == Accept(1, 2, 3, ("raw", "lz4"))  # an older worker's
    for wrong in ("", "1.2", "1.2.3.4", "a.b.c raw"):
        with pytest.raises(ValueError):
            Accept.parse(wrong)
