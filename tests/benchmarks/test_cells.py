"""Which cells of the table of rounds are measured, and what their rows say."""

import pytest

from benchmarks import rounds
from benchmarks.cells import ENGINES, GOAL_CELLS, Cell
from benchmarks.noop_rounds import NotRunError
from benchmarks.round_rows import rows_of

SMALL, LARGE = GOAL_CELLS
GIB = 1 << 30


def test_more_than_ten_supernodes_are_not_started() -> None:
    for name, engine in ENGINES.items():
        reason = engine.why_not(Cell(11, 1000), 1000 * GIB)
        assert (reason is not None and "11 SuperNodes" in reason) == (
            name in ("stream", "messages")
        ), name
        assert engine.why_not(Cell(10, 1000), 1000 * GIB) is None


def test_what_does_not_fit_the_memory_is_not_started() -> None:
    huge = Cell(32, 86_000_000)  # 32 models of 344 MB are 11 GB
    for name in ("local", "ray", "grpc"):
        reason = ENGINES[name].why_not(huge, 8 * GIB)
        assert reason is not None
        assert "8.6 GB" in reason
        assert ENGINES[name].memory_bytes(huge) > 32 * 344e6
    assert ENGINES["memcpy"].why_not(huge, 8 * GIB) is None
    assert ENGINES["local"].why_not(SMALL, None) is None


# --- rows


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


# --- a cell, with runs that are made up


def test_engine_that_fails_loses_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def made_up(name: str, cell: Cell, quick: bool) -> dict[str, list[float]]:
        ran.append(name)
        if name == "ray" and ran.count("ray") == 2:
            raise NotRunError("took longer than 240 s")
        return {"copy": [1.0]} if name == "memcpy" else {"engine": [1.0], "round": [2.0]}

    monkeypatch.setattr(rounds, "one_run", made_up)
    monkeypatch.setattr(rounds, "missing", lambda package, extra: None)
    measured, reasons = rounds.cell_seconds(SMALL, ["local", "ray", "memcpy"], 3, quick=True)
    assert reasons == {"ray": "took longer than 240 s"}
    assert measured.keys() == {"local", "memcpy"}
    assert len(measured["local"]["engine"]) == 6
    assert ran.count("ray") == 2
