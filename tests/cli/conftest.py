"""A rig on one kind of server: `tests/broker` runs the same calls on both."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

from tests.cli.rig import Rig


@pytest.fixture
def rig(
    redis_client: Redis,
    server_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Rig:
    """In an empty directory, on a terminal wide enough for every column."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    return Rig(redis_client, server_url, capsys)
