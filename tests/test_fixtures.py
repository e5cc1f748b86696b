"""Frames, checkpoints and results folders written before are still read.

WRITE_FIXTURES=1 rewrites the files in tests/fixtures, after a change that is meant to change them.
"""

import csv
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from rich.console import Console
from torch import Tensor, nn

import flower_blsgd
from flower_blsgd.cli.watch import view
from flower_blsgd.engines.stream.codec import encode_messages, encode_reply, frame_of, read_frames
from flower_blsgd.engines.stream.encoded_arrays import decode_arrays
from flower_blsgd.experiments.comparison import compare_runs, read_run
from flower_blsgd.experiments.html_report import write_report
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.protocol import (
    EvaluateOrder,
    EvaluateReport,
    HostOrders,
    TrainOrder,
    TrainReport,
    WorkerProfile,
)
from flower_blsgd.results.live import LiveRun
from flower_blsgd.run import train_on
from flower_blsgd.tasks import register_task

from .in_process_grid import FastGrid
from .test_run import config_of, node_of

FIXTURES = Path(__file__).parent / "fixtures"
WRITE = os.environ.get("WRITE_FIXTURES") == "1"

# --- frames of the stream -------------------------------------------------------------------------

MODEL = view_record({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([3])})
MOMENTUM = view_record({"w": np.full((2, 3), 0.5, np.float32)})
LOSSES = np.array([1.5, 0.25, 2.0, 0.125], np.float32)


def train_order(**changes: Any) -> TrainOrder:
    values: dict[str, Any] = {
        **{"round": 3, "epoch": 2, "local_steps": 2, "batch_size": 2, "learning_rate": 0.125},
        **{"seed": 7, "deadline_seconds": 1.5, "momentum_policy": "average", "progress": 0.25},
        "indices": np.array([5, 0, 9, 4], np.int32),
        **{"arrays": MODEL, "momentum": MOMENTUM},
        "sample_weights": np.array([1.0, 0.5, 0.0, 2.0], np.float32),
        **{"stream_start": 12, "stream_stride": 6},
    }
    return TrainOrder(**{**values, **changes})


ORDER, SLICE = train_order(), EvaluateOrder(3, 10, 14, MODEL)
TRAINED = TrainReport(2, 2, 0.5, 10.0, 11.5, LOSSES, MODEL, MOMENTUM, 1, 0, 4, 0.125, 0)
EVALUATED = EvaluateReport(10, 14, [2.5, 1.25], [1.0, 3.0, 2.0, 0.0], ["accuracy", "top5"], 0.75)
PROFILE = WorkerProfile(
    "cuda:0",
    **{"tier": "fast", "name": "eve", "batch_size": 16, "seconds_per_step": 0.25},
    **{"partition_id": 4, "data_fingerprint": "d", "model_fingerprint": "m"},
)
_OF_WORKER = {"arrays": MODEL, "momentum": MOMENTUM, "config": ORDER.to_records()["config"]}
HOST = HostOrders(
    {0: RecordDict(_OF_WORKER), 1: train_order(momentum=None, seed=8).to_records()},
    worker_weight="equal",
    update_norms=[0.5, 2.0],
    moving=["w"],
    patience_seconds=60.0,
)

Read = Callable[[Message], Any]
# Each with the reader of its message; a reply also with the order that it answers.
SENT: dict[str, tuple[Any, Read]] = {
    "train_order": (ORDER, TrainOrder.from_message),
    "evaluate_order": (SLICE, lambda message: EvaluateOrder.from_message(message, 14)),
    "host_orders": (HOST, HostOrders.from_message),
}
REPLIES: dict[str, tuple[Any, Any, Read]] = {
    "train_reply": (TRAINED, ORDER, lambda m: TrainReport.from_content(m.content, ORDER)),
    "evaluate_reply": (EVALUATED, SLICE, lambda m: EvaluateReport.from_content(m.content, SLICE)),
    "profile": (PROFILE, None, lambda message: WorkerProfile.from_content(message.content)),
}


def fixed(message: Message) -> Message:
    """Return the message without what differs from message to message."""
    message.metadata.__dict__.update(_message_id="1", _created_at=1.0, _ttl=60.0, _run_id=1)
    return message


