"""``blsgd calibrate``, ``plan`` and ``compare``: what they tell, write and refuse."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # loaded before `subprocess.Popen` is taken away below
from flwr.serverapp.exception import AggregationError

from flower_blsgd import cli
from flower_blsgd.config import RunConfig
from flower_blsgd.experiments import calibration, train_quietly
from flower_blsgd.experiments.speed_profile import SpeedProfile
from flower_blsgd.runtime.devices import parse_workers
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import Machine, usable_cores

from ..test_cli import _leave_the_process_as_it_was  # noqa: F401
from .fake_training import FakeTrain
from .profiles import made_profile

CORE = usable_cores()[0]
TEAM = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow slowdown=4"
GIVEN = (
    f"1x cpu:{CORE} fast seconds-per-step=0.01; 1x cpu:{CORE} slow slowdown=4 seconds-per-step=0.04"
)
FAR_APART = f"cpu:{CORE} fast seconds-per-step=0.001; cpu:{CORE} slow seconds-per-step=1"
ABSENT = "8x cuda:0-7 fast seconds-per-step=0.01; 2x cpu:900-931 slow seconds-per-step=0.22"


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)


@pytest.fixture(autouse=True)
def _cpu_only_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(usable_cores(), given_accelerators=())
    for module in ("runtime.devices", "experiments.commands", "experiments.speed_profile"):
        monkeypatch.setattr(f"flower_blsgd.{module}.this_machine", lambda: machine)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(workers: str = TEAM, **changes: Any) -> RunConfig:
    return RunConfig(workers=workers, **changes)


def write_profile(path: str, config: RunConfig | None = None, **values: Any) -> SpeedProfile:
    config = config or config_of()
    profile = made_profile(config, parse_workers(config.workers), machine=None, **values)
    profile.write(Path(path))
    return profile


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[LocalGrid]:
    """Put what only notes its grid in the place of the measurement."""
    grids: list[LocalGrid] = []

    def calibrate(grid: LocalGrid, key: Any, *_: Any) -> SpeedProfile:
        grids.append(grid)
        profile = made_profile(RunConfig(), grid.workers, machine=None)
        return SpeedProfile(key, profile.workers, profile.overhead_seconds)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    return grids


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    train = FakeTrain()
    monkeypatch.setattr(train_quietly, "train_quietly", train)
    return train


Tell = Callable[..., list[str]]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Return a function that runs a command well, and hands back what it tells."""

    def run(*arguments: str) -> list[str]:
        code = cli.main(arguments)
        told = capsys.readouterr()
        assert code == 0, told.err
        assert told.err == ""
        return [line.rstrip() for line in told.out.splitlines()]

    return run


# --- mistakes: one line, code 2, nothing written, nothing started


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


Refused = Callable[..., str]


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    def run(*arguments: str) -> str:
        before = contents(folder)
        code = cli.main(arguments)
        told = capsys.readouterr()
        assert code == 2, told.err
        assert told.err.startswith("blsgd: ")
        assert told.err.endswith("\n")
        assert told.err.count("\n") == 1, told.err
        assert told.out == ""
        assert contents(folder) == before, "something was written"
        return told.err.removeprefix("blsgd: ").rstrip("\n")

    return run


@pytest.mark.parametrize("command", ["calibrate", "plan", "compare"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-s", "epocs=5"], "did you mean epochs"),
        (["-s", "epochs=0"], "epochs = 0 must be at least 1"),
        (["-c", "digit"], "did you mean digits"),
        (["-s", "algorithm=biased"], "algorithm = 'biased' is not known"),
        (["--workers", "1x cpu quick"], '"quick" at character'),
        (["--workers", ""], "names no worker"),
        (["--workers", "cpu seconds-per-step=0; cpu"], '"seconds-per-step=0"'),
        (["--nonsense"], "--nonsense"),
        (["digits"], "digits"),
    ],
)
def test_bad_setting_is_refused_by_each_command(
    refused: Refused, command: str, arguments: list[str], told: str
) -> None:
    assert told in refused(command, *arguments)


