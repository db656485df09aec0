"""`crossfill queues`, `replicas`, `handoffs`, `handoff`, `cancel` and `drain` on a broker with a system on it."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace

import pytest

from pipeline.cli import replicas, waterfall
from tests.cli.rig import CONTRACT, IDLE, ROUTE, D, P, Rig

pytestmark = [pytest.mark.usefixtures("server_url"), pytest.mark.parametrize("server_url", ["valkey"], indirect=True)]


def _row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if name in line]
    return line.split()


def test_queues(rig: Rig) -> None:
    rig.register(P, D)
    rig.ask()
    rows = {row["queue"]: row for row in rig.json("queues")}
    empty = {"queued": 0, "started": 0, "finished": 0, "failed": 0, "cancelled": 0}
    mlx = f"prefill.mlx.{CONTRACT.digest[:8]}"
    assert rows == {
        "decode.mlx-0": {"queue": "decode.mlx-0", **empty, "queued": 1, "replicas": ["mlx-0"]},
        "decode.vllm-0": {"queue": "decode.vllm-0", **empty, "replicas": ["vllm-0"]},
        mlx: {"queue": mlx, **empty, "replicas": ["mlx-0"]},
        ROUTE["prefill_queue"]: {"queue": ROUTE["prefill_queue"], **empty, "queued": 1, "replicas": ["vllm-0"]},
    }
    _, shown = rig.run("queues")
    assert _row(shown, "decode.mlx-0") == ["decode.mlx-0", "1", "0", "0", "0", "0", "mlx-0"]


def test_a_queue_that_nobody_takes_from_is_seen(rig: Rig) -> None:
    rig.register(P)
    rig.ask()
    _, shown = rig.run("queues")
    assert _row(shown, "decode.mlx-0")[-1] == "nobody"


def test_replicas(rig: Rig) -> None:
    rig.register(replace(P, load={"prefill_running": 2, "decode_running": 1}), D)
    mlx, vllm = rig.json("replicas")
    assert 5000 <= vllm.pop("up_ms") < 300_000
    assert vllm == asdict(P) | {
        "digest": CONTRACT.digest,
        "features": [],
        "started_ms": vllm["started_ms"],
        "load": {"prefill_running": 2, "decode_running": 1},
    }
    assert (mlx["name"], mlx["stats"]) == ("mlx-0", IDLE)
    _, shown = rig.run("replicas")
    row = _row(shown, "vllm-0")
    assert row[:12] == ["vllm-0", "vllm", "both", "tiny", CONTRACT.digest[:8], "serving", "2", "1", "4", "0", "1", "9"]


@pytest.mark.parametrize(
    ("load", "state"),
    [
        ({"decode_running": 1}, "serving"),
        ({"decode_running": 1, "draining": 1}, "draining"),
        ({"decode_running": 0, "draining": 1}, "drained"),
        ({"decode_running": 1, "draining": 1, "page_server_down": 1}, "no page server"),
    ],
)
def test_a_replicas_state(load: dict[str, int], state: str) -> None:
    assert replicas.state({"load": load}) == state


def test_handoffs(rig: Rig) -> None:
    rig.finish(ended := rig.ask())
    live = rig.ask(tokens=70)
    first, second = rig.json("handoffs")
    assert (first["handoff_id"], first["live"], first["state"], first["prompt_tokens"]) == (live, True, "created", 70)
    assert (second["handoff_id"], second["live"], second["state"]) == (ended, False, "finished")
    assert 0 <= first["age_ms"] <= second["age_ms"] < 300_000
    assert len(rig.json("handoffs", "--recent", "0")) == 1
    _, shown = rig.run("handoffs")
    assert "handoffs: 1 live, 1 recent" in shown
    assert _row(shown, ended)[1:8] == ["finished", "vllm->mlx", "200", "2", "4", "4.0", "MiB"]
    assert _row(shown, live)[1:4] == ["created", "vllm->mlx", "70"]


def test_handoff_shows_who_what_and_when(rig: Rig) -> None:
    rig.finish(handoff_id := rig.ask())
    trace = rig.json("handoff", handoff_id)
    assert (trace["pages"], trace["imported_tokens"], trace["live"]) == (4, 199, False)
    _, shown = rig.run("handoff", handoff_id)
    assert "finished, ended" in shown
    assert "vllm -> mlx, 4 pages, 4.00 MiB, 200 prompt tokens: 199 imported, 0 reused" in shown
    assert "vllm-0, attempt 1" in shown
    assert "mlx-0, attempt 1" in shown
    spans = waterfall.spans(trace["marks_ms"])
    assert [span.label for span in spans] == ["queue", "request to first token", "decode on D"]
    assert all(span.label in shown for span in spans)
    assert "prefill started" in shown


def test_handoff_says_who_works_on_it_now(rig: Rig) -> None:
    handoff_id = rig.ask()
    rig.ledger.enter(handoff_id, "prefill", "vllm-0@77")
    _, shown = rig.run("handoff", handoff_id)
    assert "vllm-0 works on it, attempt 1" in shown
    assert "nobody yet" in shown
    assert "77" not in shown.replace(handoff_id, "")


@pytest.mark.parametrize("command", ["handoff", "cancel"])
def test_an_unknown_handoff_is_said(rig: Rig, command: str) -> None:
    status, said = rig.run(command, "f" * 32)
    assert status == 1
    assert said.startswith(f"crossfill: handoff_unknown: nothing is known of handoff {'f' * 32}")
    assert "crossfill handoffs" in said


def test_cancel_ends_a_handoff_nobody_has_begun(rig: Rig) -> None:
    handoff_id = rig.ask()
    assert rig.run("cancel", handoff_id) == (0, f"handoff {handoff_id}: cancelled\n")
    assert rig.run("cancel", handoff_id) == (0, f"handoff {handoff_id} had ended already: cancelled\n")
    (row,) = rig.json("handoffs")
    assert (row["live"], row["reason"]) == (False, "operator")
    assert "cancelled: operator" in rig.run("handoffs")[1]


def test_cancel_says_when_a_worker_does_not_let_go(rig: Rig) -> None:
    handoff_id = rig.ask()
    attempt, _ = rig.ledger.enter(handoff_id, "decode", "mlx-0@1")
    status, said = rig.run("cancel", handoff_id, "--wait", "0.05")
    assert (status, "is still cancelling after 0.05 s" in said) == (1, True)
    rig.ledger.leave(handoff_id, "decode", attempt)
    assert rig.run("cancel", handoff_id) == (0, f"handoff {handoff_id} had ended already: cancelled\n")


def test_drain_waits_until_the_replica_has_finished(rig: Rig) -> None:
    rig.register(P, D)
    over = threading.Event()
    left = [{"decode_running": 1, "draining": 1}, {"decode_running": 0, "draining": 1}]

    def work() -> None:
        """A replica that heeds its wish: after a while nothing runs any more."""
        load: dict[str, int] = {"decode_running": 1}
        while not over.wait(0.05):
            wish = rig.registry.heartbeat("mlx-0", IDLE, load, 600)
            load = (left.pop(0) if len(left) > 1 else left[0]) if wish else {"decode_running": 0}

    thread = threading.Thread(target=work)
    thread.start()
    try:
        status, said = rig.run("drain", "mlx-0")
        assert status == 0
        assert said.endswith("replica mlx-0 is drained: it may be stopped\n")
        status, said = rig.run("drain", "mlx-0", "--undo")
        assert (status, said.splitlines()[-1]) == (0, "replica mlx-0 serves again")
    finally:
        over.set()
        thread.join()


def test_drain_says_what_is_left_when_it_takes_too_long(rig: Rig) -> None:
    rig.register(P, replace(D, load={"decode_running": 3, "draining": 1}))
    rig.ask()  # one decode job waits for mlx-0
    status, said = rig.run("drain", "mlx-0", "--wait", "0")
    assert status == 1
    assert "replica mlx-0 is not done after 0 s: 3 running, 1 in its queue; it goes on by itself" in said


def test_drain_counts_prefill_jobs_that_nobody_else_takes(rig: Rig) -> None:
    rig.register(replace(P, load={"draining": 1}), D)
    rig.ask()
    status, said = rig.run("drain", "vllm-0", "--wait", "0")
    assert (status, "0 running, 1 in its queue" in said) == (1, True)
    rig.register(replace(P, name="vllm-1"))
    assert rig.run("drain", "vllm-0", "--wait", "0") == (0, "replica vllm-0 is drained: it may be stopped\n")


def test_drain_of_nobody(rig: Rig) -> None:
    status, said = rig.run("drain", "mlx-0")
    assert (status, said) == (
        1,
        "crossfill: no_replica: no replica named 'mlx-0' is alive: `crossfill replicas` lists them\n",
    )


@pytest.mark.parametrize("command", ["queues", "replicas", "handoffs"])
def test_a_broker_that_is_away_is_one_line(rig: Rig, command: str) -> None:
    rig.url = "redis://127.0.0.1:9/0"
    status, said = rig.run(command)
    assert status == 1
    assert said.startswith("crossfill: broker_unavailable: the broker is unreachable: check broker.url")
    assert said.count("\n") == 1
