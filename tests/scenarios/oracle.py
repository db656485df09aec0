"""Oracle: what each engine says by itself at the split of a handoff, from processes without a line of Crossfill.

The split (prompt-1 tokens, then the last one alone) is the right reference: a cold run of the whole prompt differs
by FP16 rounding. Where an engine's own top-2 margin is below `EPSILON`, KV of another engine (about 2e-3 relative
apart) may rightly choose the other token: texts are compared up to there, and `compared` counts how many tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.cli import machine

EPSILON = 0.1  # logits; KV of two engines moves a logit of this model by less than 0.03
LENGTHS = (1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 192, 193, 744)
MAX_TOKENS = 16
_ORACLES = Path("tests/oracles")


@dataclass(frozen=True, slots=True)
class Expected:
    """The engine's own text, and the part of it that no rounding may change."""

    text: str
    firm: str
    firm_tokens: int

    def check(self, text: str) -> int:
        """Assert that `text` begins with the firm part; returns how many tokens that compared."""
        assert text.startswith(self.firm), f"expected {self.firm!r}, got {text!r}"
        if self.firm_tokens == MAX_TOKENS:
            assert text == self.text
        return self.firm_tokens


def prompts(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """One prompt of each length, all different from the first token on."""
    source = Path("docs/wire-format.md").read_text() + Path("README.md").read_text()
    body = tokenizer.encode(source, add_special_tokens=False).ids
    return {n: (tokenizer.encode(f"{n} ", add_special_tokens=False).ids + body)[:n] for n in LENGTHS}


def ask(engine: str, model: Path, asked: list[list[int]]) -> list[dict[str, Any]]:
    """Run the engine's oracle over all prompts in one process."""
    python = machine.interpreters(Path(), Path(sys.prefix)).get(engine, Path(sys.executable))
    task = json.dumps({"model": str(model), "prompts": asked, "max_tokens": MAX_TOKENS, "chunk_tokens": 256})
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    shim = python.parent.parent / "lib" / "crossfill_blas.so"
    if engine == "mlx" and shim.exists():
        environ["LD_PRELOAD"] = str(shim.absolute())
    done = subprocess.run(
        [str(python), str(_ORACLES / f"{engine}_split.py")],
        input=task,
        capture_output=True,
        text=True,
        env=environ,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])["outputs"]
    return answers


def own_texts(
    engines: Iterable[str], model: Path, tokenizer: Tokenizer, asked: dict[int, list[int]]
) -> dict[str, dict[int, Expected]]:
    """engine -> length -> what it says without us."""
    found = {}
    for engine in engines:
        answers = ask(engine, model, list(asked.values()))
        found[engine] = {n: expected(tokenizer, a) for n, a in zip(asked, answers, strict=True)}
    return found


def expected(tokenizer: Tokenizer, answer: dict[str, Any]) -> Expected:
    firm = next((i for i, m in enumerate(answer["margins"]) if m < EPSILON), MAX_TOKENS)
    tokens = answer["tokens"]
    return Expected(tokenizer.decode(tokens), _whole(tokenizer, tokens[:firm]), firm)


def _whole(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text of `tokens` without a character that the next token may still complete."""
    return str(tokenizer.decode(tokens)).rstrip("\ufffd")
