"""A run's figures, from its first round to its summary."""

import csv
import dataclasses
import json
import re
import shlex
import sys
import tomllib
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from rich.console import Console
from safetensors.numpy import load_file

from flower_blsgd import app_folder, cli
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.results import report as report_module
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.results.report import RunReport
from flower_blsgd.roster import Roster
from flower_blsgd.run import make_strategy
from flower_blsgd.training_loop import EpochEnd

from .records import record, row, stats, two_rounds

REPOSITORY = Path(__file__).parents[2]
TASK: Any = SimpleNamespace(num_train=1437, num_test=360, assets={})
PROFILES = [
    WorkerProfile("cpu:0", tier="fast", partition_id=0),
    WorkerProfile("cuda:1", tier="fast", name="big card", partition_id=1),
    WorkerProfile("cpu:2-3", tier="slow", partition_id=2),
]


class Run:
    """A report with a clock, a screen and a current folder of its own; set-up began at 1000."""

    def __init__(
        self,
        here: Path,
        monkeypatch: pytest.MonkeyPatch,
        profiles: list[WorkerProfile] = PROFILES,
        **settings: Any,
    ) -> None:
        monkeypatch.chdir(here)
        self.now = 1000.0
        monkeypatch.setattr(report_module, "time", SimpleNamespace(time=lambda: self.now))
        self.screen = StringIO()
        self.config = RunConfig(**{"epochs": 2, **settings})
        strategy: Any = SimpleNamespace(
            planner=SimpleNamespace(
                sampling_stats=stats(),
                samples_given_up=3,
                table=SimpleNamespace(mean_age_rounds=lambda server_round: server_round / 4),
            ),
            roster=Roster.of_profiles(profiles),
        )
        console = Console(file=self.screen, soft_wrap=True, highlight=False)
        view = ProgressView(self.config.epochs, console)
        self.report = RunReport(self.config, strategy, view, self.now)
        self._telling = self.report.telling(TASK)
        self._telling.__enter__()
        self.report.open_folder()

    def finish(self) -> None:
        """End as a run does that is done."""
        self._telling.__exit__(None, None, None)

    def interrupt(self) -> None:
        """End as a run does at Ctrl-C; the error goes on its way."""
        error = KeyboardInterrupt()
        assert not self._telling.__exit__(KeyboardInterrupt, error, None)

    def train(self, metrics: MetricRecord | None = None) -> None:
        """Two rounds of one epoch: 20 s of set-up, rounds of 10 and 6 s, 2 s between them."""
        first, second = two_rounds()
        self.now = 1030.0
        self.report.add_round(first)
        self.now = 1038.0
        self.report.add_round(second)
        self.report.add_epoch(EpochEnd(1, 2, arrays(2.0), metrics))

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()

    def summary(self) -> dict[str, Any]:
        read = json.loads((self.report.folder.path / "summary.json").read_text())
        assert isinstance(read, dict)
        return read


def arrays(value: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(3, value, np.float32))})


def measured(accuracy: float, loss: float = 0.5) -> MetricRecord:
    return MetricRecord({"accuracy": accuracy, "loss": loss})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_open_folder_writes_the_resolved_config(run: Run, tmp_path: Path) -> None:
    assert run.report.folder.path == tmp_path / "runs" / "digits-1"
    config = tomllib.loads((run.report.folder.path / "config.toml").read_text())
    assert config == run.config.to_run_config()
    assert RunConfig.from_run_config(config) == run.config
    assert "1,437 training and 360 test samples" in run.lines[0]


def test_folder_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, name="mine", task="my.module:moons")
    assert run.report.folder.path == tmp_path / "runs" / "mine-1"
    run = Run(tmp_path, monkeypatch, task="my.module:moons")
    assert run.report.folder.path == tmp_path / "runs" / "moons-1"


def test_finish_leaves_all_files(run: Run) -> None:
    run.train(measured(0.75))
    run.finish()
    assert {path.name for path in run.report.folder.path.iterdir()} == {
        "config.toml",
        "rounds.jsonl",
        "epochs.csv",
        "summary.json",
        "model.safetensors",
        "learning_curve.png",
        "timeline.png",
        "sampling.png",
    }
    model = load_file(run.report.folder.path / "model.safetensors")
    np.testing.assert_array_equal(model["w"], [2, 2, 2])


