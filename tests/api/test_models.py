"""The model list, several models behind one API, and their tokenisers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pipeline.api import served
from pipeline.api.app import create_app
from pipeline.api.served import Catalogue, Served
from pipeline.api.text import Text
from pipeline.errors import ConfigError, NoReplicaError
from pipeline.sample import tiny
from tests.api.conftest import CREATED, EOS, chat, settings
from tests.api.fake import FakeBackend, steps

pytestmark = pytest.mark.anyio
Ids = Callable[[str], list[int]]
CARD = {
    "id": "tiny",
    "object": "model",
    "created": CREATED,
    "owned_by": "crossfill",
    "root": "tiny",
    "parent": None,
    "max_model_len": 512,
}


@pytest.fixture
async def both(model: Served, backend: FakeBackend, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    other = replace(model, name="org/other", aliases=("gpt-4o",), eos_token_ids=(5,))
    app = create_app(settings(checkpoint), Catalogue([model, other]), backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as opened:
        yield opened


async def test_models(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/models"):
        assert (await client.get(path)).json() == {"object": "list", "data": [CARD]}
    for name in ("tiny", "small"):
        assert (await client.get(f"/v1/models/{name}")).json() == CARD
    answer = await client.get("/v1/models/some/body")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_each_model_answers_by_its_names(both: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.scripts = [steps([EOS], "stop")]
    cards = (await both.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "org/other"]
    for asked in ("tiny", "small", "org/other", "gpt-4o"):
        answer = await both.post("/v1/chat/completions", json={**chat(), "model": asked})
        assert answer.json()["model"] == backend.models[-1]
    assert backend.models == ["tiny", "tiny", "org/other", "org/other"]
    assert [request.sampling.stop_token_ids for request in backend.requests] == [(EOS,)] * 2 + [(5,)] * 2
    answer = await both.post("/v1/completions", json={"model": "third", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
async def test_a_request_may_leave_the_name_out_where_there_is_one_model(
    client: httpx.AsyncClient, both: httpx.AsyncClient, backend: FakeBackend, named: dict[str, str | None]
) -> None:
    backend.scripts = [steps([EOS], "stop")]
    asked = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}, "/tokenize": {"prompt": "a"}}
    asked["/v1/chat/completions"] = {"messages": chat()["messages"]}
    for path, body in asked.items():
        assert (await client.post(path, json=body | named)).status_code == 200
        answer = await both.post(path, json=body | named)
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "`model` is missing, and several are served here: `tiny`, `org/other`.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "invalid_value",
        }
    assert backend.models == ["tiny"] * 3


async def test_ready_while_one_of_two_can_be_served(both: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.unready, backend.unready_model = NoReplicaError("none"), "tiny"
    answer = await both.get("/ready")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "models": {"tiny": "no_replica", "org/other": "ready"}}
    backend.unready_model = None
    answer = await both.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


def test_a_name_belongs_to_one_model(model: Served) -> None:
    with pytest.raises(ConfigError, match="two models are called 'small'"):
        Catalogue([model, replace(model, name="other", aliases=("small",))])


def test_every_model_of_the_settings_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    second = tiny.write("qwen2", tmp_path / "tiny-qwen2")
    asked = settings(checkpoint, aliases=["a"], models=[{"model": second, "served_name": "two", "aliases": ["b"]}])
    found = served.load(asked, CREATED)
    assert [(model.name, model.aliases) for model in found.all] == [("tiny-llama", ("a",)), ("two", ("b",))]
    assert found.find("b").contract.layers == 3
    assert found.find("tiny-llama") is found.find("a")
    with pytest.raises(ConfigError, match="is not a directory"):
        served.load(settings(checkpoint, models=[{"model": tmp_path / "none"}]), CREATED)


async def test_tokenize_and_back(client: httpx.AsyncClient, ids: Ids, text: Text) -> None:
    written = "Hello \N{GRINNING FACE} 世界"
    found = (await client.post("/tokenize", json={"model": "tiny", "prompt": written})).json()
    assert found == {"count": len(ids(written)), "max_model_len": 512, "tokens": ids(written)}
    back = await client.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": written}
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    found = (await client.post("/v1/tokenize", json=chat("Hi"))).json()
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert found["tokens"] == ids(rendered)
    back = await client.post("/v1/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": rendered}  # special tokens are shown


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"model": "none", "prompt": "a"}, 404, None),
        ("/detokenize", {"tokens": [1024]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
async def test_what_has_no_tokens(
    client: httpx.AsyncClient, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
