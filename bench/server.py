"""Server: the broker of a bench, on the loopback or where the far end of a link reaches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.link import Link
from pipeline.broker.connect import connect
from pipeline.broker.embedded import EmbeddedServer


@contextmanager
def server(directory: Path, budget_bytes: int, link: Link | None = None) -> Iterator[str]:
    """Its URL, the same for both ends of `link`. It then has no password: the link's network is ours alone."""
    with EmbeddedServer(directory, budget_bytes) as url:
        if not link:
            yield url
            return
        with connect(url) as client:
            client.config_set("protected-mode", "no")
            client.config_set("bind", f"127.0.0.1 {link.near}")
        yield url.replace("127.0.0.1", link.near)
