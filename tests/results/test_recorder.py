"""A run's progress, its figures from the first round to the summary, and its last lines."""

import csv
import dataclasses
import functools
import json
import logging
import math
import re
import shlex
import tomllib
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.app.exception import AppExitException
from rich.console import Console
from safetensors.numpy import load_file

from flower_blsgd.cli.main import _parser
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.app_folder import find_app, run_config
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.results import history as history_module
from flower_blsgd.results import progress as progress_module
from flower_blsgd.results.metric import ACCURACY, Metric
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.results.recorder import RunRecorder
from flower_blsgd.results.stopping import Best
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.rounds import EpochEnd
from flower_blsgd.strategy.workers import WorkerRegistry

from ..log_capture import captured_log
from ..refusal import refusal
from .records import SPEEDS, record, row, stats, two_rounds

Start = Callable[..., "Run"]
PICTURES = {"learning_curve.png", "timeline.png", "sampling.png"}
ALL = {"rounds.jsonl", "epochs.csv", "model.safetensors", "README.md", *PICTURES}
DATA = "1,437 training and 360 test samples"
PROFILES = [
    WorkerProfile("cpu:0", tier="fast", partition_id=0),
    WorkerProfile("cuda:1", tier="fast", name="big card", partition_id=1),
    WorkerProfile("cpu:2-3", tier="slow", partition_id=2, batch_size=16, precision="bfloat16"),
]


class Run:
    """A recorder with a clock, a screen and a current folder of its own; set-up began at 1000."""

    def __init__(
        self,
        here: Path,
        monkeypatch: pytest.MonkeyPatch,
        profiles: list[WorkerProfile] = PROFILES,
        terminal: bool = False,
        metric: Metric = ACCURACY,
        **settings: Any,
    ) -> None:
        monkeypatch.chdir(here)
        self.now, self.seconds_since_round = 1000.0, 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)  # no clock that somebody can set
        for module in (history_module, progress_module):
            monkeypatch.setattr(module, "time", clock)
        self.screen = StringIO()
        self.config = RunConfig(**{"epochs": 2, **settings})
        strategy: Any = SimpleNamespace(
            planner=SimpleNamespace(
                measured=None,
                clock=self,
                sampling_stats=stats(),
                samples_planned_so_far=245,
                samples_given_up=3,
                progress=SimpleNamespace(epoch=1, samples_cut_off=2),
                used=Budget(1, 16.75, 1, 240),
                epoch_ended=True,
                table=SimpleNamespace(mean_age_rounds=lambda server_round: server_round / 4),
            ),
            registry=WorkerRegistry.of_profiles(profiles),
        )
        console = Console(
            file=self.screen,
            force_terminal=terminal,
            width=160,
            highlight=False,
            soft_wrap=True,
            color_system=None,
            legacy_windows=False,
        )
        view = ProgressView(Budget.of_run(self.config), console)
        self.recorder = RunRecorder(self.config, strategy, view, self.now, metric)
        self._recording = self.recorder.recording(DATA, {})
        self._recording.__enter__()
        self.recorder.open_folder()

    @property
    def added_at(self) -> float:
        return self.now - self.seconds_since_round

    def finish(self) -> None:
        """End as a run that is done."""
        self._recording.__exit__(None, None, None)

    def interrupt(self) -> None:
        """End as a run at Ctrl-C; the error is raised on."""
        assert not self._recording.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def train(self, metrics: MetricRecord | None = None) -> None:
        """Two rounds of one epoch: 20 s of set-up, rounds of 10 and 6 s, 2 s between them."""
        first, second = two_rounds()
        self.now = 1030.0
        self.recorder.add_round(first)
        self.now = 1038.0
        self.recorder.add_round(second)
        self.end_epoch(1, metrics)

    def end_epoch(self, epoch: int, metrics: MetricRecord | None = None) -> bool:
        arrays = ArrayRecord({"w": Array(np.full(3, 2.0, np.float32))})
        planner: Any = self.recorder._strategy.planner
        planner.progress.epoch = epoch
        planner.used = dataclasses.replace(planner.used, epochs=epoch)
        return self.recorder.add_epoch(EpochEnd(epoch, 2 * epoch, arrays, metrics))

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()

    def summary(self) -> dict[str, Any]:
        read = json.loads((self.recorder.folder.path / "summary.json").read_text())
        assert isinstance(read, dict)
        return read


