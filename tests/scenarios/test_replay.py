"""A live handoff between two real engines is captured and replayed on others; a planted fault is found in its file."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeline.__main__ import main
from tests.scenarios.conftest import MODEL
from tests.scenarios.oracle import prompts
from tests.scenarios.system import System, eventually
from tests.scenarios.test_wrong_pages import liar

TINY_PROMPT = [(11 * i) % 900 + 20 for i in range(300)]  # five pages
TOKENS = 40

Printed = pytest.CaptureFixture[str]


def captured(system: System, prompt: list[int], route: str, **body: Any) -> Path:
    """Ask for a completion, and while it lives, for its capture; the file. Till then D is stopped."""
    folder = system.fleet.settings.capture.folder
    before = set(folder.glob("*.handoff"))
    asking = threading.Thread(target=lambda: system.complete(prompt, route, **body))
    engine = route.partition("->")[2]
    [d] = [each.name for each in system.fleet.settings.workers if each.engine == engine and each.role != "prefill"]
    os.kill(system.child(d).pid, signal.SIGSTOP)
    try:
        asking.start()
        eventually(lambda: system.broker.zcard("cf:live") == 1)
        live: Any = system.broker.zrange("cf:live", 0, -1)
        [handoff_id] = [found.decode() for found in live]
        assert main(["capture", handoff_id, "--broker", system.fleet.settings.broker.url]) == 0
    finally:
        os.kill(system.child(d).pid, signal.SIGCONT)
    asking.join()
    eventually(lambda: len(set(folder.glob("*.handoff")) - before) == 1, 60)
    [file] = set(folder.glob("*.handoff")) - before
    assert handoff_id in file.name
    system.settled()
    return file


def found(printed: Printed, *words: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a command."""
    printed.readouterr()
    status = main([*words, "--json"])
    out = printed.readouterr()
    assert out.out, out.err
    return status, json.loads(out.out)


@pytest.mark.processes
@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recorded_on_vllm_to_mlx_and_replayed_on_others(real: System, tmp_path: Path, capsys: Printed) -> None:
    prompt = prompts(Tokenizer.from_file(str(MODEL / "tokenizer.json")))[193]
    file = captured(real, prompt, "vllm->mlx", max_tokens=48)
    assert main(["handoff", "verify", str(file)]) == 0
    for engine in ("reference", "vllm"):
        status, report = found(capsys, "replay", str(file), "--engine", engine)
        [sample] = report["samples"]
        assert (status, sample["fault"], report["recorded_on"]) == (0, False, "mlx")
        assert sample["compared"] >= 10  # up to a near tie, if there is one
    status, deviation = found(capsys, "replay", str(file), "--prefill", "mlx", "--plot", str(tmp_path / "map.png"))
    assert (status, deviation["first"], deviation["tokens"]) == (0, None, 192)
    assert 0 < deviation["total"]["relative_rms"] < 5e-3  # another engine's rounding, and no more
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    status, again = found(capsys, "replay", str(file), "--to", real.url, "--route", "vllm->mlx")
    assert (status, again["same"], again["trace"]["imported_tokens"]) == (0, [True], 192)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_wrong_page_with_a_valid_digest_is_found(
    cheap: System, tiny_model: Path, tmp_path: Path, capsys: Printed
) -> None:
    """Every digest is right and the text is wrong: computing the pages again says from which token on, and in which."""
    with liar(cheap, tiny_model, "wrong_third_page", tmp_path):
        file = captured(cheap, TINY_PROMPT, "liar->reference", max_tokens=TOKENS)
    assert main(["handoff", "verify", str(file)]) == 0
    model = ("--model", str(tiny_model))
    status, again = found(capsys, "replay", str(file), "--engine", "reference", *model)
    assert (status, again["samples"][0]["parted"]) == (0, None)  # D did what it should with what it got
    out = tmp_path / "right.handoff"
    status, deviation = found(capsys, "replay", str(file), "--prefill", "reference", "--save", str(out), *model)
    assert (status, deviation["first"]["token"], deviation["first"]["layer"]) == (1, 128, 0)
    assert [page["max_abs"] > 0 for page in deviation["pages"]] == [False, False, True, False, False]
    status, right = found(capsys, "replay", str(out), "--engine", "reference", *model)
    assert status == 1
    assert right["samples"][0]["fault"]


def test_commands_refuse_what_makes_no_sense(tmp_path: Path, capsys: Printed) -> None:
    assert main(["replay", str(tmp_path / "none.handoff"), "--engine", "reference"]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.handoff")]) == 2
    assert "say where" in capsys.readouterr().err