def test_summary_has_the_keys_of_the_design(run: Run) -> None:
    run.train(measured(0.75))
    run.finish()
    assert {
        *("algorithm", "task", "accuracy", "best_accuracy", "loss", "wall_seconds"),
        *("training_seconds", "device_seconds", "evaluation_seconds", "epochs", "rounds"),
        *("samples", "fast_waiting_share", "slow_waiting_share", "workers", "failures"),
        *("versions", "seed"),
    } <= run.summary().keys()
    for worker in run.summary()["workers"]:
        assert {"device", "tier", "local_steps", "weight", "seconds_per_step"} <= worker.keys()


@pytest.mark.parametrize("used", [False, True])
def test_transformers_is_among_the_versions_where_it_is_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    if used:
        monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    run.train()
    run.finish()
    always = {"python", "flower-blsgd", "flwr", "torch", "numpy"}
    assert run.summary()["versions"].keys() == always | ({"transformers"} if used else set())


def test_summary_hand_worked(run: Run) -> None:
    run.train(measured(0.75, loss=0.25))
    run.report.evaluation_seconds = 1.5
    run.finish()
    summary = run.summary()
    assert summary == run.report.summary
    # The first order left at 1030 - 10, the last model was there at 1038.
    assert summary["setup_seconds"] == 20.0
    assert summary["wall_seconds"] == 18.0
    assert summary["training_seconds"] == 16.75
    assert summary["evaluation_seconds"] == 1.5
    assert (summary["accuracy"], summary["best_accuracy"], summary["loss"]) == (0.75, 0.75, 0.25)
    assert (summary["epochs"], summary["rounds"], summary["samples"]) == (1, 2, 240)
    assert summary["samples_given_up"] == 3
    assert summary["fast_waiting_share"] == 0.25
    assert summary["slow_waiting_share"] == 0.0625
    assert summary["failures"] == [
        {"round": 2, "worker": "fast-1 (cpu:1)", "reason": "the process died"}
    ]
    assert summary["interrupted"] is False


def test_summary_of_workers(run: Run) -> None:
    run.train()
    run.finish()
    workers = run.summary()["workers"]
    assert [worker["device"] for worker in workers] == ["cpu:0", "cuda:1", "cpu:2-3"]
    assert [worker["name"] for worker in workers] == ["", "big card", ""]
    assert [worker["tier"] for worker in workers] == ["fast", "fast", "slow"]
    assert [worker["local_steps"] for worker in workers] == [4, 4, 2]
    assert [worker["weight"] for worker in workers] == [0.625, 0.125, 0.25]
    assert [worker["seconds_per_step"] for worker in workers] == [11 / 8, 1.0, 13 / 3]
    assert [worker["samples"] for worker in workers] == [128, 64, 48]
    assert [worker["failures"] for worker in workers] == [0, 1, 0]
    assert not any(worker["hardly_takes_part"] for worker in workers)


def test_summary_accuracy_is_the_last_and_the_best(run: Run) -> None:
    for metrics in (measured(0.5), measured(0.875), None, measured(0.75, loss=0.3), None):
        run.train(metrics)
    run.finish()
    summary = run.summary()
    assert (summary["accuracy"], summary["best_accuracy"], summary["loss"]) == (0.75, 0.875, 0.3)
    assert summary["epochs"] == 5


def test_epoch_row(run: Run) -> None:
    run.train(measured(0.75, loss=0.25))
    header, values = (run.report.folder.path / "epochs.csv").read_text().splitlines()
    row_of = dict(zip(header.split(","), values.split(","), strict=True))
    assert row_of == {
        "epoch": "1",
        "wall_seconds": "18.0",
        "training_seconds": "16.75",
        "device_seconds": "",
        "accuracy": "0.75",
        "loss": "0.25",
        "learning_rate": "0.1",
        "train_loss": "1.5",
        "rounds": "2",
        "samples": "240",
        "mean_loss_age_rounds": "0.5",
        "all_loss_mean": "1.0",
        "all_loss_p10": "0.25",
        "all_loss_p90": "2.0",
        "fast_picked_loss_mean": "1.5",
        "slow_picked_loss_mean": "1.125",
        "picked_over_all_loss": "1.375",
        "distinct_samples": "96",
        "share_never_seen": "0.125",
        "share_left_out": "0.25",
        "loss_age_epochs_mean": "0.5",
        "loss_age_epochs_p90": "1.0",
        "loss_age_epochs_max": "2.0",
        "left_out_age_epochs_mean": "1.75",
        "left_out_age_epochs_p90": "3.0",
    }


