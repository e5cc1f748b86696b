"""``blsgd calibrate``, ``plan`` and ``compare``: what they print, write and refuse."""

import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.exception import AggregationError

from flower_blsgd.cli import main as cli
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.experiments import calibration, compare
from flower_blsgd.experiments.calibration import Speeds, Spread
from flower_blsgd.strategy.budget import NO_LIMIT

from ..experiments.fake_training import FakeTrain, write_run
from .conftest import Printed, Refused, contents

CORE = usable_cores()[0]
BOTH = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow slowdown=4"
GIVEN = (
    f"1x cpu:{CORE} fast seconds-per-step=0.01; 1x cpu:{CORE} slow slowdown=4 seconds-per-step=0.04"
)
ALONE, LOADED = (0.01, 0.04), (0.02, 0.05)
CALIBRATED = (
    f"cpu:{CORE} fast seconds-per-step=0.02 seconds-per-step-alone=0.01; "
    f"cpu:{CORE} slow slowdown=4 seconds-per-step=0.05 seconds-per-step-alone=0.04"
)
ONE_TIER = f"2x cpu:{CORE} fast seconds-per-step=0.001"
ABSENT = "8x cuda:0-7 fast seconds-per-step=0.01; 2x cpu:900-931 slow seconds-per-step=0.22"
COMPARE = ("compare", "-c", "digits", "--workers", BOTH, "--algorithms", "sync-sgd,dlb")
BELOW = Path("runs/compare-digits")

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[LocalGrid]:
    """Replace the measurement by one that only keeps its grid."""
    grids: list[LocalGrid] = []

    def measure(grid: LocalGrid, *_: Any) -> Speeds:
        grids.append(grid)
        alone, loaded = ([Spread(s, s / 2, 2 * s) for s in pair] for pair in (ALONE, LOADED))
        return Speeds(alone, loaded, Spread(0.36, 0.3, 0.4))

    monkeypatch.setattr(calibration, "measure", measure)
    return grids


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    """Replace training, and the picture of a comparison, which is tested where it is drawn."""
    train = FakeTrain()
    monkeypatch.setattr(compare, "train_quietly", train)
    monkeypatch.setattr(
        "flower_blsgd.experiments.comparison_plot.draw_comparison", lambda _, path: path.touch()
    )
    return train


# --- mistakes: one line, code 2, nothing written, nothing started


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        (
            "calibrate",
            ["-s", "rebalance=true", "-s", "local-steps-slow=8"],
            "rebalance = true needs steps that follow from",
        ),
        (
            "plan",
            ["--workers", "8x cuda fast seconds-per-step=1; cpu slow"],
            "to plan for other devices, give every worker seconds-per-step=",
        ),
        ("plan", ["--num-samples", "0"], "num_samples = 0 must be at least 1"),
        ("plan", ["--algorithms", "biased"], "algorithms: 'biased' is unknown; known: "),
        ("compare", ["--seeds", "0,00"], "seeds = [0, 0]: name at least one, and each only once"),
        ("compare", ["--budget", "ten"], "write it like 10epochs, 60s or 5min"),
        ("compare", ["--target", "0"], "target = 0.0 must be an accuracy"),
        ("compare", ["--out", "other"], "other exists and holds no comparison"),
        ("compare", ["-s", "steps=same"], "steps = 'same' overrides that of every"),
        ("compare", ["--vary", "learning-rate"], "--vary learning-rate: write KEY=A,B, such as"),
        ("compare", ["--vary", "momentum=0.5,x"], "momentum = 'x' must be a number"),
        ("compare", ["--vary", "seed=1,2"], "--vary seed: this setting cannot vary"),
        ("compare", ["--vary", "momentum=0.5,0.50"], "--vary momentum: name each value only once"),
        (
            "compare",
            ["--algorithms", "sync-sgd,biased-local-sgd", "--workers", ONE_TIER],
            "biased-local-sgd cannot run with these settings: ",
        ),
        ("run", ["-s", "profile=x.json"], "profile = 'x.json': unknown key"),  # of 0.1.0
    ],
)
def test_argument_or_file_is_refused(
    refused: Refused, command: str, arguments: list[str], expected: str
) -> None:
    Path("other").mkdir()
    Path("other/thesis.tex").write_text("x")
    assert expected in refused(command, "--workers", BOTH, *arguments)


# --- run