def measured(accuracy: float, loss: float = 0.5) -> MetricRecord:
    return MetricRecord({"accuracy": accuracy, "loss": loss})


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return functools.partial(Run, tmp_path, monkeypatch)


@pytest.fixture
def run(start: Start) -> Run:
    return start()


def test_open_folder_writes_the_resolved_config(start: Start, tmp_path: Path) -> None:
    for settings, name in (
        ({}, "digits-1"),
        ({"name": "mine", "task": "my.module:moons"}, "mine-1"),
        ({"task": "my.module:moons"}, "moons-1"),
    ):
        run = start(**settings)
        assert run.recorder.folder.path == tmp_path / "runs" / name
        config = tomllib.loads((run.recorder.folder.path / "config.toml").read_text())
        assert config == run.config.to_run_config()
        assert "1,437 training and 360 test samples" in run.lines[0]


def test_setting_that_makes_fast_workers_wait_is_named_once(start: Start) -> None:
    """After the first epoch, but not of the first round alone, in which processes warm up."""
    run = start(local_steps_slow=4)
    for epoch in (1, 2, 3):
        did = {"completed_steps": 4, "num_examples": 64, "weight": 0.5, "transfer_seconds": 1.0}
        fast = row(0, compute_seconds=1.0, waiting_seconds=8.0, **did)
        slow = row(2, fast=False, compute_seconds=9.0, **did)
        run.recorder.add_round(record(fast, slow, round=epoch, epoch=epoch))
        run.end_epoch(epoch)
        said = [line for line in run.lines if "local-steps-slow = 4 is too large" in line]
        assert len(said) == min(1, epoch - 1)
    assert said[0].startswith("fast workers wait 80% of the time for slow-2 (cpu:2): ")


# --- the summary ----------------------------------------------------------------------------


def test_summary_hand_worked(run: Run) -> None:
    run.train(measured(0.75, loss=0.25))
    run.recorder.history.durations.evaluation_seconds = 1.5
    run.finish()
    summary = run.summary()
    assert summary == run.recorder.summary
    assert summary.keys() == {
        *("algorithm", "steps", "sampler", "weights", "train_on", "task", "clock", "seed"),
        *(
            "accuracy",
            "metric",
            "metric_name",
            "metric_mode",
            "best_accuracy",
            "best_metric",
            "loss",
            "epochs",
            "rounds",
            "samples",
        ),
        *("samples_planned", "samples_given_up", "samples_cut_off"),
        *("wall_seconds", "setup_seconds", "training_seconds", "device_seconds"),
        *("evaluation_seconds", "summing_seconds", "fast_waiting_share", "slow_waiting_share"),
        *("workers", "failures", "failures_by_worker", "versions"),
        *("predicted", "measured", "interrupted", "stopped_early", "resumed"),
        *("best_model_chosen_on", "checkpoint_seconds"),
        *("mean_loss_age_rounds", "async_evaluation", "async_evaluation_seconds", "slow_devices"),
    }
    assert (summary["async_evaluation"], summary["async_evaluation_seconds"]) == (None, 0.0)
    assert summary["mean_loss_age_rounds"] == 0.5
    # The first plan began at 1030 - 10 - 0.5, the last model was there at 1038.
    assert summary["setup_seconds"] == 19.5
    assert summary["wall_seconds"] == 18.5
    assert (summary["training_seconds"], summary["evaluation_seconds"]) == (16.75, 1.5)
    assert (summary["accuracy"], summary["best_accuracy"], summary["loss"]) == (0.75, 0.75, 0.25)
    assert (summary["epochs"], summary["rounds"], summary["samples"]) == (1, 2, 240)
    counts = ("samples_planned", "samples_given_up", "samples_cut_off")
    assert [summary[key] for key in counts] == [245, 3, 2]
    assert (summary["fast_waiting_share"], summary["slow_waiting_share"]) == (0.25, 0.0625)
    assert summary["failures"] == [
        {"round": 2, "worker": "fast-1 (cpu:1)", "kind": "died", "reason": "the process died"}
    ]
    assert summary["interrupted"] is False
    for key, values in {
        "device": ["cpu:0", "cuda:1", "cpu:2-3"],
        "name": ["", "big card", ""],
        "tier": ["fast", "fast", "slow"],
        "local_steps": [4, 4, 2],
        "batch_size": [16, 16, 16],
        "precision": ["float32", "float32", "bfloat16"],
        "weight": [0.625, 0.125, 0.25],
        "negligible": [False] * 3,
        "seconds_per_step": [11 / 8, 1.0, 13 / 3],
        "seconds_per_step_alone": [None] * 3,
        "samples": [128, 64, 48],
        "compute_seconds": [11.0, 4.0, 13.0],
        "waiting_seconds": [3.0, 5.0, 1.0],
        "transfer_seconds": [2.0, 1.0, 2.0],
        "failures": [0, 1, 0],
        "momentum_zeroed": [1, 0, 0],
        "skipped_steps": [0, 0, 0],
    }.items():
        assert [worker.pop(key) for worker in summary["workers"]] == values, key
    assert summary["workers"] == [{}] * 3


