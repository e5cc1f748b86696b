"""Replies matched with orders: what counts, what counts 0, and what the log says."""

import dataclasses
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from flower_blsgd.algorithm.learning_rate import LearningRate
from flower_blsgd.algorithm.local_steps import SystemAwareSteps
from flower_blsgd.algorithm.sampling import SeparatedSampler
from flower_blsgd.model_check import ModelShape
from flower_blsgd.planner import OrderSettings, Planner
from flower_blsgd.protocol import TrainOrder, TrainReport
from flower_blsgd.roster import Roster, Worker
from flower_blsgd.round_books import worker_rounds
from flower_blsgd.round_replies import Outcome, average_momentum, read_replies
from flower_blsgd.runtime.flower_internals import CRASHED, NODE_GONE, NOT_LOADED, RAISED

from .in_process_grid import TRACEBACK, ToyWorker, fast_profile, slow_profile, toy_arrays
from .log_capture import captured_log

Orders = dict[int, tuple[Worker, TrainOrder]]


def orders_of_two() -> Orders:
    """Return orders of 2 and 1 steps of 2 samples, for nodes 0 and 1."""
    workers = Roster.of_profiles([fast_profile(0), slow_profile(1)]).workers
    planner = Planner(
        24,
        2,
        SystemAwareSteps(2, 1),
        2,
        SeparatedSampler(),
        "samples",
        OrderSettings(LearningRate(0.1), "keep", 0.0, 0),
    )
    orders = planner.orders(5, workers, toy_arrays(), None)
    return {worker.node_id: (worker, order) for worker, order in orders}


def sent(orders: Orders, node_id: int) -> Message:
    return Message(orders[node_id][1].to_records(), node_id, "train")


def good_reply(orders: Orders, node_id: int, value: float = 1.0) -> Message:
    return ToyWorker(value=value)(sent(orders, node_id), node_id)


def error_reply(orders: Orders, node_id: int, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=sent(orders, node_id))


def outcomes_of(orders: Orders, *replies: Message) -> list[Outcome]:
    return read_replies(replies, orders, ModelShape(toy_arrays()))


def test_read_matches_replies_with_orders_in_worker_order() -> None:
    orders = orders_of_two()
    backwards = (good_reply(orders, 1, 4.0), good_reply(orders, 0, 1.0))
    first, second = outcomes_of(orders, *backwards)
    assert (first.worker.index, second.worker.index) == (0, 1)
    assert (first.load, second.load) == (4.0, 2.0)  # completed steps x batch size
    assert (first.tensors["bias"][0], second.tensors["bias"][0]) == (1.0, 4.0)
    assert (first.failure, second.failure) == ("", "")


def test_read_ignores_replies_of_nobodys_order() -> None:
    orders = orders_of_two()
    stranger = ToyWorker()(Message(orders[0][1].to_records(), 77, "train"), 77)
    outcomes = outcomes_of(orders, stranger, good_reply(orders, 0), good_reply(orders, 1))
    assert [outcome.worker.node_id for outcome in outcomes] == [0, 1]


def test_read_missing_reply_counts_zero_and_is_told() -> None:
    orders = orders_of_two()
    with captured_log() as log:
        _, second = outcomes_of(orders, good_reply(orders, 0))
    assert second.load == 0
    assert second.report is None
    assert "did not answer" in second.failure
    (warning,) = log.warnings
    assert second.worker.label in warning
    assert "round 5" in warning
    assert second.worker.excluded == ""


@pytest.mark.parametrize("code", [RAISED, NOT_LOADED])
def test_read_worker_that_raised_is_left_out_and_its_traceback_told_once(code: int) -> None:
    orders = orders_of_two()
    with captured_log() as log:
        _, second = outcomes_of(
            orders, good_reply(orders, 0), error_reply(orders, 1, code, TRACEBACK)
        )
    assert second.load == 0
    assert second.failure == "RuntimeError: the fan stands still"
    assert second.worker.excluded == "RuntimeError: the fan stands still"
    (line,) = log.lines()
    assert TRACEBACK.strip() in line
    assert "slow-1 (cpu:1)" in line  # its name and device
    assert line.count("RuntimeError: the fan stands still") == 1


