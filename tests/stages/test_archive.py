"""The folder of captures: whole files or none, private, capped, and a disk that refuses costs nobody a request."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.capture import Capture, Reader
from pipeline.settings import CaptureSettings
from pipeline.stages import archive as archives
from pipeline.stages.archive import Archive, Draft
from tests.test_capture import capture, pages


def numbered(number: int) -> Capture:
    made = capture(130)
    request = replace(made.request, handoff_id=f"{number:032x}")
    return replace(made, request=request, trace={"created_ms": 1000.0 + number})


def draft(one: Capture, room_bytes: int = 0) -> Draft:
    return Draft(one.request.handoff_id, tuple(pages(one)), room_bytes, lambda: one)


@contextmanager
def archive(folder: Path, **limits: object) -> Iterator[Archive]:
    made = Archive(CaptureSettings.model_validate({"folder": folder} | limits))
    yield made
    made.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(path: Path) -> Capture:
    with path.open("rb") as file:
        return Reader(file).verify()


def test_a_capture_is_written_whole_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "captures"
    with archive(folder) as store:
        store.put(draft(numbered(1)))
        assert store.flush(30)
    assert names(folder) == [f"0000000001001-{1:032x}.handoff"]
    path = folder / names(folder)[0]
    assert read(path) == numbered(1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_oldest_go(tmp_path: Path) -> None:
    with archive(tmp_path, max_files=2) as store:
        for number in (3, 1, 2, 4):
            store.put(draft(numbered(number)))
        assert store.flush(30)
    assert [read(tmp_path / name).request.handoff_id for name in names(tmp_path)] == [f"{n:032x}" for n in (3, 4)]


def test_what_a_dead_process_left_half_written_goes(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".old.1.part", tmp_path / ".fresh.1.part"
    old.touch()
    fresh.touch()
    os.utime(old, (0, 0))
    archives.prune(tmp_path, 1)
    assert names(tmp_path) == [fresh.name]


def test_room_is_bounded_and_given_back(tmp_path: Path) -> None:
    with archive(tmp_path, buffer_bytes=10, max_file_bytes=8) as store:
        assert not store.reserve("a", 9)  # no file may be that large
        assert store.reserve("b", 8)
        assert not store.reserve("c", 3)
        store.release(8)
        assert store.reserve("c", 3)
        store.put(draft(numbered(1), room_bytes=3))
        assert store.flush(30)
        assert store.reserve("d", 8)


def test_a_slow_disk_keeps_nobody_waiting(tmp_path: Path) -> None:
    """While one is being written others queue up to the cap, and what is beyond is refused at once."""
    go = threading.Event()
    slow = numbered(1)

    def finish() -> Capture:
        assert go.wait(60)
        return slow

    with archive(tmp_path, buffer_bytes=10) as store:
        assert store.reserve("a", 6)
        store.put(Draft("a", tuple(pages(slow)), 6, finish))
        assert not store.reserve("b", 6)
        go.set()
        assert store.flush(30)
        assert store.reserve("b", 6)


@pytest.mark.parametrize("where", ["open", "write", "folder"])
def test_a_disk_that_refuses_ends_capturing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    folder = tmp_path / "captures"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    if where == "folder":
        folder.write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(os, "fsync" if where == "write" else "open", full)
    with archive(folder) as store, caplog.at_level(logging.ERROR):
        store.put(draft(numbered(1)))
        assert store.flush(30)
        assert str(folder) in store.disabled
        assert not store.reserve("next", 1)
    assert "capturing ends" in caplog.text
    if where == "write":
        assert names(folder) == []  # nothing half-written stays


def test_one_that_cannot_be_written_does_not_end_the_others(tmp_path: Path) -> None:
    bad = numbered(1)
    with archive(tmp_path) as store:
        store.put(Draft("bad", tuple(pages(bad)[:1]), 0, lambda: bad))  # announces three pages
        store.put(Draft("bug", (), 0, lambda: 1 // 0))  # type: ignore[arg-type,return-value]
        store.put(Draft("unwanted", (), 0, lambda: None))
        store.put(draft(numbered(2)))
        assert store.flush(30)
        assert store.disabled == ""
    assert [read(tmp_path / name).request.handoff_id for name in names(tmp_path)] == [f"{2:032x}"]


def test_redaction_leaves_no_page_and_no_token(tmp_path: Path) -> None:
    with archive(tmp_path, redact=True) as store:
        store.put(draft(numbered(1)))
        assert store.flush(30)
    found = read(next(tmp_path.glob("*.handoff")))
    assert (found.redacted, found.request.token_ids, found.pages, len(found.page_digests)) == (True, (), 0, 3)


def test_a_link_in_the_place_of_the_file_aside_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    one = numbered(1)
    (tmp_path / f".{archives.file_name(one)}.{os.getpid()}.part").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        archives.write(tmp_path, one, pages(one))
    assert not target.exists()


def test_close_writes_what_is_there_and_takes_nothing_new(tmp_path: Path) -> None:
    store = Archive(CaptureSettings(folder=tmp_path))
    store.put(draft(numbered(1)))
    store.close()
    assert len(names(tmp_path)) == 1
    assert not store.reserve("late", 1)