def test_run_with_tensorboard_needs_its_package(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    line = refused("run", "--workers", BOTH, "-s", "tensorboard=true")
    assert line.endswith(" -e '.[tensorboard]'")


# --- report


def test_report_writes_a_page_and_says_what_is_on_it(printed: Printed, refused: Refused) -> None:
    assert refused("report", "runs").startswith("runs holds none of reproduction.csv, comparison")
    config = RunConfig(algorithm="dlb", out="runs/compared/dlb-seed0")
    compare.open_folder(Path("runs/compared"), config)
    write_run(config)
    for more, out in (((), "runs/compared/report.html"), (("--out", "x.html"), "x.html")):
        lines = printed("report", "runs/compared", *more)
        assert lines == ["dlb: test accuracy 87.50 %", f"in {out}: open it in a browser"]
        assert "<h1>dlb: test accuracy 87.50 %</h1>" in Path(out).read_text()
    line = refused("report", "runs/compared", "--out", ".")
    assert line == "--out . is a folder; name a file, such as page.html"


# --- calibrate


def test_calibrate_measures_all_workers_and_prints_them_for_a_config(
    folder: Path, measured: list[LocalGrid], printed: Printed
) -> None:
    lines = printed("calibrate", "-c", "digits", "--workers", BOTH + " seconds-per-step=0.5")
    # A node answers with the speed that it was given instead of measuring.
    assert [worker.seconds_per_step for worker in measured[0].workers] == [0.0, 0.0]
    assert [worker.slowdown for worker in measured[0].workers] == [1.0, 4.0]
    assert any("slow-1" in line and "40 (20 to 80)" in line for line in lines)
    assert lines[-1] == f'workers = "{CALIBRATED}"'  # in one line, to be copied
    assert contents(folder) == {}
    Path("mine.toml").write_text(lines[-1])
    again = printed("calibrate", "-c", "mine.toml", "-s", "clock=device")
    assert again[-1].count("seconds-per-step=0.01 ") == 1
    assert len(measured) == 2


# --- plan


def test_plan_of_hardware_that_is_not_there(folder: Path, printed: Printed) -> None:
    lines = printed(
        *("plan", "--workers", ABSENT, "-s", "batch-size=32", "-s", "local-steps-slow=auto"),
        *("--num-samples", "50000", "--algorithms", "biased-local-sgd,fast-only-local-sgd"),
    )
    assert lines[0] == (
        "expected, from the given seconds per step; clock = wall, 50,000 samples per epoch"
    )
    assert any("best left out (expected speed-up: training 1.00)" in line for line in lines)
    assert contents(folder) == {}


def test_plan_measures_speeds_that_are_not_given(
    folder: Path, measured: list[LocalGrid], printed: Printed
) -> None:
    """With a given speed of the slow one, 32 x 20 ms and 8 x 80 ms are 0.64 s each.

    With the overhead of a round, it is 1 s.
    """
    workers = BOTH + " seconds-per-step=0.08"
    settings = ("-s", "local-steps-fast=32", "-s", "local-steps-slow=8")
    lines = printed("plan", "--workers", workers, "--algorithms", "biased-local-sgd", *settings)
    assert any(line.startswith("expected, from the measured seconds per step; ") for line in lines)
    row = next(line for line in lines if "biased-local-sgd" in line).split()
    assert row[4:] == ["2.2", "1", "2.25", "0%", "0%", "640"]
    assert len(measured) == 1
    assert contents(folder) == {}
    printed("plan", "--workers", CALIBRATED)
    assert len(measured) == 1


def test_plan_prints_overrides_and_a_table_of_its_own_width(
    monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    lines = printed("plan", "--workers", GIVEN)
    assert "1,437 samples per epoch" in lines[0]
    assert not lines[-1].startswith("note")
    assert all(len(line) <= 100 for line in lines)
    lines = printed("plan", "--workers", GIVEN, "-s", "steps=same")
    assert lines[-1] == "note: steps = 'same' overrides that of every algorithm"


# --- compare


def test_compare_varies_a_setting_of_one_algorithm_or_of_several(
    printed: Printed, trained: FakeTrain, measured: list[LocalGrid]
) -> None:
    vary = ("compare", "-c", "digits", "--workers", BOTH, "--seeds", "0")
    text = printed(*vary, "--vary", "sampler=uniform,tests.algorithm.test_catalog:FirstSamples")
    chosen = ["uniform", "tests.algorithm.test_catalog:FirstSamples"]
    assert [config.sampler for config in trained.configs] == chosen
    assert {config.algorithm for config in trained.configs} == {"recommended"}
    folder = Path("runs/compare-digits-sampler")
    names = ["uniform", "tests.algorithm.test_catalog-FirstSamples"]
    for name in names:
        assert (folder / f"recommended-sampler-{name}-seed0").is_dir()
        assert name in (folder / "comparison.csv").read_text()
    assert any(str(folder) in line for line in text)
    both = ("--algorithms", "sync-sgd,dlb", "--vary", "learning-rate=0.05,0.1")
    printed(*vary, *both, "--out", "both")
    assert [(config.algorithm, config.learning_rate) for config in trained.configs[2:]] == [
        *(("sync-sgd", 0.05), ("sync-sgd", 0.1), ("dlb", 0.05), ("dlb", 0.1)),
    ]


def test_compare_measures_trains_and_writes_and_goes_on(
    measured: list[LocalGrid], trained: FakeTrain, printed: Printed, refused: Refused
) -> None:
    out = f"{'very-' * 30}long"
    lines = printed(*COMPARE, "--seeds", "0,1", "--budget", "3epochs", "--out", out)
    assert len(measured) == 1
    assert trained.trained == [("sync-sgd", 0), ("dlb", 0), ("sync-sgd", 1), ("dlb", 1)]
    assert {path.name for path in Path(out).iterdir() if path.suffix != ".lock"} == {
        *("comparison.toml", "workers.toml", "comparison.md", "comparison.csv", "comparison.png"),
        *("sync-sgd-seed0", "sync-sgd-seed1", "dlb-seed0", "dlb-seed1"),
    }
    assert {config.workers for config in trained.configs} == {CALIBRATED}
    assert {(config.epochs, config.name) for config in trained.configs} == {(3, "digits")}
    # A long path, too, is printed in one line.
    assert lines[-1] == f"in {out}: comparison.md, comparison.csv, comparison.png"
    for budget, epochs in (("4epochs", 4), ("9s", NO_LIMIT)):
        line = refused(*COMPARE, "--budget", budget, "--out", out)
        assert f"holds a comparison with epochs = 3, not {epochs}" in line
    again = ("--algorithms", "dlb,fednova", "--seeds", "1", "--budget", "3epochs", "--out", out)
    printed(*COMPARE, *again)
    assert (trained.trained[4:], len(measured)) == ([("fednova", 1)], 1)


def test_compare_refuses_speeds_in_its_folder_that_are_not_of_its_workers(
    measured: list[LocalGrid], trained: FakeTrain, printed: Printed, refused: Refused
) -> None:
    printed(*COMPARE, "--seeds", "0")
    own = BELOW / "workers.toml"
    for text, words in (
        (f'workers = "{ONE_TIER}"', "workers.toml are of other workers; choose another folder"),
        ("[", "workers.toml cannot be read: "),
    ):
        own.write_text(text)
        assert words in refused(*COMPARE, "--seeds", "0")
    assert (len(measured), len(trained.trained)) == (1, 2)


def test_compare_needs_no_more_than_its_algorithms_do(
    measured: list[LocalGrid], trained: FakeTrain, printed: Printed
) -> None:
    """No measurement where all speeds are given, no slow worker where none is used."""
    printed("compare", "--workers", GIVEN, "--algorithms", "sync-sgd", "--seeds", "0")
    assert [config.workers for config in trained.configs] == [GIVEN]
    assert measured == []
    assert not list(Path("runs").glob("*/workers.toml"))
    one_tier = ("--workers", f"2x cpu:{CORE} fast", "--out", "fast")
    printed("compare", *one_tier, "--algorithms", "sync-sgd,fast-only-local-sgd", "--seeds", "0")
    assert len(trained.trained) == 3


def test_compare_fails_and_leaves_failed_runs_out(
    measured: list[LocalGrid],
    trained: FakeTrain,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained.fates[("sync-sgd", 0)] = AggregationError("round 3: no worker succeeded")
    assert cli.main([*COMPARE, "--seeds", "0"]) == 1
    assert capsys.readouterr().err == (
        "blsgd: 1 failure: sync-sgd, seed 0 failed: round 3: no worker succeeded\n"
    )
    for algorithm in ("sync-sgd", "dlb"):
        trained.fates[(algorithm, 0)] = AggregationError("no worker succeeded")
    assert cli.main([*COMPARE, "--seeds", "0", "--out", "none"]) == 1
    assert capsys.readouterr().err == "blsgd: no run finished, so there is nothing to compare\n"
    assert not Path("none/comparison.md").exists()
