"""What the plug-in asks of an SGLang before it serves."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from pipeline.engines.sglang.plugin import require_hooked


def plain(_: Any) -> None:
    """Nobody has put anything around it."""


class Module:
    """As SGLang leaves its targets behind: `gone` it does not have."""

    plain = plain
    hooked = functools.wraps(plain)(lambda _: None)
    of_class: Any = classmethod(functools.wraps(plain)(lambda _: None))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_like", Module)


def test_hooks_that_are_in_place_are_fine() -> None:
    require_hooked("sglang_like.hooked", "sglang_like.of_class")


@pytest.mark.parametrize("name", ["plain", "gone"])
def test_a_version_without_a_place_for_a_hook_is_refused(name: str) -> None:
    """SGLang logs that and goes on: penalties and grammars would be ignored without a word."""
    with pytest.raises(RuntimeError, match=f"no sglang_like.{name} that can be hooked"):
        require_hooked("sglang_like.hooked", f"sglang_like.{name}")
