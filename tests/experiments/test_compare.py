"""Training one run after another: their order, what is repeated, what is refused."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from flwr.serverapp.exception import AggregationError

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.cli.experiments import read_algorithms, read_seeds, with_budget
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments import compare
from flower_blsgd.experiments.compare import (
    SETTINGS,
    arms_of,
    check_folder,
    open_folder,
    overridden,
    train_all,
)
from flower_blsgd.experiments.comparison import Run
from flower_blsgd.strategy.budget import NO_LIMIT

from ..cli.conftest import contents
from ..refusal import refusal
from .fake_training import FakeTrain, write_run

A, B, C = "sync-sgd", "dlb", "fednova"
CONFIG = RunConfig(epochs=2, batch_size=8)

Go = Callable[..., tuple[list[Run], list[str]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "compare-mine"
    open_folder(path, CONFIG)
    return path


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def go(folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Go:
    def train(
        train: FakeTrain,
        algorithms: Sequence[str] = (A, B),
        seeds: Sequence[int] = (0, 1),
        log: Callable[[str], object] = lines.append,
        arms: Mapping[str, Any] | None = None,
    ) -> tuple[list[Run], list[str]]:
        arms = arms or {name: {"algorithm": name} for name in algorithms}
        monkeypatch.setattr(compare, "train_quietly", train)
        return train_all(CONFIG, arms, seeds, folder, log)

    return train


def named(runs: list[Run]) -> list[tuple[str, int]]:
    return [(run["algorithm"], run["seed"]) for run in runs]


# --- the order, and what every run is given


def test_all_algorithms_are_trained_with_a_seed_before_the_next_seed(
    go: Go, folder: Path, lines: list[str]
) -> None:
    train = FakeTrain()
    runs, failures = go(train, (A, B, C), (0, 7))
    assert train.trained == [(A, 0), (B, 0), (C, 0), (A, 7), (B, 7), (C, 7)]
    assert failures == []
    assert named(runs) == train.trained
    assert lines[:2] == [
        f"[1/6] {A}, seed 0: training",
        f"[1/6] {A}, seed 0: done, accuracy 90.00% after 2.0 s of training",
    ]
    assert len(lines) == 12
    shared = CONFIG.to_run_config().items()
    for config, (algorithm, seed) in zip(train.configs, train.trained, strict=True):
        values = config.to_run_config()
        assert values.pop("out") == str(folder / f"{algorithm}-seed{seed}")
        assert (values.pop("algorithm"), values.pop("seed")) == (algorithm, seed)
        assert values.items() <= shared


# --- going on


def test_finished_runs_are_not_repeated_and_not_touched(
    go: Go, folder: Path, lines: list[str]
) -> None:
    go(FakeTrain())
    before = contents(folder)
    lines.clear()
    again = FakeTrain()
    runs, failures = go(again)
    assert again.trained == []
    assert (len(runs), failures) == (4, [])
    assert contents(folder) == before
    assert lines[0] == (
        f"[1/4] {A}, seed 0: finished before, accuracy 90.00% after 2.0 s of training"
    )
    assert len(lines) == 4
    more = FakeTrain()  # further algorithms and seeds come into the same folder
    runs, _ = go(more, (C, A), (0, 5))
    assert more.trained == [(C, 0), (C, 5), (A, 5)]
    assert len(runs) == 4


def test_ctrl_c_leaves_the_finished_ones_and_the_interrupted_one_is_repeated(
    go: Go, folder: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(FakeTrain({(B, 0): KeyboardInterrupt()}))
    before = contents(folder / f"{A}-seed0")
    (folder / f"{B}-seed0" / "rounds.jsonl").write_text("of the interrupted one")
    (folder / f"{B}-seed1").mkdir()  # of one that was killed
    (folder / f"{B}-seed1" / "summary.json").write_text('{"interrupted": fal')
    again = FakeTrain()
    runs, _ = go(again)
    assert again.trained == [(B, 0), (A, 1), (B, 1)]
    assert named(runs) == [(A, 0), (B, 0), (A, 1), (B, 1)]
    assert contents(folder / f"{A}-seed0") == before
    assert not (folder / f"{B}-seed0" / "rounds.jsonl").exists()


# --- what fails


def test_failed_run_is_left_out_and_the_others_go_on(go: Go, lines: list[str]) -> None:
    train = FakeTrain({(A, 0): AggregationError("round 3: no worker succeeded")})
    runs, failures = go(train)
    assert train.trained == [(A, 0), (B, 0), (A, 1), (B, 1)]
    assert named(runs) == [(B, 0), (A, 1), (B, 1)]
    (failure,) = failures
    assert failure.startswith(f"{A}, seed 0 failed: ")
    assert "round 3: no worker succeeded" in failure
    assert lines[1].startswith(f"[1/4] {A}, seed 0: failed: ")
    again = FakeTrain()  # by the next command
    assert go(again)[1] == []
    assert again.trained == [(A, 0)]


def test_run_whose_results_are_not_on_disk_is_left_out(
    go: Go, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = FakeTrain()
    monkeypatch.setattr(compare, "read_run", lambda out: None)
    runs, failures = go(train, (A,), (0, 1))
    assert (runs, len(failures)) == ([], 2)
    assert failures[0].startswith(f"{A}, seed 0 failed: its results could not be written to ")
    assert train.trained == [(A, 0), (A, 1)]


def test_any_other_error_ends_the_comparison(go: Go) -> None:
    train = FakeTrain({(B, 0): UsageError("no memory")})
    with pytest.raises(UsageError):
        go(train)
    assert train.trained == [(A, 0), (B, 0)]


def test_arms_of_one_algorithm_are_told_apart_and_those_of_other_settings_left_out(
    go: Go, folder: Path
) -> None:
    arms: dict[str, Any] = {"once": {"algorithm": A}, "twice": {"algorithm": A, "epochs": 4}}
    train = FakeTrain()
    runs, _ = go(train, seeds=[0], arms=arms)
    assert [run["arm"] for run in runs] == ["once", "twice"]
    assert [config.epochs for config in train.configs] == [2, 4]
    before = contents(folder)
    arms["twice"]["epochs"] = 6
    runs, (failure,) = go(train, seeds=[0], arms=arms)
    assert [run["arm"] for run in runs] == ["once"]
    out = folder / "twice-seed0"
    assert failure == f"twice, seed 0: {out} has epochs = 4, not 6; move it away"
    (out / "epochs.csv").unlink()  # as of another version
    runs, (failure,) = go(train, seeds=[0], arms=arms)
    assert len(runs) == 1
    assert f"the run in {out} cannot be read" in failure
    assert contents(folder).keys() == before.keys() - {"twice-seed0/epochs.csv"}


def test_arms_with_another_path_go_on(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own settings have absolute paths."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    arms = {"mine": {"algorithm": A, "data": "mine"}}
    train = FakeTrain()
    for _ in range(2):
        (run,), failures = go(
            lambda config: train(config.with_absolute_paths()), [], [0], arms=arms
        )
        assert (run["settings"]["data"], failures) == (str(tmp_path / "mine"), [])
    assert len(train.trained) == 1


def test_speeds_are_not_shared_by_arms_whose_steps_take_other_times(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "load_own_task", lambda _: SimpleNamespace(num_train=64))
    config = replace(CONFIG, workers=f"2x cpu:{usable_cores()[0]}", algorithm=A)
    arms = arms_of([A], {"batch-size": [8, 16]})
    assert compare.prepare(config, arms, tmp_path / "new", lines.append) == config
    assert lines == []  # nothing was measured
    both = f"2x cpu:{usable_cores()[0]}; 1x cpu:{usable_cores()[0]} batch=65"
    with pytest.raises(UsageError, match="batch=65"):
        compare.prepare(config, arms_of([A], {"workers": [both]}), tmp_path / "b", lines.append)


def test_run_that_another_process_trains_is_waited_for_at_the_end(
    go: Go, folder: Path, lines: list[str]
) -> None:
    lock = FileLock(folder / f".{A}-seed0.lock")
    lock.acquire()
    train = FakeTrain()

    def log(line: str) -> None:
        lines.append(line)
        if f"{B}, seed 0: done" in line:  # meanwhile the other one finishes
            write_run(replace(CONFIG, algorithm=A, out=str(folder / f"{A}-seed0")))
            lock.release()

    runs, failures = go(train, seeds=[0], log=log)
    assert (named(runs), failures) == ([(A, 0), (B, 0)], [])
    assert train.trained == [(B, 0)]
    assert "[1/2] sync-sgd, seed 0: finished before" in lines[-1]


# --- the folder


def test_folder_holds_the_settings_in_common_and_goes_on_with_what_varies(folder: Path) -> None:
    settings = tomllib.loads((folder / SETTINGS).read_text())
    own = CONFIG.to_run_config()
    assert settings == {key: own[key] for key in settings}
    assert own.keys() - settings.keys() == {"algorithm", "seed", "out", "name"}
    before = contents(folder)
    config = replace(CONFIG, algorithm=B, seed=3, name="other")
    check_folder(folder, config)
    open_folder(folder, config)
    assert contents(folder) == before


def test_setting_that_is_not_in_the_folder_has_its_default(folder: Path) -> None:
    lines = (folder / SETTINGS).read_text().splitlines()
    kept = [line for line in lines if not line.startswith("rebalance")]
    (folder / SETTINGS).write_text("\n".join(kept))
    check_folder(folder, CONFIG)
    line = refusal(check_folder, folder, replace(CONFIG, rebalance=True))
    assert line.endswith("with rebalance = False, not True; choose another folder")


@pytest.mark.parametrize("text", [b"epochs = ", b"x = " + b"[" * 5_000, b"\xff\xfe", b"x = 1"])
def test_folder_with_settings_that_cannot_be_read_is_refused(folder: Path, text: bytes) -> None:
    (folder / SETTINGS).write_bytes(text)
    assert "cannot be read" in refusal(check_folder, folder, CONFIG)


def test_folder_that_cannot_take_a_comparison_is_refused(tmp_path: Path) -> None:
    """`tests/cli` names a file and a folder that hold something else."""
    (tmp_path / "file").write_text("x")
    before = contents(tmp_path)
    for attempt in (check_folder, open_folder):
        assert "cannot be made" in refusal(attempt, tmp_path / "file" / "below", CONFIG)
    check_folder(tmp_path / "deep" / "down", CONFIG)  # can be made, and is not yet
    assert contents(tmp_path) == before


# --- the target


def test_target_is_an_accuracy_or_a_value_of_another_metric(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SimpleNamespace(metric_name="rmse", num_train=64)
    train = FakeTrain(metric_name="rmse", metric_mode="min")
    monkeypatch.setattr(compare, "load_own_task", lambda config: task)
    monkeypatch.setattr(compare, "train_quietly", train)
    monkeypatch.setattr(compare, "write_comparison", lambda *_: None)
    core = usable_cores()[0]
    workers = f"cpu:{core} fast seconds-per-step=1; cpu:{core} slow seconds-per-step=2"
    arguments = replace(CONFIG, workers=workers), (A, B), [0], tmp_path / "compared"
    found = compare.compare(*arguments, 50.0, lines.append)
    assert (found.target, found.metric.name, found.reference) == (50.0, "rmse", A)
    assert "done, rmse 0.9 after" in lines[1]
    task.metric_name = "accuracy"
    for target in (float("nan"), float("-inf"), 50.0):
        line = refusal(compare.compare, *arguments, target, print)
        assert line.endswith("must be an accuracy in (0, 1], or a finite value of another metric")


# --- what is typed; `tests/cli` has what is refused


def test_part_that_makes_algorithms_alike_is_named() -> None:
    parts = {"steps": "same", "sampler": "uniform", "weights": "equal"}
    for part, value in {**parts, "train_on": "fast", "momentum_buffers": "reset"}.items():
        name = part.replace("_", "-")
        assert overridden(RunConfig(**{part: value})).startswith(f"{name} = {value!r} overrides")
    assert overridden(RunConfig()) == ""


@pytest.mark.parametrize(
    ("text", "epochs", "seconds"),
    [
        *(("10epochs", 10, 0), ("1 epoch", 1, 0), ("3.0epochs", 3, 0)),
        *(("0.5s", NO_LIMIT, 0.5), (" 90 s ", NO_LIMIT, 90)),  # as good as no end of epochs
        *(("5min", NO_LIMIT, 300), ("2h", NO_LIMIT, 7200)),
    ],
)
def test_budget(text: str, epochs: int, seconds: float) -> None:
    config = RunConfig(epochs=15, seconds=7.0, seed=3)
    assert with_budget(config, text) == replace(config, epochs=epochs, seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "epochs", "-5s", "0s", "5 m", "nans", "60sec", "1.5epochs", "9" * 400 + "s"]
)
def test_budget_that_is_none_is_refused(text: str) -> None:
    refusal(with_budget, CONFIG, text)


def test_algorithms_and_seeds() -> None:
    assert read_algorithms("dlb, sync-sgd,") == ["dlb", "sync-sgd"]
    assert read_algorithms(" all ") == [*ALGORITHMS][:-2]  # the others' epochs are shorter
    assert read_seeds("3, 0 ,011,") == [3, 0, 11]
    with pytest.raises(UsageError, match="'²' is not a whole number"):
        read_seeds("²")
