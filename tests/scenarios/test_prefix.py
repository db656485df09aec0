"""Pages that D already holds do not cross the wire, and the client is told."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.scenarios.conftest import MODEL
from tests.scenarios.oracle import prompts
from tests.scenarios.system import System

pytestmark = [pytest.mark.processes, pytest.mark.real_model, pytest.mark.timeout(300)]


@pytest.mark.parametrize("direction", ["vllm->mlx", "mlx->vllm"])
def test_held_pages_are_not_sent(real: System, direction: str) -> None:
    base = prompts(Tokenizer.from_file(str(MODEL / "tokenizer.json")))[193]
    salt = f"prefix-{direction}"
    first = real.complete(base, direction, cache_salt=salt)
    assert (first.trace["pages"], first.trace["reused_tokens"]) == (3, 0)
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0

    again = real.complete(base, direction, cache_salt=salt)
    assert (again.trace["pages"], again.trace["imported_tokens"], again.trace["reused_tokens"]) == (0, 0, 192)
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 192
    assert again.text == first.text

    shared = base[:128] + list(reversed(base[128:]))
    third = real.complete(shared, direction, cache_salt=salt)
    assert (third.trace["pages"], third.trace["imported_tokens"], third.trace["reused_tokens"]) == (1, 64, 128)
    assert third.usage["prompt_tokens_details"]["cached_tokens"] == 128
    assert third.text == real.complete(shared, direction).text

    stranger = real.complete(base, direction, cache_salt=f"another tenant of {direction}")
    assert (stranger.trace["pages"], stranger.trace["reused_tokens"]) == (3, 0)
