"""Which cells of the table of rounds are measured, and what their rows say."""

import pytest

from benchmarks.cells import GOAL_CELLS, Cell
from benchmarks.round_rows import rows_of

SMALL = GOAL_CELLS[0]


def test_ours_are_multiples_of_a_copy_and_the_others_of_ours() -> None:
    measured = {
        "local": {"engine": [0.002], "round": [0.004]},
        "ray": {"engine": [0.2], "round": [0.3]},
        "memcpy": {"copy": [0.001]},
        "biased": {"round": [0.005]},
        "grpc": {"engine": [0.01]},
    }
    engines = [*measured, "messages"]
    rows = {r["name"]: r for r in rows_of(SMALL, engines, measured, {"messages": "too long"})}
    local = rows["4 x 0.27 M: engine, local grid"]
    assert (local["ratio"], local["against"]) == (pytest.approx(2.0), "memcpy")
    assert local["goal_met"] is True
    ray = rows["4 x 0.27 M: engine, Ray simulation"]
    assert (ray["ratio"], ray["against"]) == (pytest.approx(100.0), "local grid")
    assert (ray["goal"], ray["goal_met"]) == (">= 60 x", True)
    assert rows["4 x 0.27 M: round, Ray simulation"]["ratio"] == pytest.approx(75.0)
    assert rows["4 x 0.27 M: engine, bare gRPC with TLS"]["ratio"] == pytest.approx(5.0)
    assert rows["4 x 0.27 M: round, local grid, BiasedLocalSGD"]["ratio"] == pytest.approx(5.0)
    assert rows["4 x 0.27 M: copy, memcpy"]["ratio"] is None
    silent = [r for name, r in rows.items() if "messages" in name]
    assert [r["reason"] for r in silent] == ["too long", "too long"]
    assert len(rows) == 2 + 2 + 1 + 1 + 1 + 2


def test_without_a_local_grid_the_stream_is_compared_with_bare_grpc() -> None:
    measured = {"grpc": {"engine": [0.004]}, "stream": {"engine": [0.005], "round": [0.006]}}
    rows = rows_of(Cell(2, 270_000), ["grpc", "stream"], measured, {})
    assert rows[1]["ratio"] == pytest.approx(1.25)
    assert (rows[1]["goal"], rows[1]["goal_met"]) == ("<= 1.3 x", True)
