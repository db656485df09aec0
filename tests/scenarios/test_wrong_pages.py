"""Wrong bytes never become wrong text; a wrong page with a valid digest does: pages are really used."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.sample import tiny
from tests.scenarios.conftest import LEASE_S
from tests.scenarios.liar import FAULTS
from tests.scenarios.system import System, eventually, worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
RECOMPUTED = {"payload_bit": "frame_invalid", "duplicated": "frame_invalid", "die": "peer_error"}
PROMPT = [(7 * i) % 900 + 20 for i in range(300)]  # five pages, the last one partial


@contextmanager
def liar(system: System, model: Path, fault: str, tmp_path: Path, **broker: str) -> Iterator[str]:
    """A prefill worker with one fault, or other settings of `broker`, in its own process; yields its replica's name."""
    name = f"liar-{secrets.token_hex(3)}"
    settings = json.loads(system.fleet.settings.model_dump_json(exclude_unset=True))
    settings["broker"] |= broker
    settings["workers"] = [json.loads(json.dumps(worker(name, "reference", model, lease_s=LEASE_S), default=str))]
    file = tmp_path / "liar.json"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tests.scenarios.liar", "--config", str(file), "--name", name, "--fault", fault]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        eventually(lambda: name in {r["name"] for r in system.status()["replicas"]}, 60)
        yield name
    finally:
        if fault == "stall":
            process.kill()
        process.communicate(timeout=60)
    eventually(lambda: name not in {r["name"] for r in system.status()["replicas"]})


def test_a_wrong_page_with_a_valid_digest_changes_the_text(cheap: System, tiny_model: Path, tmp_path: Path) -> None:
    right = cheap.complete(PROMPT, "reference->reference")
    with liar(cheap, tiny_model, "wrong_page", tmp_path):
        wrong = cheap.complete(PROMPT, "liar->reference")
    assert (wrong.trace["pages"], wrong.trace["imported_tokens"]) == (5, 299)
    assert wrong.text != right.text
    assert cheap.complete(PROMPT, "reference->reference").text == right.text


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"none", "die", "stall"}))
def test_a_damaged_frame_fails_the_request_and_leaves_nothing(
    cheap: System, tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    baseline = cheap.settled()
    free = {r["name"]: r["stats"]["free_pages"] for r in baseline["replicas"]}
    with liar(cheap, tiny_model, fault, tmp_path):
        answer = cheap.post(PROMPT, "liar->reference")
        assert answer.status_code == 502, answer.text
        assert answer.json()["error"]["code"] in ("frame_invalid", "page_missing", "peer_error")
        after = cheap.settled()
    assert {n: s["free_pages"] for n, s in ((r["name"], r["stats"]) for r in after["replicas"]) if n in free} == free
    assert cheap.complete(PROMPT, "reference->reference").finish == "length"


def test_the_honest_liar_is_no_different(cheap: System, tiny_model: Path, tmp_path: Path) -> None:
    """The rig itself changes nothing."""
    right = cheap.complete(PROMPT, "reference->reference")
    with liar(cheap, tiny_model, "none", tmp_path):
        assert cheap.complete(PROMPT, "liar->reference").text == right.text


@pytest.mark.parametrize("fault", ["payload_bit", "duplicated", "die"])
def test_policy_recompute_answers_all_the_same(lenient: System, tiny_model: Path, tmp_path: Path, fault: str) -> None:
    right = lenient.complete(PROMPT, "reference->reference")
    with liar(lenient, tiny_model, fault, tmp_path):
        answer = lenient.complete(PROMPT, "liar->reference")
    assert answer.text == right.text
    assert (answer.trace["recomputed"], answer.trace["imported_tokens"]) == (RECOMPUTED[fault], 0)
    lenient.settled()


def test_a_replica_of_other_weights_is_refused_by_name(cheap: System, tiny_model: Path, tmp_path: Path) -> None:
    other = tiny.write("llama", tmp_path / "other", seed=1)
    with liar(cheap, other, "none", tmp_path):
        answer = cheap.post(PROMPT, "liar->reference")
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "contract_mismatch"
    assert "weights" in answer.json()["error"]["message"]
    assert cheap.settled()["live"] == []


def test_a_codec_that_the_decoder_does_not_take_is_refused_before_a_byte_moves(
    cheap: System, tiny_model: Path, tmp_path: Path
) -> None:
    free = {r["name"]: r["stats"]["free_pages"] for r in cheap.settled()["replicas"]}
    with liar(cheap, tiny_model, "none", tmp_path, codec="int8"):
        answer = cheap.post(PROMPT, "liar->reference")
        after = cheap.settled()
    assert answer.status_code == 502, answer.text
    error = answer.json()["error"]
    assert error["code"] == "peer_error"
    assert "give both the same broker.codec" in error["message"]
    assert {r["name"]: r["stats"]["free_pages"] for r in after["replicas"] if r["name"] in free} == free
    (ended,) = cheap.http.get("/handoffs", params={"recent": 1}).json()["handoffs"]
    assert (ended["state"], ended["bytes"], ended["pages"], ended["imported_tokens"]) == ("failed", 0, 0, 0)


def test_a_prefill_worker_that_stalls_is_an_error_after_the_deadline(
    cheap: System, tiny_model: Path, tmp_path: Path
) -> None:
    with liar(cheap, tiny_model, "stall", tmp_path):
        answer = cheap.post(PROMPT, "liar->reference")
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    cheap.settled()  # its lease has ended: the stalled worker's part was taken from it


def test_a_prefill_worker_that_dies_mid_stream_is_an_error_within_seconds(
    cheap: System, tiny_model: Path, tmp_path: Path
) -> None:
    with liar(cheap, tiny_model, "die", tmp_path):
        answer = cheap.post(PROMPT, "liar->reference")
        assert answer.status_code in (502, 503), answer.text
        assert "gone" in answer.json()["error"]["message"]
        cheap.settled()
    assert cheap.complete(PROMPT, "reference->reference").finish == "length"
