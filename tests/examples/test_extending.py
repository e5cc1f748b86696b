"""docs/how-to/extending.md: every block of code in it runs, in the order in which it stands."""

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_blsgd import TrainReport
from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.results.folder import EpochRow
from flower_blsgd.tasks.check import check_task

from ..results.records import epoch
from .commands import ROOT, two_nodes

PAGE = (ROOT / "docs/how-to/extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LOCAL_GRID = "LocalGrid("
LOGGERS = ("import wandb", "import mlflow")
INCLUDED = re.compile(r"# (examples/\S+\.py)\n(.*)", re.DOTALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all blocks but that with processes, in the repository; return what they defined."""
    monkeypatch.chdir(ROOT)
    found: dict[str, Any] = {"__name__": "page"}
    found["grid"] = two_nodes(lambda: found["app"], {})
    found["context"] = Context(1, 1, {}, RecordDict(), {})
    for block in BLOCKS:
        if not any(text in block for text in (LOCAL_GRID, *LOGGERS)):
            exec(compile(block, "docs/how-to/extending.md", "exec"), found)
    return found


def test_blocks_from_examples_are_the_examples_code() -> None:
    included = [match for block in BLOCKS if (match := INCLUDED.match(block))]
    assert len(included) == 1
    for path, code in (match.groups() for match in included):
        assert code in (ROOT / path).read_text()


def test_blocks_do_what_they_say(names: dict[str, Any]) -> None:
    workers = [Participant(True, 8), Participant(False, 8), Participant(False, 8, given_steps=3)]
    assert names["HalfForSlow"](8).local_steps(workers) == [8, 4, 3]
    assert names["RootWeighting"]().weights([64.0, 16.0, 0.0]) == [8 / 12, 4 / 12, 0.0]
    check_task(names["own_task"])
    strategy = names["strategy"]
    # (8 + 4) x 8 = 96 of 192 samples a round: two rounds an epoch. start: 4, fit: to epoch 3,
    # which is 2 more, the stream's start: 2.
    assert (strategy.planner.progress.epoch, strategy.planner.progress.rounds_total) == (5, 10)
    assert [worker.fast for worker in strategy.registry.workers] == [True, False]
    losses = strategy.planner.table.losses
    assert losses[losses < float("inf")].mean() < 0.69  # ln 2 is what guessing costs
    assert list(names["result"].train_metrics_clientapp) == [1, 2]


def test_loop_by_hand_reports_what_local_sgd_does(names: dict[str, Any]) -> None:
    strategy = names["Printing"](192, 8, 4, local_steps_slow=2, learning_rate=0.1)
    arrays = names["ArrayRecord"](names["my_model"]().state_dict())
    orders = list(strategy.configure_train(1, arrays, ConfigRecord(), names["grid"]))
    replies = []
    for order in orders:
        message = Message(order.content, dst_node_id=100, message_type="train.by_hand")
        context = Context(1, 100, {"device": "cpu"}, RecordDict(), {})
        replies.append(names["app"](message, context))
    sent = names["TrainOrder"].from_message(orders[0])
    report = TrainReport.from_content(replies[0].content, sent)
    assert (report.completed_steps, len(report.losses)) == (4, 32)
    assert report.mean_loss == pytest.approx(0.69, abs=0.3)


@pytest.mark.processes
def test_local_grid_runs_an_ordinary_app(names: dict[str, Any]) -> None:
    (block,) = (block for block in BLOCKS if LOCAL_GRID in block)
    exec(compile(block, "docs/how-to/extending.md", "exec"), names)
    assert list(names["result"].train_metrics_clientapp) == [1, 2]
    assert names["result"].train_metrics_clientapp[2]["train-loss"] < 2.0


def run_callback(block: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run a block in a stand-in for training: two epochs, of which the first was not evaluated."""
    (folder / "summary.json").write_text("{}")

    def train(task: str, on_epoch_end: Callable[[EpochRow], object], **settings: Any) -> Any:
        assert (task, settings) == ("digits", {"epochs": 20, "seed": 0})
        for row in (epoch(1, accuracy=None), epoch(2, accuracy=0.75)):
            on_epoch_end(row)
        return SimpleNamespace(folder=folder)

    monkeypatch.setattr("flower_blsgd.train", train, raising=False)
    exec(compile(block, "docs/how-to/extending.md", "exec"), {})


@pytest.mark.parametrize(("block", "steps"), [(0, [2, 4]), (1, [1, 2])], ids=["wandb", "mlflow"])
def test_callback_of_a_logger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: int, steps: list[int]
) -> None:
    """With stand-ins: one of them wants an account."""
    logged: dict[int, dict[str, float]] = {}
    run = SimpleNamespace(log=lambda numbers, step: logged.update({step: numbers}))
    wandb = SimpleNamespace(init=lambda project, config: contextlib.nullcontext(run))
    mlflow = SimpleNamespace(start_run=contextlib.nullcontext, log_metrics=run.log)
    mlflow.log_params = mlflow.log_artifacts = str
    for name, module in (("wandb", wandb), ("mlflow", mlflow)):
        monkeypatch.setitem(sys.modules, name, module)
    run_callback(next(b for b in BLOCKS if LOGGERS[block] in b), monkeypatch, tmp_path)
    assert list(logged) == steps
    first, last = logged.values()
    assert "accuracy" not in first
    assert (last["accuracy"], last["all_loss_mean"]) == (0.75, 1.0)
    assert all(type(value) in (int, float) for value in first.values())


def test_files_that_the_page_names_exist() -> None:
    for path in re.findall(r"`((?:flower_blsgd|clients|tests|examples)/[\w/.]+)`", PAGE):
        assert Path(ROOT, path).exists(), path
