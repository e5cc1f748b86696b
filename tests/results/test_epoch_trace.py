"""What a run does around its rounds is timed, in one epoch, and written when that is over."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from flower_blsgd.results import epoch_trace
from flower_blsgd.results.epoch_trace import EpochTrace
from flower_blsgd.training_loop import EpochEnd

from ..log_capture import captured_log
from ..runtime.processes import wait_until
from .records import record, row


class Run:
    """An epoch of so many rounds after one that is not traced, as `fit` would go through them."""

    def __init__(self, folder: Path, evaluate: Callable[[], Any] = MetricRecord) -> None:
        self.trace = EpochTrace(2)
        self.said: list[str] = []
        self.folder = folder
        self.round = self.trace.on_round(lambda record: time.sleep(0.002))
        self.sent = self.trace.on_sent(lambda: time.sleep(0.003))
        self.evaluate = self.trace.evaluating(lambda server_round, arrays: evaluate())
        self.epoch = self.trace.on_epoch(lambda end: None, folder, self.said.append)

    def do_round(self, number: int, epoch: int) -> None:
        began = time.time_ns()
        if epoch == 2:
            self.trace.begin_round(number, began, began + 10, began + 20)
        self.sent()
        time.sleep(0.005)
        received = time.time_ns()
        self.round(record(row(0), round=number, epoch=epoch))
        if epoch == 2:
            self.trace.end_round(number, received, time.time_ns(), {}, {})

    def end_epoch(self, number: int, server_round: int) -> None:
        self.evaluate(server_round, ArrayRecord())
        self.epoch(EpochEnd(number, server_round, ArrayRecord(), None))

    def events(self) -> list[dict[str, Any]]:
        told = json.loads((self.folder / "trace.json").read_text())
        return [event for event in told["traceEvents"] if event["ph"] == "X"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_off_gives_everything_back_as_it_was(tmp_path: Path) -> None:
    trace, calls = EpochTrace(), [lambda *_: None for _ in range(4)]
    assert trace.on_round(calls[0]) is calls[0]
    assert trace.on_sent(calls[1]) is calls[1]
    assert trace.evaluating(calls[2]) is calls[2]
    assert trace.on_epoch(calls[3], tmp_path, print) is calls[3]
    with trace.writing(tmp_path, print):
        pass
    assert list(tmp_path.iterdir()) == []


def test_epoch_is_written_at_its_end_and_holds_nothing_else(run: Run) -> None:
    run.do_round(1, 1)
    run.end_epoch(1, 1)
    assert not (run.folder / "trace.json").exists()
    run.do_round(2, 2)
    run.do_round(3, 2)
    run.end_epoch(2, 3)
    assert run.said == [
        f"trace of epoch 2: {run.folder / 'trace.json'} "
        "(open it in ui.perfetto.dev or chrome://tracing)"
    ]
    written = (run.folder / "trace.json").read_bytes()
    run.do_round(4, 3)
    run.end_epoch(3, 4)
    assert (run.folder / "trace.json").read_bytes() == written
    names = [event["name"] for event in run.events() if event["pid"] == 1]
    assert [name for name in names if name.startswith("round")] == ["round 2", "round 3"]
    assert names.count("evaluate") == 1
    assert set(names) == {
        "see who is there",
        "plan",
        "pack the orders",
        "send the orders",
        "write what was put off",
        "wait for the replies",
        "check and average",
        "read the traces",
        "write the round down",
        "round 2",
        "round 3",
        "evaluate",
        "write the epoch down",
    }


def test_spans_of_the_server_follow_one_another_within_their_round(run: Run) -> None:
    run.do_round(2, 2)
    run.end_epoch(2, 2)
    events = {event["name"]: event for event in run.events()}
    whole = events["round 2"]

    def span(name: str) -> tuple[float, float]:
        return events[name]["ts"], events[name]["ts"] + events[name]["dur"]

    order = [
        "see who is there",
        "plan",
        "pack the orders",
        "send the orders",
        "write what was put off",
        "wait for the replies",
        "check and average",
        "write the round down",
        "read the traces",
    ]
    free = whole["ts"]
    for name in order:
        start, end = span(name)
        assert free <= start + 1e-3, name
        free = end
    assert free <= whole["ts"] + whole["dur"] + 1e-3
    assert events["write what was put off"]["dur"] >= 3_000
    assert events["wait for the replies"]["dur"] >= 5_000
    assert events["write the round down"]["dur"] >= 2_000
    assert span("evaluate")[0] >= free


class Late:
    """Metrics that come when they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def done(self) -> bool:
        return self.go.is_set()

    def result(self) -> MetricRecord:
        raise AssertionError("a trace does not wait for an evaluation")


def test_evaluation_of_the_epoch_before_is_shown_beside_the_rounds(tmp_path: Path) -> None:
    late: list[Late] = []

    def evaluate() -> Late:
        late.append(Late())
        return late[-1]

    run = Run(tmp_path, evaluate)
    run.do_round(1, 1)
    run.end_epoch(1, 1)
    run.do_round(2, 2)
    (looking,) = run.trace._late
    late[0].go.set()
    assert wait_until(lambda: looking.ended_ns is not None)
    run.do_round(3, 2)
    run.end_epoch(2, 3)
    late[1].go.set()
    beside = [e for e in run.events() if e["pid"] == 1 and e["tid"] != 1_000]
    assert [e["args"] for e in beside] == [{"after round": 1}, {"after round": 3}]
    assert [e["name"] for e in beside] == ["evaluate", "evaluate (not over yet)"]
    (first,) = [e for e in run.events() if e["name"] == "round 2"]
    (second,) = [e for e in run.events() if e["name"] == "round 3"]
    assert beside[0]["ts"] == 0
    assert first["dur"] < beside[0]["dur"] < second["ts"]


def test_run_that_ends_within_the_epoch_leaves_what_there_is(run: Run) -> None:
    def interrupted() -> None:
        with run.trace.writing(run.folder, run.said.append):
            run.do_round(2, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [e["name"] for e in run.events() if e["name"].startswith("round")] == ["round 2"]


def test_run_that_ends_before_the_epoch_says_so(run: Run) -> None:
    with run.trace.writing(run.folder, run.said.append):
        run.do_round(1, 1)
    assert run.said == ["no trace: the run ended before a round of epoch 2 was over"]
    assert list(run.folder.iterdir()) == []


def test_file_that_cannot_be_written_costs_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(epoch_trace, "write_chrome_trace", fail)
    with captured_log() as log, run.trace.writing(run.folder, run.said.append):
        run.do_round(2, 2)
        run.end_epoch(2, 2)
    assert log.warnings == ["the trace of epoch 2 could not be written: the disk is full"]
    assert run.said == []
