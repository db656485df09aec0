"""`crossfill handoff show|verify|diff` on files made by hand, and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline import capture as captures
from pipeline.__main__ import main
from pipeline.capture import Capture
from pipeline.page import Page
from pipeline.stages import archive
from tests.test_capture import capture, pages


def store(folder: Path, name: str, one: Capture, its: list[Page] | None = None) -> str:
    return str(archive.write(folder, one, pages(one) if its is None else its, name))


def faulty(one: Capture) -> list[Page]:
    """Token 70 (in page 1) is wrong from layer 1 on."""
    found = pages(one)
    found[1].data[1:, :, :, 6] += 1
    return found


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["handoff", *words])
    caught = capsys.readouterr()
    return status, " ".join((caught.out + caught.err).split())


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = store(tmp_path, "a.handoff", capture(200, error="engine_failed: [broke]"))
    status, said = run(capsys, "show", file)
    assert status == 0
    for part in ("200 tokens", "4 of 4 pages", "5 6 7 (stop)", "engine_failed: [broke]", "stop_token_ids (7, 9)"):
        assert part in said
    _, text = run(capsys, "show", file, "--json")
    assert json.loads(text)["request"]["sampling"]["max_tokens"] == 3


def test_verify_names_the_frame_and_looks_at_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = capture(200)
    good, bad = store(tmp_path, "good.handoff", one), store(tmp_path, "bad.handoff", one)
    data = bytearray(Path(bad).read_bytes())
    data[data.index(pages(one)[2].data.tobytes()) + 5] ^= 1
    Path(bad).write_bytes(data)
    status, said = run(capsys, "verify", bad, str(tmp_path / "none.handoff"), good)
    assert status == 1
    assert "bad.handoff: BROKEN: frame 3 (page 2): wrong digest of payload" in said
    assert "none.handoff: BROKEN: cannot read" in said
    assert "good.handoff: whole: 4 of 4 pages" in said
    assert run(capsys, "verify", good)[0] == 0


def test_a_damaged_file_is_not_shown_or_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = capture(200)
    good, bad = store(tmp_path, "good.handoff", one), store(tmp_path, "bad.handoff", one)
    Path(bad).write_bytes(Path(bad).read_bytes()[:-40])
    for words in (["diff", good, bad], ["diff", bad, good]):
        status, said = run(capsys, *words)
        assert (status, "capture_invalid" in said, "truncated" in said) == (1, True, True)


def test_diff_finds_where_it_begins_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = capture(200)
    ours, theirs = store(tmp_path, "a.handoff", one, faulty(one)), store(tmp_path, "b.handoff", one)
    picture = tmp_path / "map.png"
    status, said = run(capsys, "diff", ours, theirs, "--plot", str(picture))
    assert status == 1
    assert "the first divergence is at token 70 (page 1), layer 1, K" in said
    _, text = run(capsys, "diff", ours, theirs, "--json")
    found = json.loads(text)
    assert (found["first"]["token"], found["first"]["layer"]) == (70, 1)
    assert [page["max_abs"] > 0 for page in found["pages"]] == [False, True, False, False]
    assert [layer["max_abs"] > 0 for layer in found["layers"]] == [False, True]
    assert run(capsys, "diff", theirs, theirs)[0] == 0
    bright = brightness(picture)
    assert bright[1, 1] > 1.3 * max(bright[0, 1], bright[1, 0], bright[1, 2])


def brightness(picture: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Mean colour in the middle of each cell of a 2-layer, 4-page map: the picture shows what the numbers say."""
    from matplotlib import image

    pixels = np.asarray(image.imread(picture), np.float64)[..., :3].sum(axis=2)
    dark = pixels < 1.2  # the background of the map; figure and labels are white
    rows, columns = np.flatnonzero(dark.mean(axis=1) > 0.3), np.flatnonzero(dark.mean(axis=0) > 0.3)
    top, bottom, left, right = rows[0], rows[-1], columns[0], columns[-1]
    cells = np.zeros((2, 4))
    for layer in range(2):
        for page in range(4):
            y = top + (bottom - top) * (layer + 0.8) / 2
            x = left + (right - left) * (page + 0.8) / 4
            cells[layer, page] = pixels[int(y) - 2 : int(y) + 2, int(x) - 2 : int(x) + 2].mean()
    return cells


def test_diff_refuses_other_prompts_and_other_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = capture(200), capture(130)
    files = [store(tmp_path, "a.handoff", one), store(tmp_path, "b.handoff", other)]
    assert "different prompts: they part at token 0" in run(capsys, "diff", *files)[1]
    assert run(capsys, "diff", files[0])[0] == 2
    assert run(capsys, "show")[0] == 2
    assert run(capsys, "0" * 32, "1" * 32)[0] == 2


def test_redacted_ones_are_compared_by_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = capture(200)
    a = store(tmp_path, "a.handoff", captures.redact(one, pages(one)), [])
    b = store(tmp_path, "b.handoff", captures.redact(one, faulty(one)), [])
    whole = store(tmp_path, "c.handoff", one)
    assert "redacted: the digests of 4 pages" in run(capsys, "show", a)[1]
    assert (run(capsys, "diff", a, a)[0], run(capsys, "verify", a)[0]) == (0, 0)
    status, said = run(capsys, "diff", a, b)
    assert (status, "equal up to page 1" in said) == (1, True)
    assert "there is nothing to compare" in run(capsys, "diff", a, whole)[1]


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = store(tmp_path, "a.handoff", replace(capture(65)))
    status, said = run(capsys, "diff", file, file, "--plot", str(tmp_path / "no" / "folder.png"))
    assert (status, "cannot write the picture" in said) == (2, True)
