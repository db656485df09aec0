"""B: the broker is restarted, full, slow, silent, emptied, failed over; replies and connections get lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from httpx import TransportError

from pipeline.broker import scripts
from pipeline.broker.embedded import EmbeddedServer
from pipeline.budget import SHARE_DIVISOR
from tests.faults.call import Outcome
from tests.faults.rig import API, BUDGET, PAGE_BYTES, REST_S, Question, Rig, page, script
from tests.ports import free_port
from tests.proxy import Faults, first_held
from tests.scenarios.system import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
SLOW = Faults(latency_s=0.04)  # for D: each token takes two of these
ROUTE = "reference->reference"
TOKEN = script("emit")  # what D sends with each token
CLEAN = {"broker_unavailable", "capacity", "overloaded", "no_replica", "worker_lost", "deadline_exceeded", "peer_error"}


def test_b14_the_broker_restarts_empty_in_the_middle_of_an_answer(hurt: Rig) -> None:
    question = hurt.oracle.question(150, 40)
    with hurt.holding("decode", TOKEN, after=12) as held:
        call = hurt.ask(question, 40, route=ROUTE)
        held()
        hurt.server.stop()
        hurt.server.start()
    outcome = call.result()
    assert (outcome.ended, outcome.code) == (True, "broker_unavailable"), outcome
    assert question.text(40).startswith(outcome.text)


@pytest.mark.parametrize("stream", [True, False])
def test_b15_a_submit_while_the_broker_is_down_is_refused_with_retry_after(hurt: Rig, stream: bool) -> None:
    hurt.server.stop()
    for _ in range(3):
        outcome = hurt.ask(hurt.oracle.question(70, 4), 4, stream=stream).result()
        assert (outcome.status, outcome.code, outcome.retry_after) == (503, "broker_unavailable", "1")
    assert hurt.http.get("/ready").status_code == 503
    assert hurt.http.get("/health").status_code == 200


def test_b15_the_api_starts_without_a_broker_and_finds_it_by_itself(hurt: Rig) -> None:
    hurt.server.stop()
    hurt.kill(API)
    hurt.crew.revive(API)
    eventually(lambda: _status(hurt, "/health") == 200, 120)
    outcome = hurt.ask(hurt.oracle.question(70, 4), 4).result()
    assert (outcome.status, outcome.code, outcome.retry_after) == (503, "broker_unavailable", "1")
    assert _status(hurt, "/ready") == 503
    hurt.server.start()
    eventually(lambda: _status(hurt, "/ready") == 200, 120)
    question = hurt.oracle.question(150, 6)
    outcome = hurt.ask(question, 6).result()
    assert (outcome.code, outcome.text) == (None, question.text(6)), outcome


def _status(rig: Rig, path: str) -> int:
    """0: nobody listens yet."""
    try:
        return rig.http.get(path).status_code
    except TransportError:
        return 0


def test_b16_a_full_broker_refuses_what_is_new_and_lets_all_end(hurt: Rig) -> None:
    """While it is full: requests are refused cleanly, the running one ends, and everything of it is given back."""
    question = hurt.oracle.question(500, 12)
    try:
        with hurt.holding("prefill", page(6)) as held:
            call = hurt.ask(question, 12, route=ROUTE)
            held()
            assert hurt.status()["budget"]["in_flight_bytes"] > 0
            hurt.broker.config_set("maxmemory", 1)
            refused = hurt.ask(hurt.oracle.question(70, 4), 4).result()
            assert (refused.status, refused.retry_after) == (503, "1"), refused
        outcome = call.result()
        assert outcome.code in CLEAN or outcome.text == question.text(12), outcome
        eventually(lambda: hurt.leftovers() == [], 60)
    finally:
        hurt.broker.config_set("maxmemory", 0)


SCRIPTS = ["reserve", "header", "imported", "fence", "enter", "advance", "emit", "leave", "release"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_b18_a_reply_gets_lost_after_the_script_ran(hurt: Rig, script: str) -> None:
    """Nothing is counted twice, no page and no token comes twice: the text is right, or the error is clean."""
    question = hurt.oracle.question(200, 8)
    sha = hurt.broker.script_load(scripts.source(script)).encode()
    for name in ("p-0", "p-1", "d-0", "d-1"):
        hurt.hops[name].lose(sha)
    outcome = hurt.ask(question, 8, route=ROUTE).result()
    eventually(lambda: any(hop.lost for hop in hurt.hops.values()))  # the release comes after the answer
    if outcome.right or script == "emit":  # a token is sent again, and logged once
        assert (outcome.code, outcome.text) == (None, question.text(8)), outcome
    else:
        assert outcome.code in CLEAN, outcome
        assert question.text(8).startswith(outcome.text)


def test_b19_a_reset_in_the_middle_of_a_page(hurt: Rig) -> None:
    """A page is 32 KiB: every connection of P breaks within its second one, again and again."""
    question = hurt.oracle.question(500, 6)
    for name in ("p-0", "p-1"):
        hurt.hops[name].apply(Faults(limit_bytes=50_000))
    outcome = hurt.ask(question, 6, route=ROUTE).result()
    assert hurt.hops["p-0"].resets + hurt.hops["p-1"].resets > 0
    assert (outcome.code, outcome.text) == (None, question.text(6)), outcome


def test_b20_a_black_hole_around_p_that_ends_later(hurt: Rig) -> None:
    """P's lease ends, D goes on without it; what P had sent arrives late and changes nothing."""
    question = hurt.oracle.question(500, 6)
    with hurt.holding("prefill", page(6)) as held:
        call = hurt.ask(question, 6, route=ROUTE)
        held()
        for name in ("p-0", "p-1"):
            hurt.hops[name].apply(Faults(black_hole=True))
        outcome = call.result()
    assert (outcome.code, outcome.text) == (None, question.text(6)), outcome