@pytest.mark.parametrize("command", ["calibrate", "compare"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-s", "task=digit"], "did you mean digits"),
        (["-s", "model=cnm"], "did you mean cnn"),
        (["-s", "batch-size=1438"], "use a smaller batch"),
        (["--workers", "1x cuda:7 fast; 1x cpu slow"], "device cuda:7 is not there"),
        (["--workers", f"2x cpu:{CORE} fast"], "no slow worker"),
        (["-s", "rebalance=true"], "rebalance = true needs steps that come from speeds"),
    ],
)
def test_what_no_run_could_begin_with_is_refused_before_it_is_measured(
    refused: Refused, command: str, arguments: list[str], told: str
) -> None:
    assert told in refused(command, "--workers", TEAM, *arguments)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("folder", "it is a folder"),
        ("file/x.json", "takes no files"),
    ],
)
def test_calibrate_refuses_a_place_that_takes_no_file_before_it_measures(
    refused: Refused, folder: Path, path: str, told: str
) -> None:
    (folder / "folder").mkdir()
    (folder / "file").write_text("x")
    for more in ([], ["--again"]):
        line = refused("calibrate", "--workers", TEAM, "-s", f"profile={path}", *more)
        assert line.startswith(f"profile = {path!r} cannot be written: ")
        assert told in line


def test_calibrate_leaves_a_file_alone_that_is_no_profile(refused: Refused, folder: Path) -> None:
    (folder / "thesis.json").write_text("{}")
    line = refused("calibrate", "--workers", TEAM, "-s", "profile=thesis.json")
    assert line == (
        "profile = 'thesis.json' is not a speed profile; --again measures anew and replaces it"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-c", "digits"], "profiles/digits.json is not there; blsgd calibrate writes it"),
        (["-s", "profile=none.json"], "none.json is not there; blsgd calibrate writes it"),
        (["-s", "profile=deep.json"], "is not a speed profile"),
        (["-s", "profile=."], "cannot be read: Is a directory"),
        (["-s", "profile=good.json", "-s", "batch-size=32"], "batch-size = 16, and here it is 32"),
        (["-s", "profile=good.json", "--workers", "2x cpu"], "and the workers are cpu:"),
        (["--workers", "8x cuda fast seconds-per-step=1; 2x cpu slow"], "the speed of cpu:"),
        (["--workers", "1x cpu fast name=seconds-per-step=1; cpu"], "the speed of cpu:"),
        (["--num-samples", "0"], "--num-samples 0 must be at least 1"),
        (["--num-samples", "many"], "invalid int value: 'many'"),
        (["--algorithms", "biased"], "--algorithms biased: not known"),
        (["--algorithms", ""], "--algorithms names nothing"),
    ],
)
def test_plan_refuses(refused: Refused, folder: Path, arguments: list[str], told: str) -> None:
    (folder / "deep.json").write_text("[" * 100_000)
    write_profile("good.json")
    assert told in refused("plan", "--workers", TEAM, *arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--algorithms", "biased"], "--algorithms biased: not known"),
        (["--algorithms", "dlb,dlb"], "dlb comes twice"),
        (["--seeds", "0,00"], "0 comes twice"),
        (["--seeds", "one"], "'one' is not a whole number"),
        (["--seeds", ""], "--seeds names nothing"),
        (["--budget", "ten"], "write it like 10epochs, 60s or 5min"),
        (["--budget", ""], "write it like 10epochs, 60s or 5min"),
        (["--target", "0"], "--target 0.0 must be an accuracy"),
        (["--target", "98"], "--target 98.0 must be an accuracy"),
        (["--target", "nan"], "--target nan must be an accuracy"),
        (["--target", "high"], "invalid float value: 'high'"),
        (["--out", "file"], "file exists and holds no comparison"),
        (["--out", "other"], "other exists and holds no comparison"),
        (["--out", "file/below"], "cannot be made: "),
        (["-s", "steps=by-speed"], "steps = 'by-speed' overrides that of every algorithm; leave"),
        (["-s", "train-on=fast"], "train-on = 'fast' overrides"),
        (["-s", "profile=none.json"], "profile = 'none.json' cannot be read"),
        (["-s", "profile=deep.json"], "is not a speed profile"),
        (["-s", "profile=good.json", "-s", "threads=3"], "threads = 0, and here it is 3"),
        (["-s", "weights=normalized"], "weights = 'normalized' overrides"),
        (
            ["-s", "batch-size=4", "--algorithms", "sync-sgd,dlb", "--workers", FAR_APART],
            "dlb cannot run with these settings: batch-size = 4 is too small",
        ),
    ],
)
def test_compare_refuses(refused: Refused, folder: Path, arguments: list[str], told: str) -> None:
    (folder / "file").write_text("x")
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").write_text("x")
    (folder / "deep.json").write_text("[" * 100_000)
    write_profile("good.json")
    assert told in refused("compare", "--workers", TEAM, *arguments)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("none.json", "profile = 'none.json' cannot be read: No such file"),
        ("deep.json", "profile = 'deep.json' is not a speed profile"),
        ("other.json", "was measured with batch-size = 64, and here it is 16"),
    ],
)
def test_run_refuses_a_profile_that_does_not_hold(
    refused: Refused, folder: Path, path: str, told: str
) -> None:
    (folder / "deep.json").write_text("[" * 100_000)
    write_profile("other.json", config_of(batch_size=64))
    assert told in refused("run", "--workers", TEAM, "-s", f"profile={path}")


