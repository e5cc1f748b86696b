"""Evaluation shared among the fast workers: exact sums, and never a crash or a wrong mean."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord

from flower_blsgd.flower.internals import CRASHED
from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, WorkerProfile
from flower_blsgd.strategy.evaluation import WorkerEvaluation, batches_by_speed
from flower_blsgd.strategy.rounds import EpochEnd

from ..in_process_grid import InProcessGrid, Order, fast_profile, slow_profile, toy_arrays
from ..log_capture import captured_log
from .orders import connected

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


def in_seconds(seconds: float) -> Answer:
    """Answer as `evaluates`, and say that each sample took so long."""

    def answer(message: Message, order: EvaluateOrder) -> Message:
        report = sums_of(order.arrays, order.first, order.last)
        return replace(report, seconds=seconds * report.num_examples).to_reply(message)

    return answer


class Setup:
    """A registry of nodes, and an evaluation that notes what is done on the server."""

    def __init__(
        self, *nodes: Node, num_test: int = 10, order: Order = "sent", batch_size: int = 1
    ) -> None:
        self.nodes = nodes
        self.grid = InProcessGrid({50 + i: node for i, node in enumerate(nodes)}, order)
        self.registry = connected(self.grid).registry
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


@pytest.mark.parametrize(
    ("batches", "speeds", "counts"),
    [
        (10, [1.0, 0.5], [7, 3]),  # 7 and 6 batches of the first one's time; 6.67 each is ideal
        (10, [1.0, 0.25], [8, 2]),
        (10, [2.0, 2.0, 2.0], [4, 3, 3]),
        (15, [16.0, 1.0], [15, 0]),  # its one batch would take longer than the 15
        (17, [1.0, 16.0], [1, 16]),
        (3, [0.0, 1.0], [0, 3]),
    ],
)
def test_batches_by_speed(batches: int, speeds: list[float], counts: list[int]) -> None:
    assert batches_by_speed(batches, speeds) == counts


def test_slices_are_whole_batches_by_training_speed_and_then_by_measured_forward_speed() -> None:
    """11 samples in batches of 2, the last one shorter."""
    first = Node(fast_profile(0, seconds_per_step=1.0), in_seconds(0.5))
    second = Node(slow_profile(1, seconds_per_step=2.0), in_seconds(2.5))
    setup = Setup(first, second, num_test=11, batch_size=2)
    setup()
    setup()  # five times slower: 5 batches of the one in the time of 1 of the other
    setup.registry.workers[1].training_seconds_per_step = 0.5  # what was measured counts
    setup()
    assert setup.slices == [[(0, 8), (0, 10), (0, 10)], [(8, 11), (10, 11), (10, 11)]]
    assert setup.on_server == []


def test_worker_whose_first_evaluation_was_extremely_slow_gets_batches_again() -> None:
    """Batches take the sixth of a step of two samples; by training it gets 1 of 20 batches."""

    def slow_at_first(message: Message, order: EvaluateOrder) -> Message:
        return in_seconds(10 / 6 if len(late.slices) > 1 else 1000.0)(message, order)

    first = Node(fast_profile(0, seconds_per_step=1.0), in_seconds(1 / 6))
    late = Node(slow_profile(1, seconds_per_step=10.0), slow_at_first)
    steady = Node(slow_profile(2, seconds_per_step=100.0), in_seconds(100.0))
    setup = Setup(first, late, steady, num_test=20)
    for _ in range(12):
        setup()
    assert late.slices == [(19, 20)] * 7  # in the 1st evaluation, and from the 7th on
    assert steady.slices == []  # too slow for any batch, by its training


def test_no_bit_depends_on_who_evaluates_what() -> None:
    expected = Setup(fast(0), num_test=1001)(0.1)
    for speeds in ([1.0, 2.0], [1.0, 3.7, 9.0], [4.0, 4.0, 4.0, 5.0]):
        nodes = [Node(slow_profile(i, seconds_per_step=s)) for i, s in enumerate(speeds)]
        assert Setup(*nodes, num_test=1001)(0.1) == expected


# --- workers that do not answer as they should


def raises(message: Message, order: EvaluateOrder) -> Message:
    raise RuntimeError("no memory\nleft on this card")


def dies(message: Message, order: EvaluateOrder) -> Message:
    return Message(Error(CRASHED, "the process was killed"), reply_to=message)


def no_numbers(message: Message, order: EvaluateOrder) -> Message:
    reply = sums_of(order.arrays, order.first, order.last).to_reply(message)
    reply.content.config_records["sums"]["loss-sums"] = ["nan"]
    return reply


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


def test_reply_that_cannot_be_used_costs_that_evaluation_only() -> None:
    setup = Setup(fast(0), fast(1, no_numbers), slow(2))
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


def test_metric_that_is_not_a_number_is_not_the_workers_failure() -> None:
    def diverged(message: Message, order: EvaluateOrder) -> Message:
        report = EvaluateReport(order.first, order.last, [math.nan], [math.nan])
        return report.to_reply(message)

    setup = Setup(fast(0), fast(1, diverged))
    found = setup()
    assert found.keys() == {"accuracy", "loss"}
    assert all(math.isnan(value) for value in found.values())  # type: ignore[arg-type]
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


# --- async evaluation


def evaluator(place: int, answer: Answer = evaluates) -> Node:
    return Node(WorkerProfile(f"cpu:{place}", role="evaluate", partition_id=place), answer)


def end_of(epoch: int, value: float = 2.0) -> EpochEnd:
    return EpochEnd(epoch, 10 * epoch, toy_arrays(value))


def test_newest_model_is_evaluated_next_and_one_that_waited_before_is_skipped() -> None:
    setup = Setup(fast(0), evaluator(1, in_seconds(0.25)))
    evaluation, setup.grid.pulls_in_vain = setup.evaluation, 2
    ends = [end_of(epoch, float(epoch)) for epoch in range(1, 5)]
    assert evaluation.begin(ends[0])
    assert evaluation.take() is None
    assert evaluation.begin(ends[1])
    assert evaluation.begin(ends[2])  # in place of that of epoch 2
    assert evaluation.unevaluated == [ends[0], ends[2]]
    assert evaluation.take() is None
    first = evaluation.take()
    assert first is not None
    assert (first.epoch, first.round, first.arrays) == (1, 10, ends[0].arrays)
    assert (first.metrics, first.busy_seconds) == ({"accuracy": 0.5, "loss": 4.5}, 2.5)
    evaluation.finish()
    assert evaluation.unevaluated == [ends[2]]
    found = [evaluation.take() for _ in range(3)]
    assert [end and end.metrics for end in found] == [None, None, {"accuracy": 0.5, "loss": 13.5}]
    evaluation.finish()
    assert evaluation.take() is None
    rounds = [m.content.config_records["config"]["server-round"] for m in setup.grid.sent[2:]]
    assert rounds == [10, 30]
    assert setup.slices == [[], [(0, 10)] * 2]


def test_idle_worker_with_role_evaluate_shares_an_evaluation_once_its_speed_is_known() -> None:
    setup = Setup(fast(0, in_seconds(1.0)), evaluator(1, in_seconds(4.0)))
    assert setup() == RIGHT
    assert setup.evaluation.begin(end_of(1))
    assert setup() == RIGHT  # it is busy
    assert setup.evaluation.take()
    setup.evaluation.finish()
    assert setup() == RIGHT
    assert setup.slices == [[(0, 10), (0, 10), (0, 8)], [(0, 10), (8, 10)]]


def test_async_evaluation_waits_for_a_process_that_may_be_starting() -> None:
    setup = Setup(fast(0), evaluator(1))
    assert setup.evaluation.begin(end_of(1))
    assert setup.evaluation.take()
    setup.evaluation.finish()
    setup.registry.start_seconds = 100.0
    setup.registry.workers[1].fresh = True
    assert setup.evaluation.begin(end_of(2))
    assert setup.evaluation._seconds == 300.0


@pytest.mark.parametrize("fault", ["raises", "dies", "late", "gone"])
def test_failed_async_evaluation_comes_back_without_metrics_and_one_warning(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"raises": raises, "dies": dies}
    setup = Setup(fast(0), evaluator(1, answers.get(fault, evaluates)))
    evaluation, setup.grid.pulls_in_vain = setup.evaluation, 9 if fault in ("late", "gone") else 0
    if fault == "late":
        monkeypatch.setattr("flower_blsgd.strategy.evaluation._FIRST_PATIENCE_SECONDS", 0.0)
    with captured_log() as log:
        for epoch in (1, 2):
            assert evaluation.begin(end_of(epoch))
            setup.registry.workers[1].present = fault != "gone"
            end = evaluation.take()
            assert end is not None
            assert (end.epoch, end.metrics) == (epoch, None)
            evaluation.finish()
            setup.registry.workers[1].present = True
    (warning,) = log.warnings
    assert warning.startswith("worker evaluate-1 (cpu:1) did not evaluate the model of round 10: ")
    setup.nodes[1].answer, setup.grid.pulls_in_vain = evaluates, 0
    monkeypatch.undo()
    assert evaluation.begin(end_of(3))  # it gets the next one again
    end = evaluation.take()
    assert end is not None
    assert end.metrics == RIGHT
    assert setup.registry.workers[1].failures_in_a_row == 0


def test_without_a_worker_that_evaluates_models_of_a_checkpoint_come_back_at_once() -> None:
    setup = Setup(fast(0), evaluator(1))
    setup.evaluation.unevaluated += [end_of(1), end_of(2)]
    setup.registry.workers[1].present = False
    for epoch in (1, 2):
        end = setup.evaluation.take()
        assert end is not None
        assert (end.epoch, end.metrics) == (epoch, None)
        setup.evaluation.finish()
    assert not setup.evaluation.begin(end_of(3))
    assert setup.evaluation.unevaluated == []
