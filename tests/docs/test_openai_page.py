"""Every row of the conformance tables names a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from pipeline.api import responses, schemas
from pipeline.api.errors import ENDPOINTS
from pipeline.api.schemas import ChatAsk, CompletionAsk

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    lines = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [line for line in table if not line.startswith("|---") and "shown by |" not in line]


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_a_test() -> None:
    found = rows()
    assert len(found) > 50
    assert [row for row in found if not NAMED.search(row)] == []


def test_every_named_test_exists() -> None:
    named = [match.groups() for row in rows() for match in NAMED.finditer(row)]
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []


def test_every_field_and_endpoint_has_a_row() -> None:
    """Whatever is read or refused by name, and every address that the answer to an unknown one names."""
    fields = [kind.model_fields for kind in (ChatAsk, CompletionAsk, responses.ResponsesAsk)]
    refused = {**schemas._INERT, **schemas._CHAT_INERT, **schemas._TEXT_INERT, **responses._REFUSED}
    wanted = {name for each in fields for name in each} | refused.keys() | set(ENDPOINTS)
    told = set(re.findall(r"`(?:[A-Z]+ )?([\w./]+)[^`]*`", "\n".join(row.rpartition("|")[0] for row in rows())))
    assert sorted(wanted - told) == []
