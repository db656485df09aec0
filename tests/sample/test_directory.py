"""Directory: all or nothing, and nobody else's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.sample import directory


def test_files_appear_together_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with directory.replace(target) as fresh:
        (fresh / "config.json").write_text("{}")
        assert not target.exists()
        assert fresh.parent.parent == target.parent  # the same file system: a rename is enough
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failure_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")

    def write_half() -> None:
        with directory.replace(target) as fresh:
            (fresh / "config.json").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert (target / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_old_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    (target / "stale.safetensors").write_text("old")
    with directory.replace(target) as fresh:
        (fresh / "config.json").write_text("new")
    assert {path.name: path.read_text() for path in target.iterdir()} == {"config.json": "new"}


def test_a_checkpoint_comes_back_when_it_cannot_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(FileNotFoundError), directory.replace(target) as fresh:
        fresh.rmdir()  # as if someone had cleaned up: the last rename fails
    assert (target / "config.json").read_text() == "old"


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    with directory.replace(tmp_path / "m") as fresh:
        (fresh / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with directory.replace(tmp_path / "empty") as fresh:
        (fresh / "config.json").write_text("{}")
    assert (tmp_path / "empty" / "config.json").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError), directory.replace(target):
            pass
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_equal_values_give_equal_json(tmp_path: Path) -> None:
    directory.write_json(tmp_path / "a", {"b": "é", "a": 1})
    assert (tmp_path / "a").read_bytes() == '{\n  "a": 1,\n  "b": "é"\n}\n'.encode()