@pytest.mark.parametrize("code", [CRASHED, NODE_GONE])
def test_read_worker_whose_process_died_may_come_back(code: int) -> None:
    orders = orders_of_two()
    with captured_log() as log:
        _, second = outcomes_of(
            orders, good_reply(orders, 0), error_reply(orders, 1, code, "killed by signal 9")
        )
    assert second.failure == "killed by signal 9"
    assert second.worker.excluded == ""
    assert "killed by signal 9" in log.warnings[0]


@pytest.mark.parametrize("reason", ["", "\n", "  "])
def test_read_error_without_a_reason_counts_zero(reason: str) -> None:
    orders = orders_of_two()
    _, second = outcomes_of(orders, good_reply(orders, 0), error_reply(orders, 1, CRASHED, reason))
    assert second.load == 0
    assert second.failure


def test_read_broken_bytes_count_zero() -> None:
    orders = orders_of_two()
    reply = good_reply(orders, 1)
    broken = Array(dtype="float64", shape=(1,), stype="numpy.ndarray", data=b"")
    reply.content.array_records["arrays"]["bias"] = broken
    first, second = outcomes_of(orders, good_reply(orders, 0), reply)
    assert first.load == 4.0
    assert second.load == 0


def test_read_foreign_serialisation_counts_zero() -> None:
    orders = orders_of_two()
    reply = good_reply(orders, 1)
    data = Array(np.zeros(1)).data
    reply.content.array_records["arrays"]["bias"] = Array("float64", (1,), "pickle", data)
    _, second = outcomes_of(orders, good_reply(orders, 0), reply)
    assert second.load == 0
    assert "pickle" in second.failure


def test_read_momentum_that_is_not_finite_counts_zero() -> None:
    orders = orders_of_two()
    reply = good_reply(orders, 1)
    reply.content["momentum"] = ArrayRecord({"weight": Array(np.full((2, 1), np.nan, np.float32))})
    _, second = outcomes_of(orders, good_reply(orders, 0), reply)
    assert second.load == 0
    assert "not finite" in second.failure


def test_read_no_step_completed_has_no_load() -> None:
    orders = orders_of_two()
    lazy = ToyWorker(steps=0)(sent(orders, 1), 1)
    _, second = outcomes_of(orders, good_reply(orders, 0), lazy)
    assert second.load == 0
    assert second.report is not None
    assert second.failure == ""


def test_metric_content_leaves_out_times() -> None:
    orders = orders_of_two()
    first, _ = outcomes_of(orders, good_reply(orders, 0), good_reply(orders, 1))
    (record,) = first.metric_content().metric_records.values()
    assert set(record) == {"num-examples", "train-loss"}


# --- momentum


def outcome_with(orders: Orders, node_id: int, momentum: float | None) -> Outcome:
    worker, order = orders[node_id]
    buffers = {} if momentum is None else {"weight": np.full(2, momentum, np.float32)}
    report = TrainReport(
        completed_steps=order.local_steps,
        batch_size=order.batch_size,
        compute_seconds=0.0,
        started_at=0.0,
        ended_at=0.0,
        losses=np.zeros(len(order.indices), np.float32),
        arrays=toy_arrays(),
    )
    return Outcome(worker, order, report, momentum=buffers)


def test_average_momentum_by_hand() -> None:
    orders = orders_of_two()
    outcomes = [outcome_with(orders, 0, 1.0), outcome_with(orders, 1, 4.0)]
    average = average_momentum(outcomes)
    assert average is not None
    assert average["weight"].tolist() == [2.0, 2.0]
    assert average["weight"].dtype == np.float32


