"""Evaluation shared among the fast workers: exact sums, and never a crash or a wrong mean."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, WorkerProfile
from flower_blsgd.roster import Roster
from flower_blsgd.run import train_on
from flower_blsgd.runtime.devices import parse_workers
from flower_blsgd.runtime.flower_internals import CRASHED
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.worker_evaluation import WorkerEvaluation

from .in_process_grid import InProcessGrid, Order, fast_profile, slow_profile, toy_arrays
from .log_capture import captured_log

ROOT = Path(__file__).parents[1]

Answer = Callable[[Message, EvaluateOrder], Message]


def sums_of(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
    """Sample i has loss i times the model's bias, and is right if it is even."""
    bias = float(arrays["bias"].numpy()[0])
    loss_sum = sum(index * bias for index in range(first, last))
    return EvaluateReport(first, last, loss_sum, sum(i % 2 == 0 for i in range(first, last)) * 1.0)


def evaluates(message: Message, order: EvaluateOrder) -> Message:
    return sums_of(order.arrays, order.first, order.last).to_reply(message)


class Node:
    """A worker that only evaluates."""

    def __init__(self, profile: WorkerProfile, answer: Answer = evaluates) -> None:
        self.profile = profile
        self.answer = answer
        self.slices: list[tuple[int, int]] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.profile":
            return self.profile.to_reply(message)
        assert message.metadata.message_type == "evaluate"
        order = EvaluateOrder.from_message(message, 10**6)
        self.slices.append((order.first, order.last))
        return self.answer(message, order)