# --- progress -------------------------------------------------------------------------------


def test_round_and_epoch_are_written_and_shown_at_once(run: Run) -> None:
    folder = run.recorder.folder.path
    first, second = two_rounds()
    run.recorder.add_round(first)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 1
    run.now += 6
    run.recorder.add_round(second)
    # The slow worker does 1 step in the first round and 2 in the second.
    assert run.lines[1:] == [
        "  fast-0 (cpu:0): 4 steps per round, weight 50.0%",
        "  fast-1 (cpu:1): 4 steps per round, weight 25.0%",
        "  slow-2 (cpu:2): 1 step of 16 samples per round in bfloat16, weight 25.0%",
        "  epoch 1: slow-2 (cpu:2) does 2 steps per round instead of 1, since its speed changed",
    ]
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2
    run.end_epoch(1, measured(0.9375, loss=0.25))
    # Half is done after 16 s; the second round had 96 samples in 6 s.
    assert run.lines[-1] == (
        "epoch 1/2  accuracy 93.75%  train loss 1.5000  16 samples/s  "
        "fast waits 0%, slow waits 17%  0:00:16 left"
    )
    run.end_epoch(2)
    assert run.lines[-1].startswith("epoch 2/2  train loss 1.5000")
    assert "\x1b" not in run.screen.getvalue()
    row_of, _ = csv.DictReader((folder / "epochs.csv").open())
    expected = {
        **{"epoch": "1", "training_seconds": "16.75", "device_seconds": "", "accuracy": "0.9375"},
        **{"loss": "0.25", "learning_rate": "0.1", "train_loss": "1.5", "rounds": "2"},
        **{"samples": "240", "mean_loss_age_rounds": "0.5", "fast_picked_loss_mean": "1.5"},
    }
    assert row_of.items() >= expected.items()


@pytest.mark.parametrize(
    ("spent", "epoch", "round_in_epoch", "left"),
    [
        # 4 epochs of 2 rounds; what was before, as of a run that goes on, took no time here
        (60.0, 1, 1, "0:07:00"),
        (5.0, 3, 2, "0:00:10"),
        (7_200.0, 2, 2, "8:00:00"),
    ],
)
def test_time_left(start: Start, spent: float, epoch: int, round_in_epoch: int, left: str) -> None:
    run = start(epochs=4)
    run.now += 500 + spent  # starting the workers does not count
    run.recorder.add_round(
        record(row(0), epoch=epoch, round_in_epoch=round_in_epoch, round_seconds=spent)
    )
    run.end_epoch(epoch)
    assert run.lines[-1].endswith(f"  {left} left")


def test_terminal_has_a_live_line(start: Start) -> None:
    run = start(terminal=True)
    run.now += 10
    run.recorder.add_round(two_rounds()[0])
    run.recorder.say("a line between")
    run.finish()
    # 144 samples in 10 s; a quarter is done
    live = "epoch 1/2  round 1/2  14 samples/s  fast waits 40%, slow waits 0%  0:00:30 left"
    screen = run.screen.getvalue()
    assert live in screen
    assert "\x1b[?25h" in screen[screen.rindex(live) :]  # the cursor is back


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "line", ["worker [bold]cpu[/bold] [0-3]", "see /data/:fire:/runs/:100:/", "x" * 500]
)
def test_say_writes_the_line_as_it_is(start: Start, terminal: bool, line: str) -> None:
    """Names, paths and labels come from the user, and mean nothing to the terminal."""
    run = start(terminal=terminal)
    run.recorder.say(line)
    assert line + "\n" in run.screen.getvalue()


