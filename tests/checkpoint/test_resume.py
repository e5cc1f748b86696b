"""Runs that go on where they were: what is compared, what is refused, what stays on disk."""

import contextlib
import copy
import csv
import functools
import io
import itertools
import json
import logging
import resource
import shutil
import signal
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from flwr.app import Message
from flwr.serverapp.exception import AggregationError
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file
from torch import Tensor, nn

import flower_blsgd
from flower_blsgd import Task
from flower_blsgd.checkpoint.resume import resume_command
from flower_blsgd.checkpoint.store import CheckpointStore
from flower_blsgd.config import CHANGEABLE, RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.results.folder import RunFolder, alone_in
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.results.recorder import RunRecorder
from flower_blsgd.run import train_on
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.connector import Connector
from flower_blsgd.tasks import register_task
from flower_blsgd.tasks.task import correct

from ..grids.processes import wait_until
from ..in_process_grid import FastGrid, Handler, MailGrid
from ..log_capture import captured_log
from ..refusal import refusal
from ..results.records import epoch, record, row, two_rounds
from ..test_run import NODES, node_of

EVERY_ROUND = 1e-9
FOUR = {**NODES[0], "seconds-per-step": 50.0}, {**NODES[1], "seconds-per-step": 100.0}


class BusyGrid(FastGrid):
    """Workers that evaluate are busy: only the next order to train ends that."""

    def __init__(self, handlers: Mapping[int, Handler]) -> None:
        super().__init__(handlers)
        self.busy: set[int] = set()

    def _answer(self, message: Message) -> Message | None:
        kind, node_id = message.metadata.message_type, message.metadata.dst_node_id
        assert not (node_id in self.busy and kind == "query.momentum")
        if kind == "evaluate":
            self.busy.add(node_id)
        elif kind == "train":
            self.busy.clear()
        return super()._answer(message)


class View(ProgressView):
    """Prints to a text, and does something after a round."""

    def __init__(self, at: int = 0, do: Callable[[], object] = lambda: None) -> None:
        self.screen = io.StringIO()
        console = Console(file=self.screen, width=1000)
        super().__init__(
            Budget(3), console, on_round_end=lambda record: record.round == at and do()
        )

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()


def config_of(**changes: Any) -> RunConfig:
    """Return settings of 3 epochs of 4 rounds of 12 samples."""
    settings: dict[str, Any] = {
        "task": "points",
        "epochs": 3,
        "batch_size": 4,
        "local_steps_fast": 2,
        "local_steps_slow": 1,
        "threads": 1,
        "learning_rate": 0.3,
        "out": "run",
    }
    return RunConfig(**(settings | changes))


def train(
    view: View | None = None,
    fail_in: Sequence[int] = (),
    fault: str = "raises",
    failing: Sequence[int] = (0, 1),
    evaluator: int | None = None,
    ahead: bool = False,
    **changes: Any,
) -> RunRecorder:
    """Train; `evaluator` adds a worker with ``role=evaluate`` that answers at such a pull.

    With `ahead`, rounds are sent while the one before is recorded.
    """
    config = config_of(**changes)
    nodes = FOUR if evaluator is None else (*FOUR, {"role": "evaluate", "partition-id": 2})
    handlers = {50 + i: node_of(config, node) for i, node in enumerate(nodes)}
    grid = MailGrid(handlers) if ahead else BusyGrid(handlers)
    grid.pulls_in_vain = evaluator or 0
    for worker, server_round in itertools.product(failing, fail_in):
        grid.fail_at(worker, server_round, fault)
    return train_on(grid, config, view or View())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    register_task(points(), "points")


def points() -> Task:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(80, 5, generator=generator)
    labels = (inputs[:, 0] + 0.5 * torch.randn(80, generator=generator) > 0).long()
    return Task(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)),
        train=(inputs[:48], labels[:48]),
        test=(inputs[48:], labels[48:]),
    )


def said(view: View, beginning: str) -> bool:
    return any(line.startswith(beginning) for line in view.lines)


def interrupt() -> None:
    raise KeyboardInterrupt


def fill_disk() -> None:
    """Let no file grow, in no folder."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def disk_cleared() -> Iterator[None]:
    """Undo `fill_disk`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    logging.disable()  # what captures the log writes to a file
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logging.disable(logging.NOTSET)