def test_workers_are_told_with_the_first_round_only(run: Run) -> None:
    run.train()
    assert run.lines[1:4] == [
        "  fast-0 (cpu:0): 4 steps a round, weight 50.0%",
        "  fast-1 (cpu:1): 4 steps a round, weight 25.0%",
        "  slow-2 (cpu:2): 1 steps a round, weight 25.0%",
    ]
    assert sum("steps a round, weight" in line for line in run.lines) == 3


def test_changed_steps_are_told_with_both_numbers(run: Run) -> None:
    run.train()  # the slow worker does 1 step in the first round and 2 in the second
    (line,) = [line for line in run.lines if "instead of" in line]
    assert line == "  epoch 1: slow-2 (cpu:2) does 2 steps a round instead of 1: its speed changed"


def test_worker_that_hardly_takes_part(run: Run) -> None:
    run.report.add_round(record(row(0, weight=0.995), row(1, weight=0.005)))
    assert ["hardly takes part" in line for line in run.lines[1:3]] == [False, True]
    run.finish()
    shares = [worker["hardly_takes_part"] for worker in run.summary()["workers"]]
    assert shares == [False, True]


# --- the last line --------------------------------------------------------------------------


def test_last_line_says_whether_slow_devices_help(run: Run) -> None:
    """Of 16 s of rounds, 3 s were spent waiting for the slow one alone: 16 / 13 = 1.23."""
    run.train(measured(0.75))
    run.finish()
    assert run.lines[-2].startswith("done: test accuracy 75.00% after 16.8 s of training")
    assert str(run.report.folder.path) in run.lines[-2]
    assert run.lines[-1].startswith(
        "slow devices: 20.0% of the samples, 25.0% of the weight, "
        "rounds +23% longer for waiting for them; "
    )


def test_last_line_without_slow_devices(run: Run) -> None:
    run.report.add_round(record(row(0), row(1)))
    run.finish()
    assert run.lines[-1] == "slow devices: none took part, so nobody waited for one"


def command_in(line: str) -> list[str]:
    """Return the arguments of the command that a line ends with."""
    command = re.search(r"blsgd (run .*)$", line)
    assert command is not None, line
    return shlex.split(command[1])


@pytest.mark.parametrize("where", ["clone", "empty folder"])
def test_command_in_the_last_line_runs_without_slow_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Wherever the run itself began: in the app's folder, or in an empty one."""
    results, empty = tmp_path / "it's mine", tmp_path / "empty"
    results.mkdir()
    empty.mkdir()
    run = Run(results, monkeypatch, batch_size=8, seed=5, algorithm="biased-local-sgd")
    run.train(measured(0.75))
    run.finish()
    arguments = command_in(run.lines[-1])

    monkeypatch.chdir(REPOSITORY if where == "clone" else empty)
    options = cli._parser().parse_args(arguments)
    app, _ = app_folder.find_app(options.app)
    values, _ = app_folder.run_config(app, options.run_config, options.set)
    config = RunConfig.from_run_config(values)
    assert (config.batch_size, config.seed, config.epochs) == (8, 5, 2)
    assert config.choices.sampler == "uniform"
    assert options.workers is None
    assert config.workers == run.report.config.workers
    strategy = make_strategy(config, num_samples=1000, min_workers=3)
    trained = strategy.planner.training(run.report._strategy.roster.workers)
    assert [worker.profile.device for worker in trained] == ["cpu:0", "cuda:1"]


def test_command_in_the_last_line_does_not_write_over_an_explicit_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, out="my runs/first")
    assert run.report.folder.path == tmp_path / "my runs" / "first"
    run.train(measured(0.75))
    run.finish()
    options = cli._parser().parse_args(command_in(run.lines[-1]))
    assert "out=my runs/first-fast-only" in options.set


# --- the device clock ---------------------------------------------------------------------------

SPEEDS = [
    dataclasses.replace(profile, seconds_per_step=seconds)
    for profile, seconds in zip(PROFILES, (1.0, 1.25, 4.0), strict=True)
]
"""Alone, the workers of `two_rounds` need 4, 5 and 4 s, then 4 s and 8 s; 1 s and 1 s are moved."""