# --- run.log


def test_log_has_the_time_of_all_that_was_said_and_of_warnings(run: Run, start: Start) -> None:
    run.train(measured(0.75))
    for name, level in (("flower_blsgd.strategy", 30), ("flwr", 40), ("flwr", 20), ("other", 40)):
        logging.getLogger(name).log(level, "%s says %d", name, level)
    run.finish()
    logging.getLogger("flower_blsgd").warning("too late")
    log = (run.recorder.folder.path / "run.log").read_text().splitlines()
    times, lines = zip(*(line.split(" ", 1) for line in log), strict=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", at) for at in times)
    warnings = ("flower_blsgd.strategy says 30", "flwr says 40")
    assert [line for line in lines if line not in warnings] == run.lines  # the header is the first
    assert lines[-5:-3] == warnings
    later = start(name="later").recorder
    later.history.resumed, later.log.folder = [0], None
    later.say("resumed")
    later.open_folder(run.recorder.folder)
    resumed = (run.recorder.folder.path / "run.log").read_text().splitlines()
    assert resumed[: len(log)] == log
    assert resumed[-1].endswith(" resumed")


def test_warning_is_still_printed_without_a_handler_of_the_program(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("flower_blsgd")
    monkeypatch.setattr(logger, "propagate", False)  # to pytest's
    own = [one for one in logger.handlers if type(one).__module__.endswith(".run_log")]
    monkeypatch.setattr(logger, "handlers", own)  # without that of a command
    logger.warning("the fan stands still")
    assert capsys.readouterr().err == "the fan stands still\n"
    with captured_log():
        logger.warning("the fan stands still")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (KeyboardInterrupt(), ["KeyboardInterrupt"]),
        (SystemExit(143), ["SystemExit: 143"]),
        (UsageError("grö\udcffe = 1"), ["flower_blsgd.errors.UsageError: grö\\udcffe = 1"]),
        (AppExitException("no worker"), ["flwr.app.exception.AppExitException: no worker"]),
        (KeyError("x"), ["Traceback (most recent call last):", "KeyError: 'x'"]),
    ],
    ids=["Ctrl-C", "SIGTERM", "refused", "failed", "bug"],
)
def test_log_ends_with_the_error_and_its_notes(
    run: Run, error: BaseException, lines: list[str]
) -> None:
    error.add_note("blsgd run --resume runs/digits-1")
    try:
        raise error
    except BaseException:  # as in a run
        assert not run._recording.__exit__(type(error), error, error.__traceback__)
    log = (run.recorder.folder.path / "run.log").read_text().splitlines()
    assert log[-1] == "blsgd run --resume runs/digits-1"
    first = next(i for i, line in enumerate(log) if line.endswith(f" {lines[0]}"))
    assert [re.sub(r"^20\S+ ", "", line) for line in (log[first], log[-2])] == [
        lines[0],
        lines[-1],
    ]


# --- the last line --------------------------------------------------------------------------


def test_last_line_says_whether_slow_devices_help(run: Run) -> None:
    """In 16 s of rounds, of which 3 s were spent waiting for it alone: 13 / (16 x 0.8) = 1.02."""
    run.train(measured(0.75))
    run.finish()
    done, brought, compare = run.lines[-3:]
    assert done.startswith("done: test accuracy 75.00% after 16.8 s of training")
    assert str(run.recorder.folder.path) in done
    assert brought == (
        "slow devices: 20.0% of the samples, 1.02 times the samples per second of the fast ones "
        "alone"
    )
    assert compare.startswith("  to compare the accuracy without them: ")


