import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower_blsgd.protocol import (
    COUNTERS,
    SLOTS,
    ProtocolError,
    SumOrder,
    TrainOrder,
    TrainReport,
    state_copies,
)
from flower_blsgd.worker.optimizer import make_optimizer, slots_of

from ..in_process_grid import over_the_wire, same_bits, toy_arrays


def order_of(steps: int = 2, batch_size: int = 3, **changes: object) -> TrainOrder:
    order = TrainOrder(
        round=4,
        epoch=2,
        local_steps=steps,
        batch_size=batch_size,
        learning_rate=0.125,
        seed=2**62 + 1,
        deadline_seconds=1.5,
        momentum_policy="keep",
        indices=np.arange(steps * batch_size, dtype=np.int32)[::-1].copy(),
        arrays=toy_arrays(1.0),
    )
    return dataclasses.replace(order, **changes)


def report_of(order: TrainOrder, steps: int | None = None, **changes: object) -> TrainReport:
    steps = order.local_steps if steps is None else steps
    report = TrainReport(
        completed_steps=steps,
        batch_size=order.batch_size,
        compute_seconds=0.5,
        started_at=1000.25,
        ended_at=1000.75,
        losses=np.arange(steps * order.batch_size, dtype=np.float32),
        arrays=toy_arrays(2.0),
        learning_rate=0.05,
    )
    return dataclasses.replace(report, **changes)


def sent(order: TrainOrder) -> Message:
    return over_the_wire(Message(order.to_records(), 7, "train"))


def answered(order: TrainOrder, report: TrainReport) -> Message:
    return over_the_wire(report.to_reply(sent(order)))


# --- orders


@pytest.mark.parametrize("momentum", [None, toy_arrays(3.0)])
def test_order_survives_the_wire(momentum: ArrayRecord | None) -> None:
    order = order_of(momentum=momentum, momentum_policy="average")
    records = order.to_records("model", "settings")
    assert records["model"] is order.arrays
    message = Message(records, 7, "train")
    assert set(message.content) - {"momentum"} == {"model", "settings"}
    found = TrainOrder.from_message(over_the_wire(message), "model", "settings")
    for field in dataclasses.fields(TrainOrder):
        if field.name not in ("indices", "arrays", "momentum"):
            assert getattr(found, field.name) == getattr(order, field.name), field.name
    assert found.indices.tolist() == [5, 4, 3, 2, 1, 0]
    assert found.indices.dtype == np.int32
    assert same_bits(found.arrays, order.arrays)
    assert same_bits(found.momentum, momentum) if momentum else found.momentum is None


def test_order_weights_are_float32_bytes_and_absent_where_all_are_1() -> None:
    weights = np.array([2, 1, 0, 1, 1.5, 1], np.float32)
    order = order_of(sample_weights=weights)
    config = order.to_records().config_records["config"]
    assert config["sample-weights"] == weights.astype("<f4").tobytes()
    found = TrainOrder.from_message(sent(order)).sample_weights
    assert found is not None
    assert (found.dtype, found.tolist()) == (np.float32, weights.tolist())
    assert "sample-weights" not in order_of().to_records().config_records["config"]
    assert TrainOrder.from_message(sent(order_of())).sample_weights is None


@pytest.mark.parametrize(
    "weights", [b"", b"\x00" * 23, [1.0] * 5, [1.0] * 5 + [-1.0], [np.nan] * 6, [np.inf] * 6, 1]
)
def test_order_weights_that_cannot_be_are_refused(weights: Any) -> None:
    message = sent(order_of())
    raw = np.array(weights, "<f4").tobytes() if isinstance(weights, list) else weights
    message.content["config"]["sample-weights"] = raw
    with pytest.raises(ProtocolError, match=r"sample.weights are not"):
        TrainOrder.from_message(message)


def test_order_of_another_strategy_is_refused_with_the_way_out() -> None:
    records = RecordDict(
        {"arrays": toy_arrays(), "config": ConfigRecord({"server-round": 1, "lr": 0.1})}
    )
    without_model = order_of().to_records()
    del without_model["arrays"]
    for content in (records, without_model):
        with pytest.raises(ProtocolError, match="BiasedLocalSGD"):
            TrainOrder.from_message(Message(content, 7, "train"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("indices", b"\x00" * 20, "5 indices"),
        ("indices", b"\x00" * 23, "indices"),
        ("local-steps", 3, "3 steps of 3"),
        ("indices", np.array([0, 1, 2, 3, 4, -1], "<i4").tobytes(), "indices are below 0"),
        ("lr", -0.1, "lr is -0.1"),
        ("momentum-policy", "kept", "momentum-policy is 'kept'"),
    ],
)
def test_order_broken_value_is_refused_by_name(key: str, value: object, expected: str) -> None:
    message = sent(order_of())
    message.content["config"][key] = value
    with pytest.raises(ProtocolError, match=expected):
        TrainOrder.from_message(message)


# --- reports


@pytest.mark.parametrize("momentum", [None, toy_arrays(5.0)])
def test_report_survives_the_wire(momentum: ArrayRecord | None) -> None:
    order = order_of()
    report = report_of(order, 1, momentum=momentum)
    found = TrainReport.from_content(answered(order, report).content, order)
    assert (found.completed_steps, found.batch_size) == (1, 3)
    assert (found.compute_seconds, found.started_at, found.ended_at) == (0.5, 1000.25, 1000.75)
    assert found.losses.tolist() == [0.0, 1.0, 2.0]
    assert same_bits(found.arrays, report.arrays)
    assert same_bits(found.momentum, momentum) if momentum else found.momentum is None