def test_device_seconds_are_told_when_all_speeds_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, SPEEDS)
    run.train(measured(0.75))
    run.finish()
    summary = run.summary()
    assert summary["device_seconds"] == 5 + 1 + 8 + 1
    assert summary["clock"] == "wall"
    assert (summary["fast_waiting_share"], summary["slow_waiting_share"]) == (0.25, 0.0625)
    alone = [worker["seconds_per_step_alone"] for worker in summary["workers"]]
    assert alone == [1.0, 1.25, 4.0]
    (row_of,) = csv.DictReader((run.report.folder.path / "epochs.csv").open())
    assert row_of["device_seconds"] == "15.0"
    assert (
        "after 16.8 s of training (18.0 s with evaluation; 15.0 s on simulated devices, "
        in (run.lines[-2])
    )


def test_device_seconds_are_unknown_with_a_worker_whose_speed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, [*SPEEDS[:2], PROFILES[2]])
    run.train(measured(0.75))
    run.finish()
    assert run.summary()["device_seconds"] is None
    alone = [worker["seconds_per_step_alone"] for worker in run.summary()["workers"]]
    assert alone == [1.0, 1.25, None]
    assert "simulated" not in run.screen.getvalue()


@pytest.mark.parametrize(("clock", "seconds"), [("wall", None), ("device", 15.0)])
def test_device_seconds_do_not_use_what_was_measured_on_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str, seconds: float | None
) -> None:
    run = Run(tmp_path, monkeypatch, SPEEDS, clock=clock)
    run.report._strategy.roster.workers[1].measured = True
    run.train()
    run.finish()
    assert run.summary()["device_seconds"] == seconds


def test_device_clock_decides_who_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, SPEEDS, clock="device")
    run.train(measured(0.75))
    run.finish()
    summary = run.summary()
    assert summary["clock"] == "device"
    assert summary["fast_waiting_share"] == (1 + 0 + 4) / (2 * 15)
    assert summary["slow_waiting_share"] == 1 / 15
    # The slow worker made the second round 4 s longer: 15 / 11 = 1.36.
    assert "rounds +36% longer for waiting for them (simulated devices); " in run.lines[-1]


def test_device_clock_without_speeds_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, clock="device")
    run.train(measured(0.75))
    run.finish()
    assert run.summary()["slow_waiting_share"] is None
    assert "rounds not known to be longer" in run.lines[-1]


# --- written as soon as it is over ------------------------------------------------------------


def test_round_and_epoch_are_written_at_once(run: Run) -> None:
    folder = run.report.folder.path
    for place, one in enumerate(two_rounds(), start=1):
        run.report.add_round(one)
        assert len((folder / "rounds.jsonl").read_text().splitlines()) == place
    run.report.add_epoch(EpochEnd(1, 2, arrays(2.0), measured(0.75)))
    (row_of,) = csv.DictReader((folder / "epochs.csv").open())
    assert (row_of["epoch"], row_of["accuracy"], row_of["rounds"]) == ("1", "0.75", "2")
    assert run.lines[-1].startswith("epoch 1/2  accuracy 75.00%")


def test_disk_that_is_full_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(one: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(run.report.folder, "add_round", full)
    with pytest.raises(OSError, match="disk full"):
        run.report.add_round(two_rounds()[0])


# --- runs that end early --------------------------------------------------------------------


def test_interrupted_run_leaves_what_was_reached(run: Run) -> None:
    run.train(measured(0.75))
    run.interrupt()
    assert run.summary()["interrupted"] is True
    assert run.summary()["accuracy"] == 0.75
    assert (run.report.folder.path / "model.safetensors").is_file()
    assert (run.report.folder.path / "timeline.png").is_file()
    assert (run.report.folder.path / "sampling.png").is_file()
    assert any(line.startswith("stopped early: test accuracy 75.00%") for line in run.lines)


def test_run_that_ends_before_the_first_round(run: Run) -> None:
    run.interrupt()
    assert {path.name for path in run.report.folder.path.iterdir()} == {
        "config.toml",
        "summary.json",
    }
    summary = run.summary()
    assert (summary["accuracy"], summary["rounds"], summary["workers"]) == (None, 0, [])
    assert summary["fast_waiting_share"] is None


def test_run_that_ends_before_it_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has taken the place: the first error is told, and nothing is written."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="out = 'taken' exists"):
        Run(tmp_path, monkeypatch, out="taken")
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_run_that_ends_in_its_first_epoch(run: Run) -> None:
    run.report.add_round(two_rounds()[0])
    run.interrupt()
    summary = run.summary()
    assert (summary["rounds"], summary["epochs"], summary["accuracy"]) == (1, 0, None)
    assert not (run.report.folder.path / "model.safetensors").exists()
    for picture in ("learning_curve.png", "timeline.png", "sampling.png"):
        assert (run.report.folder.path / picture).is_file()