def assert_results_of_an_interrupted_run(rounds: int) -> None:
    """Its results so far are there, with the accuracy of an epoch before."""
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["interrupted"], summary["rounds"]) == (True, rounds)
    assert summary["accuracy"] is not None
    assert Path("run/model.safetensors").is_file()


def rows_of(folder: str) -> list[dict[str, str]]:
    return list(csv.DictReader((Path(folder) / "epochs.csv").read_text().splitlines()))


def left_by(folder: Path) -> dict[str, Any]:
    """Return what a run left, but for what depends on time."""
    rows = list(csv.DictReader((folder / "epochs.csv").open()))
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    taken = [one["round_seconds"] + one["planning_seconds"] for one in rounds]
    assert summary["training_seconds"] == pytest.approx(sum(taken))
    assert summary["training_seconds"] <= summary["wall_seconds"]
    timed = ("seconds", "share", "predicted", "measured", "resumed", "workers", "slow_devices")
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "best": {
            name: tensor.tolist()
            for name, tensor in load_file(folder / "best_model.safetensors").items()
        },
        "epochs": [{k: v for k, v in row.items() if "seconds" not in k} for row in rows],
        "rounds": [(one["round"], one["epoch"], one["train_loss"]) for one in rounds],
        "device_seconds": [
            [worker["completed_steps"] for worker in one["workers"]] for one in rounds
        ],
        "summary": {k: v for k, v in summary.items() if not any(t in k for t in timed)},
    }


@functools.cache
def _undisturbed() -> dict[str, Any]:
    return left_by(train(out="undisturbed").folder.path)


@pytest.fixture
def undisturbed() -> dict[str, Any]:
    return copy.deepcopy(_undisturbed())


# --- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minutes", "killed_in", "resumed_after"),
    [(EVERY_ROUND, 7, 6), (EVERY_ROUND, 9, 8), (10.0, 7, 4), (10.0, 12, 8)],
)
def test_run_that_dies_goes_on_in_its_folder_to_the_same_bits(
    undisturbed: dict[str, Any], minutes: float, killed_in: int, resumed_after: int
) -> None:
    """A checkpoint of every round, or of every epoch; the last lines are torn, or too many."""
    with pytest.raises(KeyboardInterrupt):
        train(View(killed_in, interrupt), checkpoint_minutes=minutes)
    with Path("run/rounds.jsonl").open("a") as file:
        file.write('{"round": 99, "epo')
    view = View()
    report = train(view, resume="run", checkpoint_minutes=minutes)
    assert f"resuming {Path('run').resolve()} after round {resumed_after}" in view.lines
    assert left_by(Path("run")) == undisturbed
    assert report.summary["resumed"] == [resumed_after]
    assert report.folder.path == Path("run").resolve()
    assert tomllib.loads(Path("run/config.toml").read_text())["resume"] == ""
    best = max(undisturbed["epochs"], key=lambda one: float(one["accuracy"]))
    with safe_open("run/best_model.safetensors", "np") as model:
        about = model.metadata()
    assert about == {"round": best["rounds"], "value": best["accuracy"]}


@pytest.mark.parametrize(
    ("numbers", "after", "code"),
    [
        ([signal.SIGINT], 6, None),
        ([signal.SIGTERM], 8, 143),
        ([signal.SIGINT], 12, None),
        ([signal.SIGHUP, signal.SIGHUP], 6, 129),  # a shell repeats that of the kernel
        ([signal.SIGTERM, signal.SIGHUP], 12, 143),  # as systemd ends a session
    ],
    ids=["in an epoch", "at its end", "at the end", "closed terminal", "closed session"],
)
def test_signal_lets_the_round_finish_and_the_run_goes_on_from_it(
    undisturbed: dict[str, Any], numbers: list[int], after: int, code: int | None
) -> None:
    known = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = [signal.getsignal(number) for number in known]
    view = View(after, lambda: [*map(signal.raise_signal, numbers)])
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        train(view)
    assert getattr(ended.value, "code", None) == code
    (command,) = ended.value.__notes__
    assert command.endswith("run --resume run")
    assert said(view, "finishing the round")
    assert [signal.getsignal(number) for number in known] == handlers
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        view = View(after + 1, lambda: signal.raise_signal(signal.SIGHUP))
        assert train(view, resume="run").summary["resumed"] == [after]
    finally:
        signal.signal(signal.SIGHUP, handlers[2])
    assert left_by(Path("run")) == undisturbed