def test_card_of_the_model_has_figure_devices_and_settings_but_no_paths(start: Start) -> None:
    run = start(data="/home/somebody/images", learning_rate=0.25)
    run.train(measured(0.75))
    run.finish()
    card = (run.recorder.folder.path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: flower-blsgd\n")
    for line in (
        "| figure | test accuracy 75.00% |",
        "| data | images |",
        "| optimizer | sgd, learning rate 0.25, steps |",
    ):
        assert line in card.splitlines()
    assert "| devices | cpu:0 fast, cuda:1 fast big card, cpu:2-3 slow |" in card.splitlines()
    assert "somebody" not in card


def test_card_has_no_figure_of_another_model(run: Run) -> None:
    run.train(measured(0.75))
    run.end_epoch(2)  # without an evaluation, and its model is saved
    run.finish()
    assert run.summary()["accuracy"] == 0.75
    assert "accuracy" not in (run.recorder.folder.path / "README.md").read_text()


@pytest.mark.parametrize(
    ("clock", "seconds_per_step", "evaluation_seconds", "best"),
    [
        # 16.75 s of training; 0.35 of the gain that load weights allow, that is 7/18 and 0.008
        ("wall", 0.2, 1.675, "used for training (expected speed-up: training 1.14, {} 1.10)"),
        ("wall", 1.6, 0.335, "used for role=evaluate (expected speed-up: training 1.00, {} 1.02)"),
        ("wall", 1.6, 3.35, "used for role=evaluate (expected speed-up: training 1.00, {} 1.06)"),
        ("wall", 1.6, 0.0, "left out (expected speed-up: training 1.00)"),
        ("device", 1.6, 0.0, "used for training (expected speed-up: training 1.14)"),
    ],
)
def test_role_that_a_slow_worker_is_worth_follows_from_the_times_of_the_run(
    start: Start, clock: str, seconds_per_step: float, evaluation_seconds: float, best: str
) -> None:
    given = zip(PROFILES, (1.0, 0.0, 2.0), strict=True)  # what counts on simulated devices
    run = start([dataclasses.replace(p, seconds_per_step=s) for p, s in given], clock=clock)
    workers = run.recorder._strategy.registry.workers
    workers[0].training_seconds_per_step = 0.1
    workers[2].training_seconds_per_step = seconds_per_step
    run.train(measured(0.75))
    run.recorder.history.durations.evaluation_seconds = evaluation_seconds
    run.finish()
    assert f"  slow-2 (cpu:2-3): best {best.format('role=evaluate')}" in run.lines


def test_accuracy_on_held_out_training_data_is_called_so(start: Start) -> None:
    run = start(validation_share=0.25, metric=Metric(split="validation"))
    run.train(measured(0.75))
    run.finish()
    assert any("  validation accuracy 75.00%  " in line for line in run.lines)
    assert run.lines[-3].startswith("done: validation accuracy 75.00% after ")


def test_without_slow_devices_and_with_one_of_negligible_weight(run: Run) -> None:
    run.recorder.add_round(record(row(0, weight=0.995), row(1, weight=0.005)))
    assert ["contributes less than 1%" in line for line in run.lines[1:3]] == [False, True]
    run.finish()
    shares = [worker["negligible"] for worker in run.summary()["workers"]]
    assert shares == [False, True]
    assert run.lines[-1] == "slow devices: none trained"


def test_command_in_the_last_line_runs_without_slow_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another folder than that in which the run began."""
    results = tmp_path / "it's mine"
    results.mkdir()
    run = Run(results, monkeypatch, batch_size=8, seed=5, out="my runs/first")
    run.train(measured(0.75))
    run.finish()
    command = re.search(r"blsgd (run .*)$", run.lines[-1])
    assert command is not None

    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command[1])
    options = _parser(arguments).parse_args(arguments)
    app, _ = find_app(options.app)
    values, _ = run_config(app, options.run_config, options.set)
    config = RunConfig.from_run_config(values)
    assert (config.batch_size, config.seed, config.epochs) == (8, 5, 2)
    assert config.choices.sampler == "uniform"
    assert config.out == "my runs/first-fast-only"
    assert options.workers is None
    assert config.workers == run.recorder.config.workers
    strategy = make_strategy(config, num_samples=1000, min_workers=3)
    trained = strategy.planner.training(run.recorder._strategy.registry.workers)
    assert [worker.profile.device for worker in trained] == ["cpu:0", "cuda:1"]


# --- the device clock -----------------------------------------------------------------------

WITH_SPEEDS = [
    dataclasses.replace(profile, seconds_per_step=seconds)
    for profile, seconds in zip(PROFILES, SPEEDS.values(), strict=True)
]


@pytest.mark.parametrize(
    ("clock", "measured_here", "seconds"),
    [("wall", False, 5 + 1 + 8 + 1), ("wall", True, None), ("device", True, 15.0)],
)
def test_device_seconds_do_not_use_what_was_measured_on_all_at_once(
    start: Start, clock: str, measured_here: bool, seconds: float | None
) -> None:
    run = start(WITH_SPEEDS, clock=clock)
    run.recorder._strategy.registry.workers[1].measured = measured_here
    run.train()
    run.finish()
    summary = run.summary()
    assert (summary["device_seconds"], summary["clock"]) == (seconds, clock)
    alone = [worker["seconds_per_step_alone"] for worker in summary["workers"]]
    assert alone == [1.0, 1.25 if seconds else None, 4.0]
    (line,) = [line for line in run.lines if line.startswith("done: ")]
    assert ("15.0 s on simulated devices, computed" in line) == (seconds is not None)
    assert (summary["fast_waiting_share"] == 0.25) == (clock == "wall")
    (row_of,) = csv.DictReader((run.recorder.folder.path / "epochs.csv").open())
    assert row_of["device_seconds"] == ("" if seconds is None else "15.0")


@pytest.mark.parametrize(
    ("profiles", "words", "progress"),
    [
        # The slow worker made the second round 4 s longer: 11 / (15 x 0.8) = 0.92. The fast one
        # waits 4 of its 9 s, and is one of two.
        (
            WITH_SPEEDS,
            ", 0.92 times the samples per second of the fast ones alone (simulated devices)",
            "fast waits 22%, slow waits 0%",
        ),
        (PROFILES, "what they bring is unknown", "  16 samples/s  0:0"),
    ],
)
def test_lines_on_the_device_clock(
    start: Start, profiles: list[WorkerProfile], words: str, progress: str
) -> None:
    run = start(profiles, clock="device")
    run.train()
    (line,) = [line for line in run.lines if line.startswith("epoch 1/2")]
    assert progress in line
    run.finish()
    assert any(words in line for line in run.lines)


# --- runs that end early --------------------------------------------------------------------


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("rounds", "interrupted", "left"),
    [
        (0, True, set()),
        (1, True, {"rounds.jsonl", *PICTURES}),
        (2, True, ALL),
        (2, False, ALL),
    ],
    ids=["before the first round", "in the first epoch", "after it", "done"],
)
def test_run_leaves_what_was_reached(
    start: Start, rounds: int, interrupted: bool, left: set[str]
) -> None:
    run = start()
    if rounds == 1:
        run.recorder.add_round(two_rounds()[0])
    elif rounds == 2:
        run.train(measured(0.75))
    run.interrupt() if interrupted else run.finish()
    files = {path.name for path in run.recorder.folder.path.iterdir()}
    assert files == {"config.toml", "summary.json", "run.log", *left}
    summary = run.summary()
    assert (summary["interrupted"], summary["rounds"]) == (interrupted, rounds)
    assert summary["accuracy"] == (0.75 if rounds == 2 else None)
    assert any(line.startswith("stopped early: ") for line in run.lines) == interrupted
    if rounds == 2:
        model = load_file(run.recorder.folder.path / "model.safetensors")
        np.testing.assert_array_equal(model["w"], [2, 2, 2])


@pytest.mark.parametrize(
    ("settings", "accuracies", "reason"),
    [
        ({"stop_at_accuracy": 0.75}, [0.5, 0.75], "accuracy 75.00% (stop-at-accuracy = 0.75)"),
        (
            {"patience": 2},
            [0.5, 0.75, None, 0.75, None, 0.25],
            "2 evaluations without a better result than accuracy 75.00% in epoch 2 (patience = 2)",
        ),
        ({"patience": 2}, [0.5, 0.25, 0.625, 0.5], None),
        (  # what is not a number is no best, in the first evaluation or later
            {"patience": 2},
            [math.nan, math.nan, 0.5, math.nan, 0.25],
            "2 evaluations without a better result than accuracy 50.00% in epoch 3 (patience = 2)",
        ),
        ({"stop_at_accuracy": 0.75}, [math.nan, 0.75], "accuracy 75.00% (stop-at-accuracy = 0.75)"),
        ({"patience": 1, "epochs": 2}, [0.5, 0.25], None),  # the budget ends it
        ({}, [1.0, 0.5, 0.5], None),
    ],
    ids=str,
)
def test_run_stops_early_and_says_why(
    start: Start, settings: dict[str, Any], accuracies: list[float | None], reason: str | None
) -> None:
    run = start(**{"epochs": 9, **settings})
    run.recorder.add_round(two_rounds()[0])
    stops = [
        run.end_epoch(number, accuracy and measured(accuracy))
        for number, accuracy in enumerate(accuracies, 1)
    ]
    assert stops == [False] * (len(accuracies) - 1) + [reason is not None]
    assert (f"stopping early: {reason}" in run.lines) == (reason is not None)
    run.finish()
    assert run.summary()["stopped_early"] == reason
    assert run.summary()["interrupted"] is False


def test_result_of_an_async_evaluation_is_added_to_its_epoch(start: Start) -> None:
    """That of round 2 arrives 0.5 s after round 3, in which epoch 2 has begun; epoch 2 has none."""
    profiles = [*PROFILES, WorkerProfile("cpu:3", role="evaluate", partition_id=3)]
    run = start(profiles=profiles, epochs=9, stop_at_accuracy=0.75)
    run.train()
    assert run.recorder.history.best is None
    run.now = 1041.0
    run.recorder.add_round(dataclasses.replace(two_rounds()[0], round=3, epoch=2))
    run.now = 1041.5
    arrays = ArrayRecord({"w": Array(np.full(3, 1.0, np.float32))})
    late = EpochEnd(1, 2, arrays, measured(0.75), late=True, busy_seconds=2.5)
    assert run.recorder.add_epoch(late)
    reason = "accuracy 75.00% (stop-at-accuracy = 0.75), known 1 round and 3.5 s later"
    assert run.lines[-2:] == [
        "epoch 1/9  accuracy 75.00%  (arrived 1 round and 3.5 s later)",
        f"stopping early: {reason}",
    ]
    assert run.recorder.history.best == Best(2, 1, 0.75)
    run.end_epoch(2)
    (row_of, other) = csv.DictReader((run.recorder.folder.path / "epochs.csv").open())
    named = ("epoch", "rounds", "accuracy", "result_rounds", "result_seconds")
    assert [row_of[name] for name in named] == ["1", "2", "0.75", "3", "22.0"]  # 18.5 + 3.5
    assert [other[name] for name in named] == ["2", "3", "", "", ""]
    run.finish()
    summary = run.summary()
    assert summary["stopped_early"] == reason
    assert summary["async_evaluation_seconds"] == 2.5
    assert summary["async_evaluation"] == {
        "workers": ["evaluate-3 (cpu:3)"],
        "results": 1,
        "without_result": 1,
        **{"mean_rounds_late": 1.0, "mean_seconds_late": 3.5},
    }
    assert (
        "async evaluation: evaluate-3 (cpu:3) computed for 2.5 s; 1 result, "
        "1 round and 3.5 s late on average, 1 epoch without a result"
    ) in run.lines


def test_wall_clock_does_not_depend_on_when_a_round_is_recorded(start: Start) -> None:
    """The next orders may have left since. The model of 1038 was there at 1037.75."""
    run = start()
    run.seconds_since_round = 0.25
    run.train()
    durations = run.recorder.history.durations
    assert (durations.setup_seconds, durations.wall_seconds) == (19.25, 18.5)


def test_wall_clock_of_a_resumed_run_has_the_evaluation_before_its_checkpoint(
    start: Start,
) -> None:
    run = start()
    run.recorder.at_once = True
    run.train()  # until 1038, 18.5 s after the first plan
    run.now = 1043.0
    state = run.recorder.history.state_dict()
    for first_evaluation, seconds in ((None, 6.25 + 11), (1003.0, 27)):
        resumed = start(name="resumed")
        resumed.recorder.at_once = True  # it need not write its results
        resumed.recorder.history.load_state_dict(state)
        if first_evaluation:  # repeated, because the run ended within it
            resumed.recorder.history.start_clock(first_evaluation)
        for resumed.now in (1019.0, 1030.0):
            resumed.recorder.add_round(two_rounds()[1])  # of 6.25 s
        assert resumed.recorder.history.durations.wall_seconds == 18.5 + 5 + seconds
    assert run.recorder.history.durations.wall_seconds == 18.5


def test_role_of_a_worker_that_evaluates_follows_from_how_long_it_evaluated(start: Start) -> None:
    """The last model took 0.1 s with its help, and another one, alone, 1.7 s: a gap of 16."""
    run = start([*PROFILES, WorkerProfile("cpu:3", role="evaluate", partition_id=3)])
    run.recorder._strategy.registry.workers[0].training_seconds_per_step = 0.1
    run.train()
    arrays = ArrayRecord({"w": Array(np.full(3, 1.0, np.float32))})
    run.recorder.add_epoch(EpochEnd(1, 2, arrays, measured(0.75), late=True, busy_seconds=1.7))
    run.end_epoch(2, measured(0.75))
    run.recorder.history.durations.evaluation_seconds = 0.1
    run.finish()
    gains = "training 1.00, role=evaluate 1.01"  # 0.2 s of evaluating for 16.75 s of training
    assert f"  evaluate-3 (cpu:3): best used for role=evaluate (expected speed-up: {gains})" in (
        run.lines
    )


def test_accuracy_that_is_not_a_number_is_said_once(run: Run) -> None:
    run.train(measured(math.nan))
    run.end_epoch(2, measured(0.25))
    run.end_epoch(3, measured(math.nan))
    (line,) = [line for line in run.lines if line.startswith("warning: ")]
    assert line.startswith("warning: accuracy is not a number, so best_model and ")
    run.finish()
    summary = run.summary()
    assert (summary["accuracy"], summary["best_accuracy"]) == (None, 0.25)


def test_metric_to_minimize_has_its_best_model_and_patience(start: Start) -> None:
    run = start(epochs=9, patience=2, metric=Metric("rmse", "min"))
    errors = [MetricRecord({"rmse": error, "loss": 0.5}) for error in (1.25, 0.5, 0.75, 0.625)]
    run.train(errors[0])
    ended = [run.end_epoch(number, error) for number, error in enumerate(errors[1:], 2)]
    assert ended == [False, False, True]
    assert run.recorder.history.best is not None
    assert (run.recorder.history.best.epoch, run.recorder.history.best.value) == (2, 0.5)
    assert run.lines[-1] == (
        "stopping early: 2 evaluations without a better result than rmse 0.5 in epoch 2 "
        "(patience = 2)"
    )
    run.finish()
    assert "done: test rmse 0.625 after" in run.screen.getvalue()
    summary = run.summary()
    keys = ("accuracy", "best_accuracy", "metric", "best_metric", "metric_name", "metric_mode")
    assert [summary[key] for key in keys] == [None, None, 0.625, 0.5, "rmse", "min"]


# --- TensorBoard


def events_of(run: Run) -> dict[tuple[str, int], float]:
    """Return the values that TensorBoard reads, by name and round."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.recorder.folder.path / "tensorboard")).Reload()
    return {(tag, e.step): e.value for tag in read.Tags()["scalars"] for e in read.Scalars(tag)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interrupted", [False, True])
def test_events_have_the_numbers_of_rounds_and_epochs(start: Start, interrupted: bool) -> None:
    pytest.importorskip("tensorboard")
    run = start(tensorboard=True)
    run.recorder.at_once = interrupted
    run.train(measured(0.75))
    run.interrupt() if interrupted else run.finish()
    numbers = events_of(run)
    assert (numbers["round/train_loss", 1], numbers["round/round_seconds", 2]) == (1.5, 6.0)
    assert numbers["slow-2 (cpu:2)/compute_seconds", 2] == 4.0
    assert ("fast-1 (cpu:1)/loss", 2) not in numbers  # it failed: there is none
    assert (numbers["epoch/accuracy", 2], numbers["epoch/all_loss_mean", 2]) == (0.75, 1.0)
    assert ("epoch/device_seconds", 2) not in numbers


def test_nothing_is_removed_if_the_model_can_be_saved_nowhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    run = start()
    run.train(measured(0.75))
    own = Path("a temporary folder")
    own.mkdir()
    monkeypatch.setattr("flower_blsgd.results.folder.RunFolder.write_model", fail)
    monkeypatch.setattr("tempfile.mkdtemp", fail)
    assert refusal(run.finish).endswith("nor in a temporary folder (no space left)")
    assert own.is_dir()


@pytest.mark.filterwarnings("ignore")
def test_events_after_the_round_of_a_resume_are_hidden(start: Start) -> None:
    pytest.importorskip("tensorboard")
    run = start(tensorboard=True)
    run.train(measured(0.75))
    run.recorder._close()
    run.recorder.history.resumed = [1]
    run.recorder.open_folder(run.recorder.folder)
    run.finish()
    assert {step for _, step in events_of(run)} == {1}
