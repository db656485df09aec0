"""E: what a hostile client may send over HTTP, on the running system."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from tests.faults.rig import Rig

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
NAMES = ["../../etc/passwd", "a\r\nX: y", "x" * 10_000, "{tag}", "*", "cf:*", "modèle\u202e", "\x00"]
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize("name", NAMES)
def test_e58_a_strange_model_name_is_unknown_and_touches_no_key(running: Rig, name: str) -> None:
    before = sorted(running.broker.scan_iter("*"))
    answer = running.http.post("/v1/completions", json=BODY | {"model": name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "x: y" not in {key.lower() for key in answer.headers}
    new = set(running.broker.scan_iter("*")) - set(before)
    assert not [
        key for key in new if not key.startswith((b"cf:owner:", b"cf:replica:", b"cf:sweep", b"cf:upkeep", b"rq:"))
    ]


@pytest.mark.parametrize("given", ["a b", "x" * 100_000, "é", "a\tb", ""])
def test_e59_a_strange_request_id_is_replaced(running: Rig, given: str) -> None:
    if len(given) > 60_000:  # more than a server reads as headers: refused before it gets here
        given = given[:4000]
    answer = running.http.get("/v1/models", headers={b"X-Request-Id": given.encode()})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] != given
    assert answer.headers["x-request-id"].startswith("req-")


def test_e63_a_clients_own_handoff_id_names_nothing(hurt: Rig) -> None:
    """It gets an id of ours; the keys of the id it wished for are never made."""
    mine = secrets.token_hex(16)
    wish = {"handoff_id": mine, "request_id": mine, "id": mine, "kv_transfer_params": {"remote": mine}}
    answer = hurt.http.post(
        "/v1/completions", json=BODY | {"model": hurt.model} | wish, headers={"X-Crossfill-Trace": "1"}
    )
    if answer.status_code == 200:
        assert answer.json()["crossfill"]["handoff_id"] != mine
    else:
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not list(hurt.broker.scan_iter(f"*{mine}*"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"[" * 1_000_000,
        b'{"model": NaN}',
        b'{"prompt": [1], "temperature": 1e999}',
        b'{"prompt": [99999999999999999999999]}',
        b'{"prompt": [5, 100000000]}',
        b'{"prompt": "' + b"a " * 5_000_000 + b'"}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        json.dumps(BODY | {"stop_token_ids": [1 << 40]}).encode(),
        json.dumps(BODY | {"stop": ["x"] * 1000}).encode(),
        json.dumps(BODY | {"stop": [""]}).encode(),
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
def test_e57_a_body_that_would_hurt_is_a_refusal(running: Rig, body: bytes) -> None:
    answer = running.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"]
    assert running.live() == []
