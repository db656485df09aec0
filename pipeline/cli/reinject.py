"""Reinject: ask a running system what a stored handoff asked, through its API: the same token ids and sampling.

The recorded pages take no part: P computes them anew and they cross the broker again (under a fresh salt, so that no
cache hides it). What is compared is the text, so this says whether the fault is still there, not where it was.
"""

from __future__ import annotations

import argparse
import json
import secrets
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console

from pipeline.capture import Capture
from pipeline.cli import waterfall
from pipeline.cli.chat import ChatError
from pipeline.cli.client import fetch, open_url
from pipeline.errors import CaptureError

_TIMEOUT_S = 600.0


def run(options: argparse.Namespace, capture: Capture) -> int:
    """The exit status: 1 when a greedy text differs. Raises CaptureError, ChatError."""
    if capture.redacted:
        raise CaptureError("the capture is redacted: its token ids are not there to be asked again")
    url = options.to.rstrip("/")
    model = _model(url)
    answer = _post(f"{url}/v1/completions", _body(capture, model), {"X-Crossfill-Route": options.route or "auto"})
    said = [choice["text"] for choice in answer["choices"]]
    recorded = [_text(url, model, capture, tokens) for tokens in capture.tokens]
    greedy = capture.request.sampling.temperature == 0
    same = [_agree(a, b) for a, b in zip(recorded, said, strict=False)]
    if options.json:
        print(
            json.dumps({"same": same, "recorded": recorded, "answered": said, "trace": answer["crossfill"]}, indent=2)
        )
    else:
        _show(same, recorded, said, answer["crossfill"], greedy)
    return 1 if greedy and not all(same) else 0


def _show(same: list[bool], recorded: list[str], said: list[str], trace: dict[str, Any], greedy: bool) -> None:
    console = Console()
    for agrees, before, now in zip(same, recorded, said, strict=False):
        console.print("the same text" if agrees else "another text" + ("" if greedy else " (it is sampled: it may be)"))
        for label, text in (("recorded", before), ("answered", now)):
            console.print(f"{label}: {text!r}", markup=False, highlight=False)
    console.print(waterfall.title(trace), highlight=False)
    console.print(waterfall.table(trace))


def _agree(recorded: str, answered: str) -> bool:
    """A recording that ended early, or in the middle of a character, counts as far as it goes."""
    return bool(answered) and answered.startswith(recorded.rstrip("\ufffd"))


def _model(url: str) -> str:
    found = fetch(f"{url}/v1/models")
    if not found or not found.get("data"):
        raise ChatError(f"no Crossfill API answers at {url}: start one, or name another with --to")
    return str(found["data"][0]["id"])


def _body(capture: Capture, model: str) -> dict[str, Any]:
    """Only what was set: an API refuses by name what its engines cannot do."""
    sampling = capture.request.sampling
    asked: dict[str, Any] = {
        "model": model,
        "prompt": list(capture.request.token_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "ignore_eos": True,  # the recorded stop ids hold it, where it counted
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "cache_salt": secrets.token_hex(8),
    }
    rarely = {
        "top_k": sampling.top_k or None,
        "seed": sampling.seed,
        "min_p": sampling.min_p or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "min_tokens": sampling.min_tokens or None,
        "n": sampling.n if sampling.n > 1 else None,
    }
    if sampling.grammar is not None:
        raise CaptureError("the recorded request has a grammar, which cannot be put back into the words of the API")
    return asked | {name: value for name, value in rarely.items() if value is not None}


def _text(url: str, model: str, capture: Capture, tokens: tuple[int, ...]) -> str:
    """Recorded tokens as the API would say them behind this prompt."""
    prompt = list(capture.request.token_ids)
    whole = _post(f"{url}/detokenize", {"model": model, "tokens": [*prompt, *tokens]}, {})["prompt"]
    before = _post(f"{url}/detokenize", {"model": model, "tokens": prompt}, {})["prompt"]
    return str(whole)[len(before) :]


def _post(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    sent = {"Content-Type": "application/json", "X-Crossfill-Trace": "1", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    try:
        with open_url(request, _TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise ChatError(f"HTTP {error.code} from {url}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, ValueError) as error:
        raise ChatError(f"no answer from {url}: {error}") from error
