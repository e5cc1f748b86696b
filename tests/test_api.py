"""`train` as users call it: in scripts, on standard input, in event loops."""

import functools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import flower_blsgd
from flower_blsgd import Task, api
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.parts import make_local_grid
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.tasks import register_task
from scripts.flower_engine import session_members

from .grids.processes import is_helper, processes_below, wait_until
from .log_capture import captured_log
from .refusal import refusal
from .small_training import points_task

CORE = usable_cores()[0]
WORKERS = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow"
SMALL: dict[str, Any] = {
    "workers": WORKERS,
    "epochs": 2,
    "batch_size": 10,
    "local_steps_fast": 4,
    "local_steps_slow": 2,
    "threads": 1,
}
"""(4 + 2) x 10 = 60 samples a round."""


def processes_of_session(session: int) -> list[int]:
    return [pid for pid in session_members(session) if not is_helper(pid)]


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    before = processes_below()
    yield
    assert wait_until(lambda: processes_below() <= before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


small_task = functools.partial(points_task, 300, 100)


# --- scripts ----------------------------------------------------------------------------------

OWN = """
import torch
from flower_blsgd import Task

num_classes = 3

class Five(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, num_classes)

    def forward(self, inputs):
        return self.layer(inputs)

def task():
    data = (torch.arange(500.0).reshape(100, 5) / 500, torch.arange(100) % 3)
    return Task(model=Five, train=data, test=data)
"""

SCRIPT = """
import asyncio
import json
import sys

import torch
from torch import nn

import flower_blsgd
from flower_blsgd import Task

STEPS, OUT, SETTINGS = sys.argv[1].split(","), sys.argv[2], json.loads(sys.argv[3])
RESULTS = {}
generator = torch.Generator().manual_seed(0)
BIG = torch.randn(400, 60, generator=generator)  # 96,000 bytes: more than travels in a message


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(60, 2)

    def forward(self, inputs):
        return self.layer(inputs)


class Points(torch.utils.data.Dataset):
    def __init__(self, first, last):
        self.inputs = BIG[first:last]

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], int(self.inputs[index, 0] > 0)


def note(name, task, result, **more):
    loaded = flower_blsgd.load(result.folder, task=task)
    RESULTS[name] = {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "summary": result.summary,
        "folder": str(result.folder),
        "training": result.model.training or loaded.training,
        "weights": {k: v.tolist() for k, v in result.model.state_dict().items()},
        "loaded": {k: v.tolist() for k, v in loaded.state_dict().items()},
        **more,
    }


if "learns" in STEPS:
    task = Task(model=lambda: Net(), train=Points(0, 300), test=Points(300, 400))
    rounds, epochs = [], []

    async def inside_a_loop():  # as in a notebook
        return flower_blsgd.train(
            task,
            on_round_end=lambda record: rounds.append([record.round, record.epoch]),
            on_epoch_end=lambda row: epochs.append([row.epoch, row.accuracy]),
            **SETTINGS,
        )

    result = asyncio.run(inside_a_loop())
    right = result.model(BIG[300:]).argmax(1) == (BIG[300:, 0] > 0).long()
    note("learns", task, result, right=int(right.sum()), rounds=rounds, epochs=epochs)
if "own" in STEPS:
    import own

    own.num_classes = 4  # in the workers, too
    note("own", None, flower_blsgd.train("own:task", **SETTINGS))
with open(OUT, "w") as file:
    json.dump(RESULTS, file)
"""


def run_script(folder: Path, by_stdin: bool, *steps: str, **settings: Any) -> dict[str, Any]:
    """Run the script; return its results, and what it printed as "stdout" and "stderr"."""
    for name, text in (("own", OWN), ("script", SCRIPT)):
        (folder / f"{name}.py").write_text(text)
    arguments = [",".join(steps), "results.json", json.dumps({**SMALL, **settings})]
    running = subprocess.Popen(
        [sys.executable, "-" if by_stdin else "script.py", *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stdout, stderr = running.communicate(SCRIPT if by_stdin else "", timeout=250)
    assert running.returncode == 0, stdout + stderr
    assert wait_until(lambda: not processes_of_session(running.pid))
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    for run in results.values():
        assert run["weights"] == run["loaded"]
        assert not run["training"]
    return {**results, "stdout": stdout, "stderr": stderr}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(tmp_path_factory.mktemp("script"), False, "learns")


@pytest.mark.processes
def test_script_without_a_guard_trains_what_it_defines(script: dict[str, Any]) -> None:
    """300 samples of 60 a round are 5 rounds an epoch."""
    run = script["learns"]
    assert run["right"] / 100 == run["accuracy"] == run["summary"]["accuracy"] > 0.7
    assert run["loss"] == run["summary"]["loss"]
    assert json.loads((Path(run["folder"]) / "summary.json").read_text()) == run["summary"]
    assert Path(run["folder"]).name == "train-1"
    # The callbacks got every round and every epoch.
    assert run["rounds"] == [[number, 1 + (number > 5)] for number in range(1, 11)]
    assert [epoch for epoch, _ in run["epochs"]] == [1, 2]
    assert run["epochs"][-1][1] == run["accuracy"]
    assert (run["summary"]["samples"], run["summary"]["interrupted"]) == (600, False)
    assert "epoch 2/2" in script["stdout"]
    assert script["stderr"] == ""


@pytest.mark.processes
def test_stdin_gives_the_same_bits_and_is_quiet_also_with_a_task_of_a_module_here(
    script: dict[str, Any], tmp_path: Path
) -> None:
    stdin = run_script(tmp_path, True, "own", "learns", quiet=True)
    for key in ("weights", "accuracy"):
        assert stdin["learns"][key] == script["learns"][key]
    assert (stdin["stdout"], stdin["stderr"]) == ("", "")
    own = stdin["own"]
    assert own["summary"]["task"] == "own:task"
    assert [len(row) for row in own["weights"]["layer.weight"]] == [5, 5, 5, 5]
    assert Path(own["folder"]).name == "task-1"


# --- in this process ---------------------------------------------------------------------------


def test_log_level_survives_runs_that_overlap() -> None:
    logger = logging.getLogger("flwr")
    level, first, second = logger.level, api._quiet_flower(), api._quiet_flower()
    with captured_log("flwr") as log:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        logger.info("of a run")
        second.__exit__(None, None, None)
        logger.info("of nobody")
    assert logger.level == level
    assert log.lines(logging.INFO) == ["of nobody"]


@pytest.mark.processes
def test_callback_that_raises_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its workers get the data by value, so that there is nothing to compare.
    monkeypatch.setattr("flower_blsgd.tasks.task.hashlib", None)
    before = processes_below()
    level = logging.getLogger("flwr").level
    seen: list[RoundRecord] = []

    def stop_in_the_second_epoch(record: RoundRecord) -> None:
        seen.append(record)
        assert processes_below() > before
        if record.round == 7:
            raise LookupError("seven")

    with pytest.raises(LookupError, match=r"^seven\ntrain\(task, resume=.*\)$"):
        flower_blsgd.train(small_task(), on_round_end=stop_in_the_second_epoch, quiet=True, **SMALL)
    assert wait_until(lambda: processes_below() <= before)
    assert logging.getLogger("flwr").level == level
    assert [record.round for record in seen] == [1, 2, 3, 4, 5, 6, 7]
    summary = json.loads((folder / "runs" / "train-1" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert (summary["rounds"], summary["epochs"]) == (7, 1)
    # The model of the epoch that was whole.
    assert flower_blsgd.load(folder / "runs" / "latest", task=small_task()).weight.shape == (2, 4)


# --- refused before anything starts -----------------------------------------------------------


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that trains, and hands back the one line that refuses it."""

    def no_process(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr("flower_blsgd.engines.local.worker_process.start_worker", no_process)

    def run(task: Any = "digits", **settings: Any) -> str:
        before, level = sorted(folder.rglob("*")), logging.getLogger("flwr").level
        line = refusal(flower_blsgd.train, task, **({"workers": WORKERS} | settings))
        assert sorted(folder.rglob("*")) == before
        assert logging.getLogger("flwr").level == level
        return line

    return run


Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"learnin_rate": 1}, "learnin_rate = 1: unknown key; did you mean learning_rate"),
        ({"learning_rate": 0}, "learning_rate = 0.0 must be a number above 0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov = True requires momentum"),
        ({"batch_size": 2000}, "batch_size = 2000 is larger than the data"),
        ({"workers": 2}, "workers = 2 must be a string"),
        ({"out": Path("/")}, "out = '/' exists"),
        ({"workers": "1x cpu slow", "train_on": "fast"}, "no fast worker"),
        ({"task": None}, "task = None must be a Task or a string"),
        ({"task": Task}, "must be a Task"),
    ],
)
def test_wrong_setting_or_task_is_refused(
    refused: Refused, settings: dict[str, Any], expected: str
) -> None:
    assert expected in refused(**settings)


def test_unsound_task_is_refused(refused: Refused) -> None:
    task = small_task(loss=nn.CrossEntropyLoss())
    assert 'reduction="none"' in refused(task)
    assert "data = 'here'" in refused(small_task(), data="here")


def test_task_of_another_thread_is_not_tried_instead(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def while_another_trains(*arguments: Any) -> LocalGrid:
        register_task(small_task())
        return make_local_grid(*arguments)

    monkeypatch.setattr("flower_blsgd.api.make_local_grid", while_another_trains)
    assert 'reduction="none"' in refused(small_task(loss=nn.CrossEntropyLoss()))


def _capturing(thing: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        assert thing is not None
        return nn.Linear(4, 2)

    return make


def test_what_cannot_travel_is_refused_with_a_way_out(refused: Refused) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise RuntimeError("I stay\nhere")

    for thing, expected in ((threading.Lock(), "lock"), (Refuses(), "I stay here")):
        line = refused(small_task(model=_capturing(thing)))
        assert line.startswith("task: it cannot be sent to the workers (")
        assert "module:function" in line
        assert expected in line
