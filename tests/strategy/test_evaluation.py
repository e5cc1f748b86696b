"""Evaluation shared among the fast workers: exact sums, and never a crash or a wrong mean."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict

from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, WorkerProfile
from flower_blsgd.runtime.flower_internals import CRASHED
from flower_blsgd.strategy.evaluation import WorkerEvaluation
from flower_blsgd.strategy.workers import WorkerRegistry

from ..in_process_grid import InProcessGrid, Order, fast_profile, slow_profile, toy_arrays
from ..log_capture import captured_log

ROOT = Path(__file__).parents[2]

Answer = Callable[[Message, EvaluateOrder], Message]


def sums_of(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
    """Batches of one sample: i has loss i times the model's bias, and is right if it is even."""
    bias = float(arrays["bias"].numpy()[0])
    samples = range(first, last)
    return EvaluateReport(first, last, [i * bias for i in samples], [1.0 - i % 2 for i in samples])


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
    """A registry of nodes, and an evaluation that notes what is done on the server."""

    def __init__(
        self, *nodes: Node, num_test: int = 10, order: Order = "sent", batch_size: int = 1
    ) -> None:
        self.nodes = nodes
        self.grid = InProcessGrid({50 + i: node for i, node in enumerate(nodes)}, order)
        self.registry = WorkerRegistry(len(nodes))
        self.registry.update(self.grid)
        self.on_server: list[tuple[int, int]] = []
        self.evaluation = WorkerEvaluation(
            self.grid, self.registry, num_test, batch_size, self._evaluate_slice
        )

    def _evaluate_slice(self, arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        self.on_server.append((first, last))
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


def test_without_any_speed_fast_workers_share_the_test_set_and_slow_ones_have_none_of_it() -> None:
    setup = Setup(fast(0), fast(1), fast(2), slow(3))
    assert setup() == RIGHT
    assert setup.slices == [[(0, 4)], [(4, 7)], [(7, 10)], []]
    assert setup.on_server == []
    assert setup.grid.timeouts[-1] is not None


def test_all_workers_share_it_where_there_is_no_fast_one() -> None:
    setup = Setup(slow(0), slow(1))
    assert setup() == RIGHT
    assert setup.slices == [[(0, 5)], [(5, 10)]]


def test_test_set_smaller_than_the_number_of_workers_leaves_some_without() -> None:
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


def no_numbers(message: Message, order: EvaluateOrder) -> Message:
    reply = sums_of(order.arrays, order.first, order.last).to_reply(message)
    reply.content.config_records["sums"]["loss-sums"] = ["nan"]
    return reply


def as_for_fedavg(message: Message, order: EvaluateOrder) -> Message:
    metrics = MetricRecord({"num-examples": 99, "accuracy": 1.0, "loss": 0.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def test_worker_that_is_gone_or_left_out_gets_no_slice() -> None:
    setup = Setup(fast(0), fast(1), fast(2))
    setup.grid.disconnect(50)
    setup.registry.workers[1].excluded = "RuntimeError: the fan stands still"
    with captured_log() as log:
        assert setup() == RIGHT
    assert setup.slices == [[], [], [(0, 10)]]
    assert log.warnings == []
    setup.grid.disconnect(52)
    assert setup() == RIGHT
    assert setup.on_server == [(0, 10)]


def test_all_fail_and_the_mean_is_right() -> None:
    setup = Setup(fast(0, raises), fast(1, no_numbers), fast(2, dies))
    assert setup() == RIGHT
    assert setup.on_server == [(0, 4), (4, 7), (7, 10)]


@pytest.mark.parametrize("answer", [other_slice, no_numbers, as_for_fedavg])
def test_reply_that_cannot_be_used_costs_that_evaluation_only(answer: Answer) -> None:
    setup = Setup(fast(0), fast(1, answer), slow(2))
    with captured_log() as log:
        assert setup() == RIGHT
    assert setup.on_server == [(5, 10)]
    (warning,) = log.lines(30)
    assert "fast-1 (cpu:1)" in warning
    setup.nodes[1].answer = evaluates
    assert setup() == RIGHT
    assert setup.registry.workers[1].failures == ["unusable reply, evaluating"]
    assert setup.slices == [[(0, 5)] * 2, [(5, 10)] * 2, []]
    assert setup.on_server == [(5, 10)]


@pytest.mark.parametrize(
    ("metric_sum", "in_range", "name"), [(math.nan, True, "accuracy"), (7.0, False, "metric")]
)
def test_metric_that_is_no_accuracy_is_not_the_workers_failure(
    metric_sum: float, in_range: bool, name: str
) -> None:
    def diverged(message: Message, order: EvaluateOrder) -> Message:
        report = EvaluateReport(order.first, order.last, [math.nan], [metric_sum], in_range)
        return report.to_reply(message)

    setup = Setup(fast(0), fast(1, diverged))
    found = setup()
    assert found.keys() == {name, "loss"}
    assert math.isnan(found["loss"])  # type: ignore[arg-type]
    assert found[name] == pytest.approx((3.0 + metric_sum) / 10, nan_ok=True)
    assert setup.on_server == setup.registry.workers[1].failures == []


def test_worker_that_raised_is_sent_one_slice_and_trains_on() -> None:
    setup = Setup(fast(0), fast(1, raises), slow(2))
    with captured_log() as log:
        assert [setup() for _ in range(3)] == [RIGHT] * 3
    assert setup.slices == [[(0, 5), (0, 10), (0, 10)], [(5, 10)], []]
    assert setup.on_server == [(5, 10)]
    (warning,) = log.lines(30)
    assert "fast-1 (cpu:1)" in warning
    assert "\n" not in warning
    assert len(setup.registry.active) == 3


@pytest.mark.parametrize("missing", [True, False])
def test_worker_that_died_or_is_late_is_sent_its_slice_again(missing: bool) -> None:
    setup = Setup(fast(0), fast(1))
    assert setup.evaluation(2, toy_arrays(2.0)) == RIGHT
    if not missing:
        setup.nodes[1].answer = dies
    else:
        setup.grid.fail_at(1, 3, "missing")
    with captured_log() as log:
        assert setup() == RIGHT
    assert ("in time" if missing else "killed") in log.warnings[0]
    assert setup.on_server == [(5, 10)]
    setup.nodes[1].answer = evaluates
    assert setup.evaluation(4, toy_arrays(2.0)) == RIGHT
    assert setup.on_server == [(5, 10)]
    assert setup.grid.timeouts[1:] == [3600.0, 30.0, 120.0]  # its process may be starting
