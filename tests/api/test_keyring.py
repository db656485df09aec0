"""API keys: made, hashed, read again when the file changes, revoked."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from pipeline.api import keyring
from pipeline.api.keyring import Keyring
from pipeline.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_key_is_stored_as_its_hash_alone(file: Path) -> None:
    key = keyring.new(file, "alice")
    assert key.startswith("cf-")
    assert len(key) == 46  # 256 bits in base64
    assert file.read_text() == f"{hashlib.sha256(key.encode()).hexdigest()} alice\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["keys"]


def test_who_is_admitted_follows_the_file(file: Path) -> None:
    alice = keyring.new(file, "alice")
    ring = Keyring(file)
    bob = keyring.new(file, "bob@home")
    assert [ring.admits(key) for key in (alice, bob, "cf-wrong", "")] == ["alice", "bob@home", None, None]
    keyring.revoke(file, "alice")
    assert [ring.admits(key) for key in (alice, bob)] == [None, "bob@home"]
    assert keyring.new(file, "alice") != alice


def test_a_file_that_breaks_keeps_the_keys_known_so_far(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    alice = keyring.new(file, "alice")
    ring = Keyring(file)
    for breaks in (lambda: file.write_text("what\n"), lambda: file.unlink()):
        breaks()
        caplog.clear()
        assert (ring.admits(alice), ring.admits("cf-wrong")) == ("alice", None)
        assert "stay valid" in caplog.text
    bob = keyring.new(file, "bob")
    assert (ring.admits(alice), ring.admits(bob)) == (None, "bob")


def test_a_broken_file_is_read_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    alice = keyring.new(file, "alice")
    ring = Keyring(file)
    file.write_text("what\n")
    assert [ring.admits(alice) for _ in range(3)] == ["alice"] * 3
    assert caplog.text.count("stay valid") == 1


def test_comments_and_empty_lines(file: Path) -> None:
    file.write_text(f"# ours\n\n{'a' * 64}  a name\n")
    assert keyring.read(file) == {"a" * 64: "a name"}


def test_what_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Keyring(file)
    keyring.new(file, "alice")
    with pytest.raises(ConfigError, match="exists already"):
        keyring.new(file, "alice")
    for bad in ("", "a b", "x" * 65, "a\nb"):
        with pytest.raises(ConfigError, match="no name"):
            keyring.new(file, bad)
    with pytest.raises(ConfigError, match="no key is named 'bob'"):
        keyring.revoke(file, "bob")
    file.write_text(f"{'a' * 64} fine\n{'A' * 64} upper\n")
    with pytest.raises(ConfigError, match=r"line 2: not `SHA-256 NAME`"):
        Keyring(file)