# --- run


def test_run_gives_the_workers_the_speeds_of_a_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile("mine.json", alone=(0.01, 0.04), loaded=(0.02, 0.05))
    grids: list[LocalGrid] = []
    monkeypatch.setattr(cli, "load_server_app", lambda *_: lambda grid, _: grids.append(grid))
    for clock in ("wall", "device"):
        settings = ["-s", "profile=mine.json", "-s", f"clock={clock}"]
        assert cli.main(["run", "--workers", TEAM, *settings]) == 0
    found = [[worker.seconds_per_step for worker in grid.workers] for grid in grids]
    assert found == [[0.02, 0.05], [0.01, 0.04]]


# --- calibrate


def test_calibrate_measures_once_and_writes_where_plan_looks(
    folder: Path, measured: list[LocalGrid], tell: Tell
) -> None:
    lines = tell("calibrate", "-c", "digits", "--workers", TEAM)
    assert [str(path) for path in sorted(Path().rglob("*"))] == [
        "profiles",
        "profiles/digits.json",
    ]
    assert lines[-1] == (
        "in profiles/digits.json: blsgd plan finds it, blsgd run takes it with -s "
        "profile=profiles/digits.json"  # in one line, to be copied
    )
    again = tell("calibrate", "-c", "digits", "--workers", TEAM)
    assert again[0] == "measured before, in profiles/digits.json; --again measures anew"
    assert len(measured) == 1
    tell("calibrate", "-c", "digits", "--workers", TEAM, "--again")
    assert len(measured) == 2
    planned = tell("plan", "-c", "digits", "--workers", TEAM)
    assert planned[0].startswith("expected, from profiles/digits.json; clock = wall, 1,437")


def test_calibrate_measures_anew_for_other_settings(
    folder: Path, measured: list[LocalGrid], tell: Tell
) -> None:
    tell("calibrate", "--workers", TEAM)
    lines = tell("calibrate", "--workers", TEAM, "-s", "batch-size=32")
    assert "does not hold here: it was measured with batch-size = 16" in "\n".join(lines)
    assert "measuring anew" in "\n".join(lines)
    assert len(measured) == 2
    assert SpeedProfile.read(Path("profiles/digits.json")).key.batch_size == 32


def test_calibrate_writes_where_profile_says_and_again_replaces_what_is_none(
    folder: Path, measured: list[LocalGrid], tell: Tell
) -> None:
    tell("calibrate", "--workers", TEAM, "-s", "profile=deep/mine.json")
    assert list(contents(folder)) == ["deep", "deep/mine.json"]
    Path("deep/mine.json").write_text("{}")
    tell("calibrate", "--workers", TEAM, "-s", "profile=deep/mine.json", "--again")
    SpeedProfile.read(Path("deep/mine.json"))


def test_calibrate_measures_also_a_worker_whose_speed_is_given_and_the_table_takes_what_is_given(
    folder: Path, measured: list[LocalGrid], tell: Tell
) -> None:
    lines = tell("calibrate", "--workers", TEAM + " seconds-per-step=0.5")
    # A node answers with the speed that it was given instead of measuring.
    assert [worker.seconds_per_step for worker in measured[0].workers] == [None, None]
    assert [worker.slowdown for worker in measured[0].workers] == [1.0, 4.0]
    (slow,) = [line for line in lines if line.lstrip().startswith("slow-1")]
    assert "40 (20 to 80)" in slow  # as measured
    assert "0.04" in slow.split()  # gamma: 20 ms over 500


