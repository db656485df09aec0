"""Keyring: who may ask. A file of hashed API keys, read again whenever it changes.

One line per key: hex SHA-256 of the key, then its name. Keys are 256 random bits, so a plain hash is enough; the key
itself is shown once and stored nowhere. Rule: a file that cannot be read opens nothing; the keys known so far stay.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import ConfigError

PREFIX = "cf-"
_LINE = re.compile(r"([0-9a-f]{64})\s+(\S.*)")
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_log = logging.getLogger(__name__)


class Keyring:
    """The keys of one file. `admits` is called for every request: one `stat` while nothing changes."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError when the file cannot be read now."""
        self._file = file
        self._seen: tuple[int, int, int, int] | None = None
        self._keys: Mapping[str, str] = {}
        self._refresh()

    def admits(self, key: str) -> str | None:
        """The name under which `key` was made; None for a stranger."""
        try:
            self._refresh()
        except ConfigError as error:
            _log.error("%s; the keys known so far stay valid", error)
        given, found = digest(key), None
        for each, name in self._keys.items():  # all of them: how long it takes tells nothing
            found = name if hmac.compare_digest(each, given) else found
        return found

    def _refresh(self) -> None:
        try:
            stat = self._file.stat()
        except OSError as error:
            raise ConfigError(f"api.keys_file: cannot read {self._file}: {error.strerror}") from error
        seen = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)  # ctime: it may be readable now
        if seen != self._seen:
            self._seen = seen  # first: a file that is broken is read, and complained about, once
            self._keys = read(self._file)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read(file: Path) -> dict[str, str]:
    """Digest to name. Raises ConfigError naming the line that is none of ours."""
    found = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"api.keys_file: cannot read {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line.strip())):
            raise ConfigError(f"{file}, line {number}: not `SHA-256 NAME`; make keys by `crossfill key new`")
        found[match[1]] = match[2]
    return found


def new(file: Path, name: str) -> str:
    """A fresh key called `name`, appended to `file` (made if it is not there, mode 0600). The only time it is seen.

    Raises ConfigError when the name is taken or is none.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: use at most 64 letters, digits and . @ - _")
    known = read(file) if file.exists() else {}
    if name in known.values():
        raise ConfigError(f"a key named {name!r} exists already: revoke it first, or take another name")
    key = PREFIX + secrets.token_urlsafe(32)
    _write(file, {**known, digest(key): name})
    return key


def revoke(file: Path, name: str) -> None:
    """Raises ConfigError when there is no key of that name."""
    known = read(file)
    if name not in known.values():
        raise ConfigError(f"no key is named {name!r}")
    _write(file, {each: owner for each, owner in known.items() if owner != name})


def _write(file: Path, keys: Mapping[str, str]) -> None:
    """By a rename: a reader sees the old keys or the new ones, never half of them."""
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    fresh.touch(mode=0o600)
    try:
        fresh.write_text("".join(f"{each} {name}\n" for each, name in keys.items()), encoding="utf-8")
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