class Setup:
    """A roster of nodes, and an evaluation that notes what is done on the server."""

    def __init__(self, *nodes: Node, num_test: int = 10, order: Order = "sent") -> None:
        self.nodes = nodes
        self.grid = InProcessGrid({50 + i: node for i, node in enumerate(nodes)}, order)
        self.roster = Roster(len(nodes))
        self.roster.update(self.grid)
        self.here: list[tuple[int, int]] = []
        self.evaluation = WorkerEvaluation(self.grid, self.roster, num_test, self._here, 7.0)

    def _here(self, arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        self.here.append((first, last))
        return sums_of(arrays, first, last)

    def __call__(self, value: float = 2.0) -> MetricRecord:
        return self.evaluation(3, toy_arrays(value))

    @property
    def slices(self) -> list[list[tuple[int, int]]]:
        return [node.slices for node in self.nodes]


def fast(place: int, answer: Answer = evaluates) -> Node:
    return Node(fast_profile(place), answer)


def slow(place: int, answer: Answer = evaluates) -> Node:
    return Node(slow_profile(place), answer)


RIGHT = MetricRecord({"accuracy": 0.5, "loss": 9.0})  # of 10 samples: 2 x 45 / 10


def test_fast_workers_share_the_test_set_and_slow_ones_have_none_of_it() -> None:
    setup = Setup(fast(0), fast(1), fast(2), slow(3))
    assert setup() == RIGHT
    assert setup.slices == [[(0, 3)], [(3, 6)], [(6, 10)], []]
    assert setup.here == []
    assert setup.grid.timeouts[-1] == 7.0


def test_all_workers_share_it_where_there_is_no_fast_one() -> None:
    setup = Setup(slow(0), slow(1))
    assert setup() == RIGHT
    assert setup.slices == [[(0, 5)], [(5, 10)]]


def test_test_set_smaller_than_the_team_leaves_some_without() -> None:
    setup = Setup(*[fast(place) for place in range(5)], num_test=3)
    assert setup() == MetricRecord({"accuracy": 2 / 3, "loss": 2.0})
    given = [slices for slices in setup.slices if slices]
    assert given == [[(0, 1)], [(1, 2)], [(2, 3)]]


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_order_of_replies_changes_no_bit(order: Order) -> None:
    expected = Setup(*[fast(place) for place in range(7)], num_test=1001)(0.1)
    assert Setup(*[fast(place) for place in range(7)], num_test=1001, order=order)(0.1) == expected


# --- workers that do not answer as they should


def raises(message: Message, order: EvaluateOrder) -> Message:
    raise RuntimeError("no memory\nleft on this card")


def dies(message: Message, order: EvaluateOrder) -> Message:
    return Message(Error(CRASHED, "the process was killed"), reply_to=message)


def other_slice(message: Message, order: EvaluateOrder) -> Message:
    return sums_of(order.arrays, 0, 1).to_reply(message)


def other_count(message: Message, order: EvaluateOrder) -> Message:
    reply = evaluates(message, order)
    reply.content.config_records["sums"]["num-examples"] = 1
    return reply


def not_finite(message: Message, order: EvaluateOrder) -> Message:
    return EvaluateReport(order.first, order.last, float("nan"), 1.0).to_reply(message)


def text(message: Message, order: EvaluateOrder) -> Message:
    reply = evaluates(message, order)
    reply.content.config_records["sums"]["loss-sum"] = "many"
    return reply


def as_for_fedavg(message: Message, order: EvaluateOrder) -> Message:
    metrics = MetricRecord({"num-examples": 99, "accuracy": 1.0, "loss": 0.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def empty(message: Message, order: EvaluateOrder) -> Message:
    return Message(RecordDict({"config": ConfigRecord()}), reply_to=message)


UNABLE = [raises, other_slice, other_count, not_finite, text, as_for_fedavg, empty]


@pytest.mark.parametrize("answer", [*UNABLE, dies])
def test_slice_of_a_worker_that_fails_is_evaluated_here_with_one_warning(answer: Answer) -> None:
    setup = Setup(fast(0), fast(1, answer), slow(2))
    with captured_log() as log:
        assert setup() == RIGHT
    assert setup.here == [(5, 10)]
    (warning,) = log.lines(30)
    assert "fast-1 (cpu:1)" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("answer", UNABLE)
def test_worker_that_cannot_evaluate_is_asked_once_and_trains_on(answer: Answer) -> None:
    setup = Setup(fast(0), fast(1, answer))
    with captured_log() as log:
        assert [setup() for _ in range(3)] == [RIGHT] * 3
    assert setup.slices == [[(0, 5), (0, 10), (0, 10)], [(5, 10)]]
    assert setup.here == [(5, 10)]
    assert len(log.warnings) == 1
    assert len(setup.roster.active) == 2


def test_worker_whose_process_died_is_asked_again() -> None:
    setup = Setup(fast(0), fast(1, dies))
    setup()
    setup.nodes[1].answer = evaluates
    assert setup() == RIGHT
    assert setup.slices == [[(0, 5), (0, 5)], [(5, 10), (5, 10)]]
    assert setup.here == [(5, 10)]


def test_worker_that_is_late_is_asked_again() -> None:
    setup = Setup(fast(0), fast(1))
    setup.grid.fail_at(1, 3, "missing")
    with captured_log() as log:
        assert setup() == RIGHT
    assert "in time" in log.warnings[0]
    assert setup.here == [(5, 10)]
    assert setup.evaluation(4, toy_arrays(2.0)) == RIGHT
    assert setup.here == [(5, 10)]


def test_worker_that_is_gone_or_left_out_is_not_asked() -> None:
    setup = Setup(fast(0), fast(1), fast(2))
    setup.grid.disconnect(50)
    setup.roster.workers[1].excluded = "RuntimeError: the fan stands still"
    with captured_log() as log:
        assert setup() == RIGHT
    assert setup.slices == [[], [], [(0, 10)]]
    assert log.warnings == []


def test_server_evaluates_all_where_nobody_is_left() -> None:
    setup = Setup(fast(0))
    setup.grid.disconnect(50)
    assert setup() == RIGHT
    assert setup.here == [(0, 10)]


def test_all_fail_and_the_mean_is_right() -> None:
    setup = Setup(fast(0, raises), fast(1, not_finite), fast(2, dies))
    assert setup() == RIGHT
    assert setup.here == [(0, 3), (3, 6), (6, 10)]


# --- real processes


@pytest.mark.processes
def test_local_grid_evaluates_the_same_on_workers_and_on_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fast workers get 180 of 360 test samples each."""
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        epochs=2,
        local_steps_fast=8,
        threads=1,
        model="cnn-batchnorm",
        sampler="uniform",
        momentum_buffers="reset",  # the second run finds the workers of the first
    )
    workers = parse_workers(f"1x cpu:{usable_cores()[0]} fast; 1x cpu:{usable_cores()[-1]} fast")
    models, summaries = [], []
    with LocalGrid(
        workers, "clients.blsgd_client:app", ROOT, config.to_run_config(), threads=1
    ) as grid:
        for place in ("workers", "server"):
            with captured_log() as log:
                report = train_on(grid, dataclasses.replace(config, evaluate_on=place))
            assert log.warnings == []
            models.append((report.folder.path / "model.safetensors").read_bytes())
            summaries.append(report.summary)
    assert models[0] == models[1]
    on_workers, on_server = summaries
    assert on_workers["accuracy"] == pytest.approx(on_server["accuracy"], abs=1e-6)
    assert on_workers["loss"] == pytest.approx(on_server["loss"], abs=1e-6)
    assert on_workers["accuracy"] > 0.5
    assert on_workers["evaluation_seconds"] > 0
