"""`crossfill model`: what is written where, what a comparison prints, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from pipeline import checkpoint
from pipeline.__main__ import main
from pipeline.cli import model
from pipeline.sample import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def test_a_tiny_checkpoint_goes_where_it_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "tiny", "--arch", "qwen3", "--seed", "4", "--to", str(tmp_path / "m")]) == 0
    expected = tiny.write("qwen3", tmp_path / "same", seed=4)
    assert checkpoint.read_contract(tmp_path / "m") == checkpoint.read_contract(expected)
    assert f"wrote {tmp_path / 'm'}" in capsys.readouterr().out


def test_the_default_place_is_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["model", "tiny", "--arch", "llama"]) == 0
    assert (tmp_path / "models" / "tiny-llama" / "config.json").exists()


def test_one_directory_shows_its_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny.write("llama", tmp_path / "m")
    assert main(["model", "digest", str(directory)]) == 0
    shown = capsys.readouterr().out
    found = checkpoint.read_contract(directory)
    for value in (found.digest, found.weights, found.tokenizer, found.config):
        assert value in shown


def test_equal_checkpoints_end_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tiny.write("llama", tmp_path / "a"), tiny.write("llama", tmp_path / "b")
    (b / "chat_template.jinja").write_text("another")
    assert main(["model", "digest", str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    assert f"same contract: {checkpoint.read_contract(a).digest}" in shown
    assert "the chat templates differ" in shown


def test_what_differs_is_named_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tiny.write("llama", tmp_path / "a"), tiny.write("llama", tmp_path / "b", layers=1)
    assert main(["model", "digest", str(a), str(b)]) == 1
    shown = capsys.readouterr().out
    assert "10 differences" in shown
    assert "config.layers" in shown
    assert "weights.model.layers.1.post_attention_layernorm.weight" in shown


def test_many_differences_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tiny.write("qwen3", tmp_path / "a"), tiny.write("qwen3", tmp_path / "b", seed=1)
    assert main(["model", "digest", str(a), str(b)]) == 1
    shown = capsys.readouterr().out
    total = 2 + 4 * 11  # every tensor
    assert f"{total} differences" in shown
    assert f"and {total - model.SHOWN} more" in shown


def test_a_missing_directory_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "digest", str(tmp_path / "absent")]) == 2
    assert "is this a checkpoint directory?" in capsys.readouterr().err


def test_a_long_value_is_cut_and_a_bracket_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    found = [checkpoint.Difference("tokenizer.vocab['[red]']", None, "x" * 100)]
    Console().print(model.difference_table(found, "a[b]", "c"))
    shown = capsys.readouterr().out
    assert "tokenizer.vocab['[red]']" in shown
    assert "a[b]" in shown
    assert "x" * 57 + "..." in shown