def frame(name: str, record: Any) -> bytes:
    if name in SENT:
        message = fixed(Message(record.to_records(), 50, "train"))
        return b"".join(frame_of(*encode_messages([message], {}, "float32")[0]))
    order = REPLIES[name][1]
    message = fixed(Message(order.to_records() if order else RecordDict(), 50, "train"))
    return b"".join(encode_reply(fixed(record.to_reply(message)), {}, {}, "float32"))


@pytest.mark.parametrize("name", [*SENT, *REPLIES])
def test_frame_has_the_same_bytes_and_is_read(name: str) -> None:
    file = FIXTURES / f"{name}.frame"
    record, *_, read = (SENT | REPLIES)[name]
    if WRITE:
        file.write_bytes(frame(name, record))
    before = file.read_bytes()
    ((message, elements),) = read_frames([before])
    decode_arrays(message, elements, lambda _: {})
    assert frame(name, read(message)) == frame(name, record)
    assert frame(name, record) == before


# --- results folders ------------------------------------------------------------------------------


SAME = "epoch", "accuracy", "metric_name", "rounds", "samples", "distinct_samples", "share_left_out"


class Line(nn.Module):
    """Two weights from which every CPU computes the same bits: nothing is summed but integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.25, -0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def difference(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = torch.arange(len(targets))
    return outputs[rows, 1 - targets] - outputs[rows, targets]


def line() -> flower_blsgd.Task:
    inputs = torch.arange(-32.0, 32.0)[:, None] / 64
    labels = (inputs[:, 0] > 1 / 16).long()
    return flower_blsgd.Task(
        model=Line,
        train=(inputs[::2], labels[::2]),
        test=(inputs[1::2], labels[1::2]),
        loss=difference,
    )


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    register_task(line(), "line")


def train(folder: str, **changes: Any) -> None:
    """Train for three epochs of four rounds, or resume the run in the folder."""
    settings: dict[str, Any] = {"task": "line", "epochs": 3, "batch_size": 2, "momentum": 0.5}
    settings |= {"local_steps_fast": 3, "local_steps_slow": 1, "learning_rate": 0.125}
    settings |= {"algorithm": "biased-local-sgd", "decay_epochs": "", "weight_decay": 0.0}
    settings |= {"resume": folder} if Path(folder).exists() else {"out": folder}
    config = config_of(**settings, **changes)
    nodes = [
        {"tier": tier, "partition-id": i, "seconds-per-step": 50.0 * (i + 1), "device": "cpu"}
        for i, tier in enumerate(("fast", "slow"))
    ]
    train_on(FastGrid({50 + i: node_of(config, node) for i, node in enumerate(nodes)}), config)


def fixture(name: str, **changes: Any) -> Path:
    """Return a copy of a results folder in the current one."""
    if WRITE:
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
        train(name, **changes)
        shutil.copytree(name, FIXTURES / name, ignore=shutil.ignore_patterns(".lock", "run.log"))
        shutil.rmtree(name)
    return Path(shutil.copytree(FIXTURES / name, name))


def test_checkpoint_is_resumed_to_the_same_bits() -> None:
    folders = fixture("finished", keep_checkpoints=0), fixture("stopped", rounds=6)
    train("stopped", rounds=12)
    finished, stopped = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert stopped == finished
    finished_rows, rows = (csv.DictReader((folder / "epochs.csv").open()) for folder in folders)
    for row, expected in zip(rows, finished_rows, strict=True):
        assert [row[key] for key in SAME] == [expected[key] for key in SAME]


def test_results_folder_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    folder = fixture("finished", keep_checkpoints=0)
    model = flower_blsgd.load(folder)
    accuracy = flower_blsgd.evaluate_run(folder).accuracy
    run = read_run(folder)
    assert run is not None and accuracy is not None and isinstance(model, Line)  # noqa: PT018
    assert (run["value"], len(run["rows"])) == (100 * accuracy, 3)
    assert compare_runs([run], run["arm"]).algorithms[0].value == run["value"]
    title = write_report(folder, Path("report.html"))
    assert title.startswith(f"{run['arm']} on line: test accuracy {100 * accuracy:.2f}")
    live = LiveRun(folder)
    live.update()
    Console(width=100).print(view(live, 100))
    live.close()
    assert (live.share_done, len(live.epochs), len(live.workers)) == (1.0, 3, 2)
    assert re.search(rf"accuracy.*{100 * accuracy:.2f}", capsys.readouterr().out)
