"""Which cells of the table of rounds are measured, and what their rows say."""

import argparse
import itertools

import pytest

from benchmarks import rounds
from benchmarks.cells import ENGINES, GOAL_CELLS, Cell, cells_of, turns
from benchmarks.noop_rounds import NotRunError, command_of
from benchmarks.round_rows import rows_of

SMALL, LARGE = GOAL_CELLS
GIB = 1 << 30


def test_bytes_of_a_cell() -> None:
    assert LARGE.model_bytes == 144_000_000
    assert LARGE.round_bytes == 1_440_000_000
    assert str(SMALL) == "4 x 0.27 M"
    assert str(LARGE) == "10 x 36 M"


def test_cells_with_goals_come_first_then_by_bytes() -> None:
    cells = cells_of(rounds.WORKERS, rounds.PARAMETERS)
    assert len(cells) == len(set(cells)) == 16
    assert tuple(cells[:2]) == (SMALL, LARGE)
    sizes = [cell.round_bytes for cell in cells[2:]]
    assert sizes == sorted(sizes)
    assert cells_of([10], [36_000_000]) == [LARGE]


def test_local_grid_runs_again_before_each_other() -> None:
    assert list(turns(["local", "ray", "memcpy"], 2)) == ["local", "ray", "local", "memcpy"] * 2
    assert list(turns(["local"], 3)) == ["local"] * 3
    assert list(turns(["ray", "grpc"], 1)) == ["ray", "grpc"]
    assert list(turns([], 1)) == []


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


def test_goal_cells_are_measured_on_a_machine_with_16_gib() -> None:
    for cell, name in itertools.product(GOAL_CELLS, ("local", "biased", "memcpy", "grpc")):
        assert ENGINES[name].why_not(cell, 16 * GIB) is None, (cell, name)
    assert ENGINES["ray"].why_not(SMALL, 16 * GIB) is None


def test_what_takes_too_long_is_not_started() -> None:
    reason = ENGINES["messages"].why_not(Cell(10, 86_000_000), 1000 * GIB)
    assert reason is not None
    assert reason.startswith("would take about ")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("quick", [True, False])
def test_rounds_stay_within_their_limits(name: str, quick: bool) -> None:
    engine = ENGINES[name]
    counts = [engine.rounds(cell, quick) for cell in (SMALL, Cell(10, 11_000_000), LARGE)]
    assert counts == sorted(counts, reverse=True)
    assert all(engine.fewest_rounds <= count <= engine.most_rounds for count in counts)


def test_commands_have_a_node_for_each_worker() -> None:
    assert command_of("local", SMALL)[-1] == "3x cpu fast; 1x cpu slow"
    ray = command_of("ray-stock", SMALL)
    assert ray[ray.index("--num-supernodes") + 1] == "4"
    assert "--stock" in ray
    assert "--stock" not in command_of("ray", SMALL)
    assert command_of("stream", LARGE).count("--node") == 10
    assert "noop_biased_app" in command_of("biased", SMALL)[-3]


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


def test_large_goal_is_a_multiple_of_a_copy() -> None:
    measured = {"local": {"engine": [1.0], "round": [2.0]}, "memcpy": {"copy": [0.2]}}
    engine, whole, _ = rows_of(LARGE, ["local", "memcpy"], measured, {})
    assert (engine["goal"], engine["goal_met"]) == ("<= 4 x", False)
    assert "goal" not in whole


def test_rows_without_the_base_have_no_ratio() -> None:
    (engine, whole) = rows_of(SMALL, ["ray"], {"ray": {"engine": [0.2], "round": [0.3]}}, {})
    assert engine["ratio"] is None
    assert engine["against"] is None
    assert engine["goal_met"] is None
    assert whole["value"] == 0.3


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


def test_missing_competitor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "one_run", lambda name, cell, quick: {"engine": [1.0]})
    monkeypatch.setattr(rounds, "missing", lambda package, extra: f"{package}: install [{extra}]")
    measured, reasons = rounds.cell_seconds(SMALL, ["local", "ray"], 1, quick=True)
    assert reasons == {"ray": "ray: install [simulation]"}
    assert measured.keys() == {"local"}


def test_nothing_begins_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "one_run", lambda *_: pytest.fail("it ran"))
    rows, taken_under = rounds.measure([SMALL], ["local", "memcpy"], 1, minutes=-1, quick=True)
    assert {r["reason"] for r in rows} == {"the -1 minutes were over"}
    assert taken_under["minutes"] == -1


# --- the command line


def test_numbers_are_whole() -> None:
    assert rounds.numbers("4,10") == [4, 10]
    assert rounds.numbers("270e3,36e6") == [270_000, 36_000_000]
    for wrong in ("1", "4.5", "-2"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole numbers"):
            rounds.numbers(wrong)
    with pytest.raises(ValueError, match="could not convert"):
        rounds.numbers("four")


def test_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rounds.options(["--engines", "local,rey"])
    assert stopped.value.code == 2
    assert "'rey': one of local, biased, ray" in capsys.readouterr().err


def test_quick_is_one_cell_unless_others_are_named() -> None:
    quick = rounds.options(["--quick"])
    assert (quick.workers, quick.parameters) == ([4], [270_000])
    assert quick.engines == ["local", "ray", "memcpy"]
    named = rounds.options(["--quick", "--workers", "10", "--engines", "local"])
    assert (named.workers, named.engines) == ([10], ["local"])
    whole = rounds.options([])
    assert whole.engines == list(ENGINES)
    assert len(cells_of(whole.workers, whole.parameters)) == 16