@pytest.mark.parametrize(
    ("minutes", "at", "do", "resumed_after"),
    [
        (EVERY_ROUND, 7, interrupt, 6),
        (10.0, 6, lambda: signal.raise_signal(signal.SIGINT), 7),
        (10.0, 8, lambda: signal.raise_signal(signal.SIGINT), 8),  # the end of an epoch
    ],
)
def test_checkpoint_is_written_when_no_round_is_under_way(
    undisturbed: dict[str, Any],
    minutes: float,
    at: int,
    do: Callable[[], object],
    resumed_after: int,
) -> None:
    """Rounds are sent ahead: a due checkpoint and a signal wait for the one under way."""
    with pytest.raises(KeyboardInterrupt):
        train(View(at, do), ahead=True, checkpoint_minutes=minutes)
    report = train(resume="run", ahead=True, checkpoint_minutes=minutes)
    assert report.summary["resumed"] == [resumed_after]
    assert left_by(Path("run")) == undisturbed


def test_signal_while_the_replies_are_awaited_ends_the_run_after_this_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, calls = MailGrid.receive, itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return receive(*arguments)

    monkeypatch.setattr(MailGrid, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(ahead=True)
    assert_results_of_an_interrupted_run(6)


def test_run_of_0_1_0_with_a_setting_that_is_gone_is_resumed_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("elsewhere").mkdir()
    train(epochs=1)
    file, store = Path("run/config.toml"), CheckpointStore(Path("run"), 2)
    file.write_text('profile = "speeds.json"\n' + file.read_text())
    checkpoint = store.newest()
    assert checkpoint is not None
    checkpoint.values["run"]["config"]["profile"] = "speeds.json"
    store.save(checkpoint, checkpoint.values["round"])
    for epochs, folder in ((2, "run"), (3, "../run")):
        train(resume=folder, epochs=epochs)
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert "profile" not in Path("../run/config.toml").read_text()


def test_second_signal_and_one_in_an_evaluation_end_at_once() -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(View(6, twice))
    assert not Path("run/summary.json").exists()
    assert train(resume="run").summary["resumed"] == [4]


def test_signal_in_an_evaluation_ends_it_and_loses_nothing_before_it(
    undisturbed: dict[str, Any],
) -> None:
    """In that of epoch 1, in the same one when the run goes on, and in that of epoch 2."""
    calls: list[int] = []

    def interrupted(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        if len(calls) in (2, 4, 7):  # the first one of each process tries the task before the run
            signal.raise_signal(signal.SIGINT)
        return correct(outputs, targets)

    task = replace(points(), metric=interrupted, evaluation_batch_size=32)  # one batch
    register_task(task, "points")
    for resume, epochs, rounds in (("", 0, 4), ("run", 0, 4), ("run", 1, 8)):
        view = View()
        with pytest.raises(KeyboardInterrupt) as ended:
            train(view, resume=resume)
        (command,) = ended.value.__notes__
        assert command.endswith("run --resume run")
        assert wait_until(functools.partial(said, view, "abandoning the evaluation; press again"))
        summary = json.loads(Path("run/summary.json").read_text())
        assert (summary["epochs"], summary["rounds"]) == (epochs, rounds)
        assert Path("run/model.safetensors").exists()
        Path("run/model.safetensors").unlink()
    assert train(resume="run").summary["resumed"] == [4, 4, 8]
    assert left_by(Path("run")) == undisturbed


def test_pending_async_evaluation_is_repeated_after_a_resume(undisturbed: dict[str, Any]) -> None:
    """Interrupted after round 6, with the model of round 4 outstanding; training has equal bits."""
    whole = train(evaluator=3, out="whole").summary
    with pytest.raises(KeyboardInterrupt):
        train(View(6, functools.partial(signal.raise_signal, signal.SIGINT)), evaluator=3)
    (first,) = rows_of("run")
    assert (first["epoch"], first["rounds"], first["accuracy"]) == ("1", "4", "")
    summary = train(evaluator=1, resume="run").summary
    assert summary["resumed"] == [6]
    rows, expected = rows_of("run"), rows_of("whole")
    named = ("epoch", "rounds", "accuracy", "loss")
    assert [[row[n] for n in named] for row in rows] == [
        [row[n] for n in named] for row in expected
    ]
    assert [row["result_rounds"] for row in rows] == ["8", "10", ""]
    assert [row["result_rounds"] for row in expected] == ["8", "12", ""]
    assert (summary["best_accuracy"], summary["loss"]) == (whole["best_accuracy"], whole["loss"])
    left, of_whole = left_by(Path("run")), left_by(Path("whole"))
    assert left["best"] == of_whole["best"]
    assert left["model"] == of_whole["model"] == undisturbed["model"]


def test_evaluation_that_raises_loses_nothing_before_it(undisturbed: dict[str, Any]) -> None:
    """The checkpoint is on the disk before the evaluation begins."""
    calls: list[int] = []

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        if len(calls) > 2:  # the first tries the task, the second is that of epoch 1
            folder = Path("run/checkpoint")
            assert wait_until(lambda: any(folder.glob("round-000000008.*")))
            raise RuntimeError("labels of another data set")
        return correct(outputs, targets)

    register_task(replace(points(), metric=broken, evaluation_batch_size=32), "points")
    with pytest.raises(UsageError) as ended:
        train()
    assert str(ended.value) == (
        "task = 'points': evaluating after round 8 raised RuntimeError: labels of another data set"
    )
    assert ended.value.__notes__[0].endswith("run --resume run")
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["epochs"], summary["rounds"]) == (1, 8)
    assert Path("run/model.safetensors").exists()
    register_task(points(), "points")
    assert train(resume="run").summary["resumed"] == [8]
    assert left_by(Path("run")) == undisturbed


def test_resume_that_ends_before_it_trains_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the workers start, a refusal there, and a disk on which no file can grow."""
    train(epochs=1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for error in (KeyboardInterrupt(), UsageError("no fast worker"), None):
        with monkeypatch.context() as patch, disk_cleared():
            if error:
                patch.setattr(Connector, "refresh", Mock(side_effect=error))
            else:
                fill_disk()
            with pytest.raises((KeyboardInterrupt, UsageError)) as got:
                train(resume="run")
        assert got.value.__notes__[-1].endswith("run --resume run")
        after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
        assert after == before
    assert train(resume="run").summary["epochs"] == 3


@pytest.mark.parametrize("fails", [5, 7, 10])
def test_resume_after_three_rounds_that_nobody_completed_leaves_them_behind(
    fails: int,
) -> None:
    """Within an epoch, of which the rest is left out, and at the end of the run."""
    with pytest.raises(AggregationError, match=f"round {fails + 2}: no worker") as ended:
        train(fail_in=range(fails, fails + 3))
    assert ended.value.__notes__[0].endswith("run --resume run")
    assert_results_of_an_interrupted_run(fails + 2)
    with captured_log() as log:
        report = train(resume="run", fail_in=range(fails, fails + 3))
    assert report.summary["resumed"] == [fails + 2]
    lost = [line for line in log.lines(30) if line.startswith("no momentum in the checkpoint")]
    assert len(lost) == 1
    found = left_by(Path("run"))
    assert [one[0] for one in found["rounds"]] == list(range(1, 13))
    assert report.summary["accuracy"] > 0.5


def test_resume_after_all_workers_lost_the_model_begins_where_it_was_known() -> None:
    """Gradients are averaged in rounds of 2 x 4 of 48 samples; the model of round 8 is lost."""
    settings: dict[str, Any] = {"average": "gradients", "steps": "one", "ahead": True}
    undisturbed = train(out="whole", **settings)
    with pytest.raises(AggregationError, match="round 9: no worker succeeded"):
        train(fail_in=[9], **settings)
    report = train(resume="run", **settings)
    assert report.summary["resumed"] == [6]
    assert report.history.best == undisturbed.history.best
    assert left_by(Path("run"))["model"] == left_by(Path("whole"))["model"]


def test_run_whose_slow_worker_is_left_out_is_resumed() -> None:
    settings: dict[str, Any] = {
        "algorithm": "biased-local-sgd",
        "checkpoint_minutes": EVERY_ROUND,
        "fail_in": (1, 2, 3),
        "failing": (1,),
    }
    with pytest.raises(KeyboardInterrupt):
        train(View(4, interrupt), **settings)
    assert train(resume="run", **settings).summary["resumed"] == [3]


def test_run_that_trained_on_nothing_is_not_done() -> None:
    """All workers die in its only round."""
    with pytest.raises(AggregationError, match="round 1: no worker succeeded"):
        train(fail_in=[1], fault="dies", seconds=1e-9)
    assert json.loads(Path("run/summary.json").read_text())["interrupted"] is True


def test_without_checkpoints_nothing_of_it_is_done() -> None:
    view = View(6, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as ended:
        train(view, keep_checkpoints=0)
    assert ended.value.__notes__ == ["this run cannot be resumed: keep-checkpoints = 0"]
    assert_results_of_an_interrupted_run(6)
    left = {path.name for path in Path("run").iterdir()}
    assert left - {"run.log"} == {
        *("config.toml", "rounds.jsonl", "epochs.csv", "summary.json", "model.safetensors"),
        "README.md",
    }
    assert "has no checkpoint" in refusal(train, resume="run")


def test_budget_in_seconds_goes_on_within_an_epoch() -> None:
    """Rounds of 100 s on simulated devices, and real seconds of transfer; four in an epoch."""
    settings: dict[str, Any] = {"epochs": 99, "clock": "device", "decay_epochs": ""}
    train(seconds=1050, out="whole", **settings)
    train(seconds=450, **settings)
    line = refusal(train, seconds=450, resume="run", **settings)
    assert "of 450 seconds of training done; to continue, " in line
    assert line.endswith(" --resume run -s seconds=N")
    view = View(9, lambda: signal.raise_signal(signal.SIGINT))  # 900 of 850 s, before evaluating
    with pytest.raises(KeyboardInterrupt):
        train(view, seconds=850, resume="run", **settings)
    assert train(seconds=850, resume="run", **settings).summary["rounds"] == 9
    Path("run/summary.json").unlink()  # as if it had been killed before it wrote its results
    Path("run/model.safetensors").unlink()
    train(seconds=850, resume="run", **settings)
    lines = Path("run/epochs.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1", "2", "3"]
    assert Path("run/model.safetensors").exists()
    summary = train(seconds=1050, resume="run", **settings).summary
    assert (summary["epochs"], summary["rounds"], summary["resumed"]) == (3, 11, [5, 9, 9])
    assert left_by(Path("run"))["model"] == left_by(Path("whole"))["model"]


def test_best_model_of_an_epoch_that_was_resumed_in_the_middle_stays_the_best() -> None:
    """The budget ends in epoch 2 with the best model of all; its row goes, the model stays."""
    accuracies = iter([0.5, 0.5, 0.75, 0.5, 0.625, 0.5])  # each process tries the task first

    def given(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.full((len(targets),), next(accuracies))

    register_task(replace(points(), metric=given, evaluation_batch_size=32), "points")
    settings: dict[str, Any] = {"epochs": 99, "clock": "device", "decay_epochs": ""}
    train(seconds=450, **settings)
    summary = train(seconds=1050, resume="run", **settings).summary
    with safe_open("run/best_model.safetensors", "np") as model:
        assert model.metadata() == {"round": "5", "value": repr(summary["best_accuracy"])}
    assert (summary["best_accuracy"], summary["epochs"]) == (0.75, 3)


def test_stop_at_accuracy_is_refused_where_the_metric_is_another() -> None:
    register_task(replace(points(), metric_mode="min", metric_name="error"), "points")
    line = refusal(train, stop_at_accuracy=0.5)
    assert line.startswith("stop-at-accuracy = 0.5: the task's metric is error; leave")


# --- settings -----------------------------------------------------------------------------------


def test_finished_run_goes_on_with_more_epochs_and_says_what_changed() -> None:
    train(epochs=2)
    line = refusal(train, epochs=2, resume="run")
    assert line.startswith("run is finished: 2 of 2 epochs done; to continue, ")
    assert line.endswith("run --resume run -s epochs=N")
    view = View()
    summary = train(view, epochs=3, evaluate_on="server", resume="run").summary
    assert (summary["epochs"], summary["rounds"], summary["resumed"]) == (3, 12, [8])
    assert summary["samples"] == 12 * 12
    at = view.lines.index(f"resuming {Path('run').resolve()} after round 8")
    assert view.lines[at + 1 : at + 4] == [
        "  epochs = 3 instead of 2",
        "  evaluate-on = 'server' instead of 'workers'",
        "  decay-epochs in percent and schedules are shares of the new budget",
    ]
    assert tomllib.loads(Path("run/config.toml").read_text())["epochs"] == 3


def test_settings_of_a_resume_that_died_before_its_first_checkpoint_stay() -> None:
    train(epochs=1)
    with pytest.raises(KeyboardInterrupt):
        train(View(5, interrupt), epochs=2, resume="run")
    default = RunConfig().epochs  # as if it was not given
    assert train(epochs=default, resume="run").summary["epochs"] == 2


@pytest.mark.parametrize(("key", "value"), [("stop-at-accuracy", 0.01), ("patience", 1)])
def test_run_that_stopped_early_names_the_setting_that_lets_it_go_on(
    key: str, value: float
) -> None:
    setting: dict[str, Any] = {key.replace("-", "_"): value}
    task = replace(points(), metric=lambda outputs, targets: torch.ones(len(targets)))
    register_task(task, "points")
    train(epochs=9, **setting)
    line = refusal(train, epochs=9, resume="run", **setting)
    assert f"({key} = {value}); to continue, " in line
    assert line.endswith(f" --resume run -s {key}=0")


def test_run_that_ended_by_patience_stays_ended_when_it_is_resumed() -> None:
    """Also if it was killed before its summary was written: no round is added."""
    task = replace(points(), metric=lambda outputs, targets: torch.ones(len(targets)))
    register_task(task, "points")
    before = train(epochs=9, patience=2).summary
    Path("run/summary.json").unlink()
    rounds = Path("run/rounds.jsonl").read_bytes()
    after = train(epochs=9, patience=2, resume="run").summary
    assert Path("run/rounds.jsonl").read_bytes() == rounds
    assert after["stopped_early"] == before["stopped_early"] is not None
    assert after["predicted"] == before["predicted"] is not None
    assert (after["epochs"], after["resumed"]) == (3, [before["rounds"]])
    assert "is finished: 2 evaluations" in refusal(train, epochs=9, patience=2, resume="run")


def test_settings_that_would_make_it_another_run_are_refused() -> None:
    train(epochs=1)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    line = refusal(train, learning_rate=0.1, seed=4, epochs=9, resume="run")
    assert line.startswith(
        "run cannot be resumed with learning-rate = 0.1 instead of 0.3, seed = 4 instead of 0; "
    )
    assert line.endswith(f"only these may change: {', '.join(CHANGEABLE)}")
    assert "out = 'other' instead of 'run'" in refusal(train, out="other", epochs=9, resume="run")
    # A setting that may change, and that was not given, is that of the run; `out` too.
    line = refusal(train, threads=0, out="", epochs=1, resume="run")
    assert line.startswith("run is finished: 1 of 1 epoch done")
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert set(CHANGEABLE) <= RunConfig().to_run_config().keys()


def test_what_cannot_be_resumed_is_refused_in_one_line() -> None:
    assert "runs/latest is not a run" in refusal(train, resume="runs/latest")
    with pytest.raises(KeyboardInterrupt):
        train(View(2, interrupt))
    line = refusal(train, resume="run")
    assert line.startswith("run has no checkpoint: it ended before the first one")
    assert f"run -c {Path('run').resolve()}/config.toml -s out=" in line
    shutil.rmtree("run")
    with pytest.raises(KeyboardInterrupt):
        train(View(7, interrupt))
    with alone_in(Path("run/checkpoint"), "busy"):
        assert refusal(train, resume="run").startswith("run is in use by a run; wait")
    (newest,) = Path("run/checkpoint").glob("round-*")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert "no checkpoint can be read" in refusal(train, resume="run")


def test_python_interface_takes_the_settings_of_the_run() -> None:
    train(epochs=1)
    values = {"resume": "run", "learning_rate": 0.1}
    line = refusal(flower_blsgd.train, **values)
    assert line.startswith("run cannot be resumed with learning_rate = 0.1 instead of 0.3; ")
    line = refusal(flower_blsgd.train, "digits", resume=Path("run"))
    assert line.startswith("run cannot be resumed with task = 'digits' instead of 'points'; ")
    train(epochs=1, task=register_task(points()), out="given")
    line = refusal(flower_blsgd.train, resume="given")
    assert line.endswith("not saved; pass it again: train(task, resume=...)")
    line = refusal(flower_blsgd.train, points(), resume="given", quiet=True)
    assert line.startswith("given is finished")
    assert line.endswith("train(task, resume='given', epochs=N)")
    own = RunConfig(weights="given-in-python:Root")
    assert resume_command(own, Path("run")) == "train('digits', resume='run', weights=...)"


# --- a disk that fails --------------------------------------------------------------------------


def test_results_folder_that_is_gone_costs_no_training_and_the_model_is_saved_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Any]
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    view = View(6, lambda: Path("run").rename("gone"))  # at once, whatever is being written
    with captured_log() as log:
        report = train(view)
    warnings = [line for line in view.lines if line.startswith("warning: ")]
    assert [line.split(" cannot be ")[0] for line in warnings] == [
        "warning: run.log",
        "warning: rounds.jsonl",
        "warning: epochs.csv",
        "warning: the model",
    ]
    assert all("No such file or directory" in line for line in warnings)
    assert sum("training continues" in line for line in log.lines()) == 1  # checkpoints
    elsewhere = report.folder.path
    assert elsewhere.parent == tmp_path / "temporary"
    assert f"it is in {elsewhere}" in warnings[-1]
    assert (elsewhere / "model.safetensors").read_bytes() == undisturbed["model"]
    assert json.loads((elsewhere / "summary.json").read_text())["epochs"] == 3
    its = tomllib.loads((elsewhere / "config.toml").read_text())
    assert (its["out"], its["resume"]) == ("", "")
    assert not flower_blsgd.load(elsewhere, task=points()).training


def test_full_disk_keeps_the_last_checkpoint_whole(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """No file can grow after round 6, in no folder; when it can again, the run goes on."""

    def fill() -> None:
        assert wait_until(lambda: any(Path("run/checkpoint").glob("round-000000005.*")))
        fill_disk()

    with disk_cleared(), pytest.raises(UsageError) as ended:
        train(View(6, fill), checkpoint_minutes=EVERY_ROUND)
    assert f"the model cannot be saved in {Path('run').resolve()} (" in str(ended.value)
    assert f"nor in {tempfile.gettempdir()}/blsgd-" in str(ended.value)
    assert train(resume="run", checkpoint_minutes=EVERY_ROUND).summary["resumed"] == [5]
    assert left_by(Path("run")) == undisturbed


# --- cut back -----------------------------------------------------------------------------------


def test_lines_are_cut_back_to_whole_ones_of_rounds_up_to_the_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.rounds_until(3) == []  # there may be no file
    first, second = two_rounds()
    for one in (first, second, record(row(0), round=3), record(row(0), round=4)):
        folder.add_round(one)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    torn = [lines[0], "", lines[0], lines[1][:50], "null", lines[1], '{"round": 3}', lines[3]]
    torn += ["[" * 100_000, lines[2][:-9]]
    (tmp_path / "rounds.jsonl").write_text("\n".join(torn))
    found = folder.rounds_until(3)
    assert repr(found) == repr([first, second])  # they have losses that are nan
    folder.cut_back(found, [epoch(1)])
    assert (tmp_path / "rounds.jsonl").read_text().splitlines() == lines[:2]
    folder.add_epoch(epoch(2))
    rows = list(csv.DictReader((tmp_path / "epochs.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2"]


def test_rounds_and_versions_that_differ_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(View(9, interrupt))
    lines = Path("run/rounds.jsonl").read_text().splitlines(keepends=True)
    Path("run/rounds.jsonl").write_text("".join(lines[2:]))
    monkeypatch.setattr("flower_blsgd.checkpoint.resume.versions", lambda: {"torch": "1.0"})
    view = View()
    summary = train(view, resume="run").summary
    assert (summary["rounds"], summary["samples"]) == (10, 10 * 12)
    assert "warning: 2 rounds are missing in rounds.jsonl and the figures" in view.lines
    (line,) = (line for line in view.lines if line.startswith("  written with "))
    assert line == f"  written with {{'torch': '{version('torch')}'}}: results may differ in bits"
