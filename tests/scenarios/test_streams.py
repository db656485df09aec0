"""A stream tells what the whole answer tells, byte for byte, on a running system; tests/scenarios/test_clients.py asks
the same of real engines."""

from __future__ import annotations

import pytest

from tests.scenarios.speech import CHAT, TEXT, Speech
from tests.scenarios.system import System

EOS = 2  # of the tiny model
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_is_the_whole_answer_byte_for_byte(cheap: System, path: str) -> None:
    Speech(cheap.http, cheap.model, "reference->reference", path).check(seeds=(1, 2), cuts=(2, 3, 4, 5))
    cheap.settled()


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
def test_answers_of_one_token_and_of_no_text(cheap: System, tokens: int) -> None:
    """Counted once, whoever computed what; at page boundaries too."""
    prompt = [(7 * i) % 900 + 20 for i in range(tokens)]
    one = cheap.complete(prompt, "reference->reference", max_tokens=1)
    assert (one.finish, one.usage["prompt_tokens"], one.usage["completion_tokens"]) == ("length", tokens, 1)
    two = cheap.complete(prompt, "reference->reference", max_tokens=2)
    assert two.text.startswith(one.text)
    ended = cheap.complete(prompt, "reference->reference", ignore_eos=False, logit_bias={str(EOS): 100})
    assert (ended.text, ended.finish, ended.usage["completion_tokens"]) == ("", "stop", 1)