def test_report_counts_examples_and_their_mean_loss() -> None:
    order = order_of(2, 3)
    report = report_of(order)  # losses 0, 1, 2, 3, 4, 5
    assert report.num_examples == 6
    assert report.mean_loss == 2.5
    (metrics,) = answered(order, report).content.metric_records.values()
    assert metrics["num-examples"] == 6
    assert metrics["train-loss"] == 2.5
    nothing_done = report_of(order, 0)
    assert np.isnan(nothing_done.mean_loss)
    found = TrainReport.from_content(answered(order, nothing_done).content, order)
    assert found.completed_steps == found.num_examples == len(found.losses) == 0


@pytest.mark.parametrize(
    ("record", "key", "value", "expected"),
    [
        ("metrics", "completed-steps", -1, "-1 steps were completed of 2"),
        ("metrics", "completed-steps", 3, "3 steps were completed of 2"),
        ("metrics", "completed-steps", 1, "6 losses"),
        ("metrics", "batch-size", 2, "2 steps of 3"),
        ("losses", "losses", b"", "0 losses"),
        ("losses", "losses", b"\x00" * 20, "5 losses"),
        ("losses", "losses", b"\x00" * 23, "losses"),
        ("losses", "losses", [0.0] * 6, "losses"),
        ("losses", "losses", np.array([0, 1, 2, 3, np.nan, 5], "<f4").tobytes(), "not finite"),
        ("metrics", "compute-seconds", -1.0, "compute-seconds is -1.0"),
        ("metrics", "started-at", float("nan"), "started-at is nan"),
    ],
)
def test_report_of_what_was_not_ordered_is_refused(
    record: str, key: str, value: object, expected: str
) -> None:
    order = order_of(2, 3)
    reply = answered(order, report_of(order))
    reply.content[record][key] = value
    with pytest.raises(ProtocolError, match=expected):
        TrainReport.from_content(reply.content, order)


def test_model_of_a_client_for_fedavg_is_no_gradient() -> None:
    order = dataclasses.replace(order_of(2, 3), returns="gradient")
    records = RecordDict(
        {"arrays": toy_arrays(), "metrics": MetricRecord({"num-examples": 6, "loss": 0.5})}
    )
    with pytest.raises(ProtocolError, match="sends models, not gradients"):
        TrainReport.from_content(records, order)


def test_report_can_be_averaged_by_flowers_own_fedavg() -> None:
    order = order_of(2, 3)
    replies = []
    for value, steps in ((1.0, 2), (4.0, 1)):
        report = report_of(order, steps, arrays=toy_arrays(value))
        replies.append(answered(order, report))
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    assert arrays["weight"].numpy() == pytest.approx(np.full((2, 1), 2.0))  # (6 x 1 + 3 x 4) / 9
    assert metrics is not None
    assert metrics["train-loss"] == pytest.approx((6 * 2.5 + 3 * 1.0) / 9)


def test_report_of_a_client_that_knows_only_fedavg_counts_as_all_steps() -> None:
    order = order_of(2, 3)
    records = RecordDict(
        {"weights": toy_arrays(9.0), "numbers": MetricRecord({"num-examples": 6, "acc": 0.5})}
    )
    found = TrainReport.from_content(Message(records, reply_to=sent(order)).content, order)
    assert found.completed_steps == 2
    assert found.num_examples == 6
    assert len(found.losses) == 0
    assert same_bits(found.arrays, toy_arrays(9.0))


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    ("name", "another"),
    [("arrays", ArrayRecord({"x": Array(np.zeros(1))})), ("metrics", MetricRecord({"x": 1}))],
)
def test_report_needs_exactly_one_model_and_one_metric_record(
    name: str, another: ArrayRecord | MetricRecord, count: int
) -> None:
    order = order_of()
    reply = answered(order, report_of(order))
    if count == 0:
        del reply.content[name]
    else:
        reply.content["more"] = another
    expected = f"one {type(another).__name__} in the reply, found {count}"
    with pytest.raises(ProtocolError, match=expected):
        TrainReport.from_content(reply.content, order)


# --- slices to add up


def sum_message() -> Message:
    order = SumOrder((0.25, 0.75), (toy_arrays(1.0), toy_arrays(5.0)))
    return over_the_wire(Message(order.to_records(), 7, "train.sum"))


@pytest.mark.parametrize("weights", [[], [0.5], [0.2, 0.3, 0.5], [2.0, -1.0], [0.5, 0.75]])
def test_sum_order_without_a_weight_for_each_slice_is_refused(weights: object) -> None:
    message = sum_message()
    message.content["config"]["weights"] = weights
    with pytest.raises(ProtocolError, match="weights"):
        SumOrder.from_message(message)


# --- the state of optimizers


@pytest.mark.parametrize(
    ("optimizer", "momentum", "copies"),
    [("sgd", 0.9, 1), ("sgd", 0.0, 0), ("adamw", 0.9, 2), ("adamw", 0.0, 2)],
)
def test_slots_are_what_torch_keeps(optimizer: str, momentum: float, copies: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(50))
    made = make_optimizer(
        optimizer, [parameter], momentum=momentum, nesterov=False, weight_decay=0.0
    )
    parameter.grad = torch.ones(50)
    made.step()
    kept = {slot: tensor for slot, tensor in made.state[parameter].items() if tensor is not None}
    assert state_copies(optimizer, momentum) == copies
    assert sum(tensor.numel() for tensor in kept.values()) // 50 == copies
    if kept:
        assert set(kept) == set(SLOTS[optimizer]) == set(slots_of(made))
    for slot, tensor in kept.items():
        if slot in COUNTERS:
            assert (tensor.shape, tensor.dtype) == ((), torch.float32)
        else:
            assert (tensor.shape, tensor.dtype) == (parameter.shape, parameter.dtype)