def test_average_momentum_leaves_out_a_failed_worker() -> None:
    orders = orders_of_two()
    worker, order = orders[1]
    average = average_momentum(
        [outcome_with(orders, 0, 3.0), Outcome(worker, order, failure="dead")]
    )
    assert average is not None
    assert average["weight"].tolist() == [3.0, 3.0]


def test_average_momentum_of_those_that_have_one_is_a_whole_average() -> None:
    orders = orders_of_two()
    outcomes = [outcome_with(orders, 0, 3.0), outcome_with(orders, 1, None)]
    average = average_momentum(outcomes)
    assert average is not None
    assert average["weight"].tolist() == [3.0, 3.0]  # not half of it


def test_average_momentum_is_over_those_that_have_the_tensor() -> None:
    """Whatever a node sends, or was frozen there, must not end the run."""
    orders = orders_of_two()
    first, second = (outcome_with(orders, n, None) for n in (0, 1))
    one = {"weight": np.full(2, 1.0, np.float32), "bias": np.full(1, 5.0)}
    two = {"weight": np.full(2, 4.0, np.float32), "more": np.full(3, 7.0)}
    average = average_momentum(
        [dataclasses.replace(first, momentum=one), dataclasses.replace(second, momentum=two)]
    )
    assert average is not None
    assert {name: tensor.tolist() for name, tensor in average.items()} == {
        "weight": [2.0, 2.0],  # loads 4 and 2
        "bias": [5.0],
        "more": [7.0, 7.0, 7.0],
    }


def test_average_momentum_of_counters_stays_a_single_number() -> None:
    orders = orders_of_two()
    outcomes = [
        dataclasses.replace(
            outcome_with(orders, node_id, None),
            momentum={"step/weight": np.array(value, np.float32)},
        )
        for node_id, value in ((0, 32.0), (1, 8.0))
    ]
    average = average_momentum(outcomes)
    assert average is not None
    assert (average["step/weight"].shape, average["step/weight"].dtype) == ((), np.float32)
    assert average["step/weight"] == 24.0  # (4 x 32 + 2 x 8) / 6


def test_average_momentum_without_any_is_none() -> None:
    orders = orders_of_two()
    outcomes = [outcome_with(orders, 0, None), outcome_with(orders, 1, None)]
    assert average_momentum(outcomes) is None


# --- rows of the round log


def test_worker_rounds_tell_steps_weight_loss_and_failure() -> None:
    orders = orders_of_two()
    lazy = ToyWorker(steps=1, losses=lambda i: np.array([1.0, 2.0], np.float32))
    outcomes = outcomes_of(orders, lazy(sent(orders, 0), 0))
    first, second = worker_rounds(outcomes, [1.0, 0.0], sent_at=0.0, received_at=4.0, batch_size=2)
    assert (first.worker, first.label, first.fast) == (0, "fast-0 (cpu:0)", True)
    assert (first.local_steps, first.completed_steps, first.num_examples) == (2, 1, 2)
    assert (first.weight, first.loss, first.failure) == (1.0, 1.5, "")
    assert (first.start_seconds, first.compute_seconds) == (1.0, 0.5)  # 1.0 to 1.5 of 4
    assert first.transfer_seconds == 3.5
    assert (second.completed_steps, second.num_examples, second.weight) == (0, 0, 0.0)
    assert math.isnan(second.loss)
    assert "did not answer" in second.failure


def test_worker_rounds_client_without_times_has_none() -> None:
    orders = orders_of_two()
    content = RecordDict({"a": toy_arrays(), "m": MetricRecord({"num-examples": 4})})
    plain = Message(content, reply_to=sent(orders, 0))
    outcomes = outcomes_of(orders, plain, good_reply(orders, 1))
    first, second = worker_rounds(outcomes, [0.5, 0.5], sent_at=0.0, received_at=4.0, batch_size=2)
    assert first.compute_seconds == first.waiting_seconds == 0.0
    assert first.num_examples == 4
    assert second.compute_seconds == 0.5
