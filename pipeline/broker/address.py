"""Address: where the pages of a handoff cross, in words that may stand in a record, a log and a dashboard.

The rule here: an address never holds a secret. Who follows one brings user and password from settings of its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from pipeline.errors import ConfigError


class Address(NamedTuple):
    """A page server beside a decode replica, and the bytes that all writers together may have in flight there."""

    url: str
    budget_bytes: int

    def __str__(self) -> str:
        return f"{self.url} {self.budget_bytes}"

    @classmethod
    def public(cls, url: str, budget_bytes: int) -> Address:
        """Of an operator's setting. Raises ConfigError."""
        return cls(require_public(url), budget_bytes)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of `str(address)`. Raises ValueError."""
        url, _, budget = text.partition(" ")
        return cls(url, int(budget))


def require_public(url: str) -> str:
    """`url`, if it may be advertised: a host to reach and nothing else. Raises ConfigError."""
    if not _names_a_host(url):
        raise ConfigError(f"pages_url {redact(url)!r} is not a redis:// or rediss:// URL that other hosts can reach")
    if any(mark in url for mark in "@?# "):
        raise ConfigError(
            f"pages_url {redact(url)!r} is shown to everybody: leave out what stands before an @ and behind a ?; user "
            f"and password go into broker.pages_user and broker.pages_password, certificates into broker.url"
        )
    return url


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port
        return False


def redact(url: str) -> str:
    """`url` without its password, for messages and logs."""
    return re.sub(r"(://[^:@/]*):[^@]*@", r"\1:***@", url)
