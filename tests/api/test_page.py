"""The page's policy names exactly what is in the page; nothing of it comes from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx
import pytest

from pipeline.api import page

VOID = {"meta"}


class _Reader(HTMLParser):
    """Tags with their attributes, and the text of style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.inline: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.inline[self.open[-1]] = self.inline.get(self.open[-1], "") + data


@pytest.fixture(scope="module")
def read() -> _Reader:
    reader = _Reader()
    reader.feed(page.load().html.decode())
    assert reader.open == []
    return reader


def test_the_policy_allows_what_is_there_and_nothing_else(read: _Reader) -> None:
    policy = dict(part.split(" ", 1) for part in page.load().headers["Content-Security-Policy"].split("; "))
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(read.inline[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)


def test_nothing_comes_from_elsewhere(read: _Reader) -> None:
    names = {name for _, attributes in read.tags for name in attributes}
    assert not names & {"src", "href", "style", "action"}
    assert [name for name in names if name.startswith("on")] == []
    text = page.load().html.decode()
    assert re.findall(r"https?://|//cdn|@import|url\(", text) == []


def test_no_text_of_others_becomes_markup(read: _Reader) -> None:
    script = read.inline["script"]
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script) == []


@pytest.mark.anyio
async def test_it_is_served(client: httpx.AsyncClient) -> None:
    answer = await client.get("/dashboard")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.content == page.load().html
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