def test_calibrate_that_is_interrupted_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> SpeedProfile:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate", interrupted)
    assert cli.main(["calibrate", "--workers", TEAM]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    assert contents(folder) == {}


# --- plan


def test_plan_of_hardware_that_is_not_there(folder: Path, tell: Tell) -> None:
    lines = tell(
        *("plan", "--workers", ABSENT, "-s", "batch-size=32", "-s", "local-steps-slow=auto"),
        *("--num-samples", "50000", "--algorithms", "biased-local-sgd,fast-only-local-sgd"),
    )
    assert lines[0] == (
        "expected, from the seconds per step that were given; clock = wall, 50,000 samples an epoch"
    )
    row = next(line for line in lines if "biased-local-sgd" in line)
    assert re.sub(r"\s+", " ", row).strip() == (
        "biased-local-sgd 8x 32, 2x 1 0.8% 6.1 0.32 1.94 0% 31% 25,800"
    )
    assert any("so the slow devices hardly help" in line for line in lines)
    assert contents(folder) == {}


def test_plan_takes_the_size_of_the_data_where_none_is_said(tell: Tell) -> None:
    assert "1,437 samples an epoch" in tell("plan", "--workers", GIVEN)[0]


def test_plan_with_one_speed_given_takes_the_others_from_the_profile(
    folder: Path, tell: Tell
) -> None:
    write_profile("mine.json", loaded=(0.02, 0.05), overhead=0.36)
    workers = TEAM + " seconds-per-step=0.08"
    arguments = ["-s", "profile=mine.json", "--algorithms", "biased-local-sgd"]
    lines = tell("plan", "--workers", workers, *arguments)
    row = next(line for line in lines if "biased-local-sgd" in line).split()
    # 32 x 20 ms and 8 x 80 ms are 0.64 s each; with the overhead of a round 1 s.
    assert row[4:] == ["2.2", "1", "2.25", "0%", "0%", "640"]


def test_plan_says_that_a_part_overrides_all(tell: Tell) -> None:
    lines = tell("plan", "--workers", GIVEN, "-s", "steps=same")
    assert lines[-1] == "note: steps = 'same' overrides that of every algorithm"
    assert not tell("plan", "--workers", GIVEN)[-1].startswith("note")


def test_plan_says_that_shared_processes_are_not_modelled(tell: Tell) -> None:
    lines = tell("plan", "--workers", GIVEN, "-s", "processes-per-device=1")
    assert lines[-1].startswith("workers that take turns in one process are not modelled")


# --- compare

TWO = ("compare", "-c", "digits", "--workers", TEAM, "--algorithms", "sync-sgd,dlb")


def test_compare_measures_trains_and_writes(
    folder: Path, measured: list[LocalGrid], trained: FakeTrain, tell: Tell
) -> None:
    lines = tell(*TWO, "--seeds", "0,1", "--budget", "3epochs")
    assert len(measured) == 1
    assert trained.trained == [("sync-sgd", 0), ("dlb", 0), ("sync-sgd", 1), ("dlb", 1)]
    below = Path("runs/compare-digits")
    assert {path.name for path in below.iterdir()} - {".lock"} == {
        *("comparison.toml", "profile.json", "comparison.md", "comparison.csv", "comparison.png"),
        *("sync-sgd-seed0", "sync-sgd-seed1", "dlb-seed0", "dlb-seed1"),
    }
    assert {config.profile for config in trained.configs} == {str(below / "profile.json")}
    assert {(config.epochs, config.name) for config in trained.configs} == {(3, "digits")}
    assert lines[-1] == f"in {below}: comparison.md, comparison.csv, comparison.png"


def test_compare_again_trains_and_measures_nothing(
    folder: Path, measured: list[LocalGrid], trained: FakeTrain, tell: Tell
) -> None:
    tell(*TWO, "--seeds", "0")
    before = contents(folder)
    lines = tell(*TWO, "--seeds", "0")
    assert (len(measured), len(trained.trained)) == (1, 2)
    after = contents(folder)
    picture = "runs/compare-digits/comparison.png"
    assert {**before, picture: b""} == {**after, picture: b""}
    assert sum("finished before" in line for line in lines) == 2
    tell(
        "compare", "-c", "digits", "--workers", TEAM, "--algorithms", "dlb,fednova", "--seeds", "1"
    )
    assert trained.trained[2:] == [("dlb", 1), ("fednova", 1)]
    assert len(measured) == 1


def test_compare_with_other_settings_is_refused_and_nothing_touched(
    folder: Path, measured: list[LocalGrid], trained: FakeTrain, tell: Tell, refused: Refused
) -> None:
    tell(*TWO, "--seeds", "0")
    line = refused(*TWO, "--seeds", "0", "-s", "epochs=3")
    assert "holds a comparison with epochs = 15, not 3" in line
    line = refused(*TWO, "--seeds", "0", "--budget", "9s")
    assert "holds a comparison with epochs = 15, not 100000" in line
    assert (len(measured), len(trained.trained)) == (1, 2)


def test_compare_takes_a_profile_that_is_given_and_keeps_it(
    folder: Path, trained: FakeTrain, tell: Tell
) -> None:
    write_profile("mine.json")
    given = Path("mine.json").read_bytes()
    tell(*TWO, "--seeds", "0", "-s", "profile=mine.json")
    own = Path("runs/compare-digits/profile.json")
    assert own.read_bytes() == given
    write_profile("mine.json", alone=(1.0, 1.0))  # calibrated anew in between
    lines = tell(*TWO, "--seeds", "0,1", "-s", "profile=mine.json")
    assert lines[0] == f"with the speeds that it began with, in {own}, not those in mine.json"
    assert own.read_bytes() == given


def test_compare_with_all_speeds_given_measures_nothing(
    folder: Path, trained: FakeTrain, tell: Tell
) -> None:
    tell("compare", "--workers", GIVEN, "--algorithms", "sync-sgd", "--seeds", "0")
    assert [config.profile for config in trained.configs] == [""]
    assert not Path("runs/compare-digits/profile.json").exists()


def test_compare_needs_no_worker_that_only_another_algorithm_needs(
    folder: Path, measured: list[LocalGrid], trained: FakeTrain, tell: Tell
) -> None:
    arguments = ("--workers", f"2x cpu:{CORE} fast", "--seeds", "0")
    tell("compare", *arguments, "--algorithms", "sync-sgd,fast-only-local-sgd")
    assert len(trained.trained) == 2


def test_compare_interrupted_keeps_what_is_finished_and_goes_on(
    folder: Path,
    measured: list[LocalGrid],
    trained: FakeTrain,
    tell: Tell,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained.fates[("dlb", 0)] = KeyboardInterrupt()
    assert cli.main([*TWO, "--seeds", "0"]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    tell(*TWO, "--seeds", "0")
    assert trained.trained == [("sync-sgd", 0), ("dlb", 0), ("dlb", 0)]
    assert len(measured) == 1


def test_compare_tells_a_failed_run_and_leaves_it_out(
    folder: Path, measured: list[LocalGrid], trained: FakeTrain, tell: Tell
) -> None:
    trained.fates[("sync-sgd", 0)] = AggregationError("round 3: no worker succeeded")
    lines = tell(*TWO, "--seeds", "0")
    assert any(line.startswith("sync-sgd, seed 0 failed: ") for line in lines)
    table = Path("runs/compare-digits/comparison.csv").read_text()
    assert "dlb" in table
    assert "sync-sgd" not in table


def test_compare_without_a_finished_run_compares_nothing(
    folder: Path,
    measured: list[LocalGrid],
    trained: FakeTrain,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for algorithm in ("sync-sgd", "dlb"):
        trained.fates[(algorithm, 0)] = AggregationError("no worker succeeded")
    assert cli.main([*TWO, "--seeds", "0"]) == 1
    assert capsys.readouterr().err == "blsgd: no run finished, so there is nothing to compare\n"
    assert not Path("runs/compare-digits/comparison.md").exists()


def test_long_paths_are_told_in_one_line(
    folder: Path, measured: list[LocalGrid], trained: FakeTrain, tell: Tell
) -> None:
    out = f"{'very-' * 30}long"
    lines = tell(*TWO, "--seeds", "0", "--out", out)
    assert lines[-1] == f"in {out}: comparison.md, comparison.csv, comparison.png"


def test_tables_in_a_pipe_have_their_own_width(monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    assert all(len(line) <= 100 for line in tell("plan", "--workers", GIVEN))


@pytest.mark.parametrize("command", ["calibrate", "plan", "compare"])
def test_help_names_what_is_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert "--workers" in capsys.readouterr().out


def test_profile_of_a_task_of_ones_own_has_a_name_for_files(
    folder: Path, measured: list[LocalGrid], tell: Tell
) -> None:
    (folder / "mine.py").write_text(
        "import torch\nfrom flower_blsgd import Task\n\n\ndef task():\n"
        "    data = torch.zeros(99, 3), torch.arange(99) % 2\n"
        "    return Task(lambda: torch.nn.Linear(3, 2), data, data)\n"
    )
    tell("calibrate", "--workers", TEAM, "-s", "task=mine:task", "-s", "batch-size=2")
    assert Path("profiles/task.json").is_file()