def test_b20_the_link_of_p_stalls_within_a_page_and_comes_back(hurt: Rig) -> None:
    """P lives, and so says its lease: only what it sends stands still, in the middle of its second page."""
    question = hurt.oracle.question(500, 6)
    hops = [hurt.hops["p-0"], hurt.hops["p-1"]]
    for hop in hops:
        hop.apply(Faults(stall_bytes=50_000))
    call = hurt.ask(question, 6, route="reference->reference")
    eventually(lambda: any(hop.stalled.is_set() for hop in hops), REST_S)
    assert call.so_far.text == ""
    for hop in hops:
        hop.mend()
    _unharmed(question, call.result(), 6)


def _unharmed(question: Question, outcome: Outcome, tokens: int) -> None:
    """The right text, of pages that came from P."""
    assert (outcome.code, outcome.text) == (None, question.text(tokens)), outcome
    assert outcome.trace
    assert (outcome.trace["recomputed"], outcome.trace["imported_tokens"]) == (None, len(question.prompt) - 1)


def test_b22_a_decoder_that_takes_no_more_makes_p_wait_within_its_share(hurt: Rig) -> None:
    """What D fetches stands still in the middle of its second page: P sends as much as one handoff may have in flight,
    waits for credit with the rest of the prompt in its engine, and goes on when D does."""
    question = hurt.oracle.question(1500, 6)
    for name in ("d-0", "d-1"):
        hurt.hops[name].apply(Faults(stall_bytes=50_000, limit="down"))
    call = hurt.ask(question, 6, route="reference->reference")
    handoff = hurt.handoff()
    share = BUDGET // SHARE_DIVISOR

    def in_flight() -> int:
        return int(hurt.broker.get("cf:budget:total") or 0)

    def p_waits() -> bool:
        """Not a page more would fit."""
        return hurt.broker.hexists("cf:budget:wants", handoff) and in_flight() > share - PAGE_BYTES

    def d_stands() -> bool:
        return hurt.hops["d-0"].stalled.is_set() or hurt.hops["d-1"].stalled.is_set()

    eventually(lambda: d_stands() and p_waits(), REST_S)
    assert in_flight() <= share
    for name in ("d-0", "d-1"):
        hurt.hops[name].mend()
    _unharmed(question, call.result(), 6)


def test_b20_a_black_hole_around_the_api(hurt: Rig) -> None:
    hurt.hops[API].apply(Faults(black_hole=True))
    outcome = hurt.ask(hurt.oracle.question(70, 4), 4).result()
    assert (outcome.status, outcome.code, outcome.retry_after) == (503, "broker_unavailable", "1")


def test_b21_a_slow_thin_network_only_takes_longer(hurt: Rig) -> None:
    question = hurt.oracle.question(300, 6)
    for hop in hurt.hops.values():
        hop.apply(Faults(latency_s=0.05, bytes_per_s=1e6, piece_bytes=4096))
    outcome = hurt.ask(question, 6, route=ROUTE).result()
    assert (outcome.code, outcome.text) == (None, question.text(6)), outcome


def test_b23_subscribers_are_cut_while_tokens_come(hurt: Rig) -> None:
    question = hurt.oracle.question(150, 24)
    for name in ("d-0", "d-1"):
        hurt.hops[name].apply(SLOW)
    call = hurt.ask(question, 24)
    for chars in (2, 6, 10):
        call.await_text(chars)
        hurt.broker.client_kill_filter(_type="pubsub")
    outcome = call.result()
    assert (outcome.code, outcome.text) == (None, question.text(24)), outcome


def test_b25_an_operator_empties_the_broker(hurt: Rig) -> None:
    question = hurt.oracle.question(150, 40)
    with hurt.holding("decode", TOKEN, after=12) as held:
        call = hurt.ask(question, 40, route=ROUTE)
        held()
        hurt.broker.flushall()
    outcome = call.result()
    assert (outcome.ended, outcome.code) == (True, "broker_unavailable"), outcome
    assert question.text(40).startswith(outcome.text)


def test_b26_a_failover_that_loses_the_last_writes(hurt: Rig, tmp_path: Path) -> None:
    """A replica is promoted that has not seen the last tokens: the answer ends with an error or rightly."""
    question = hurt.oracle.question(150, 60)
    primary, port = hurt.broker.connection_pool.connection_kwargs["port"], free_port()
    hurt.broker.config_set("repl-diskless-sync-delay", 0)
    with EmbeddedServer(tmp_path, BUDGET, port=port) as url, hurt.broker.from_url(url) as spare:
        spare.replicaof("127.0.0.1", primary)
        eventually(lambda: spare.info("replication").get("master_link_status") == "up", 60)
        with hurt.holding("decode", TOKEN, after=12) as held:
            call = hurt.ask(question, 60, route=ROUTE)
            d = held()
            spare.replicaof("NO", "ONE")
            with first_held({d: hurt.hops[d]}, TOKEN, after=12) as held_again:
                held_again()  # a dozen tokens are written to the primary alone
                for hop in hurt.hops.values():
                    hop.aim(port)
        outcome = call.result()
        assert outcome.ended, outcome
        assert question.text(60).startswith(outcome.text)
        assert outcome.code in CLEAN if outcome.code else outcome.text == question.text(60), outcome
        hurt.serving()
        hurt.answers()
        hurt.broker.flushall()  # the old primary was not told of the end; nobody goes back to it
        for hop in hurt.hops.values():
            hop.aim(primary)
