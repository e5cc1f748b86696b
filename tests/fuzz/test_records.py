"""Records from the wire: whatever they hold, a ProtocolError or something that makes sense."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from hypothesis import given

from flower_blsgd.protocol import (
    MOMENTUM_POLICIES,
    EvaluateOrder,
    EvaluateReport,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    ProtocolError,
    SumOrder,
    SumReport,
    TrainOrder,
    TrainReport,
    WorkerProfile,
)

from ..in_process_grid import fast_profile, toy_arrays
from ..protocol.test_training import order_of, report_of
from .mutations import hostile, thoroughly

WEIGHTS = np.array([1, 2, 0, 1, 1, 1], np.float32)
ORDER = order_of(momentum=toy_arrays(3.0), momentum_policy="average", sample_weights=WEIGHTS)
SUM = SumOrder((0.25, 0.75), (toy_arrays(1.0), toy_arrays(5.0)))
SLICE = EvaluateOrder(3, 4, 10, toy_arrays(1.0))
QUERY = ProfileQuery(True, 8, 0.5)
HOST = HostOrders(
    {0: ORDER.to_records(), 1: order_of().to_records()},
    "arrays",
    "config",
    "num-examples",
    "load",
    (0.0, 1.0),
    ("weight",),
)


def message(content: RecordDict, kind: str = "train") -> Message:
    return Message(content, 7, kind)


def read(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what was read; None if it was refused as it must be, and nothing else can be."""
    try:
        return call(*arguments)
    except ProtocolError:
        return None


def reply_content(report: Any, kind: str = "train") -> RecordDict:
    content = RecordDict({"x": toy_arrays()})
    return report.to_reply(message(content, kind)).content


def is_time(value: object) -> bool:
    return type(value) is float and 0 <= value < math.inf


@thoroughly(10)
@given(hostile(ORDER.to_records))
def test_orders(content: RecordDict) -> None:
    order = read(TrainOrder.from_message, message(content))
    if order is None:
        return
    assert min(order.round, order.epoch, order.seed) >= 0
    assert min(order.local_steps, order.batch_size) >= 1
    assert order.indices.shape == (order.local_steps * order.batch_size,)
    assert order.indices.dtype == np.int32
    assert order.indices.min() >= 0
    assert is_time(order.deadline_seconds)
    assert is_time(order.learning_rate)
    assert order.momentum_policy in MOMENTUM_POLICIES


@thoroughly(15)
@given(hostile(lambda: reply_content(report_of(order_of(), 1, momentum=toy_arrays(5.0)))))
def test_reports(content: RecordDict) -> None:
    order = order_of()
    report = read(TrainReport.from_content, content, order)
    if report is None:
        return
    assert 0 <= report.completed_steps <= order.local_steps
    assert report.batch_size == order.batch_size
    assert report.losses.dtype == np.float32
    assert len(report.losses) in (0, report.completed_steps * report.batch_size)
    assert np.isfinite(report.losses).all()
    assert all(map(is_time, (report.compute_seconds, report.started_at, report.ended_at)))


@thoroughly(10)
@given(hostile(lambda: reply_content(fast_profile(3, name="a", steps=2, seconds_per_step=0.5))))
def test_profiles(content: RecordDict) -> None:
    profile = read(WorkerProfile.from_content, content)
    if profile is not None:
        assert profile.tier in ("", "fast", "slow")
        assert profile.partition_id >= -1
        assert profile.steps >= 0
        assert is_time(profile.seconds_per_step)
        assert is_time(profile.seconds_per_step_alone)
        for text in (profile.device, profile.name):
            assert text.isprintable()
            assert len(text) <= 1000


@thoroughly(5)
@given(hostile(QUERY.to_records))
def test_queries(content: RecordDict) -> None:
    query = read(ProfileQuery.from_message, message(content, "query.profile"))
    if query is not None:
        assert query.batch_size >= 1 or not query.calibrate
        assert is_time(query.seconds)


@thoroughly(10)
@given(hostile(SLICE.to_records))
def test_evaluate_orders(content: RecordDict) -> None:
    order = read(EvaluateOrder.from_message, message(content, "evaluate"), 20)
    if order is not None:
        assert 0 <= order.first < order.last <= 20
        assert order.round >= 0


@thoroughly(10)
@given(hostile(lambda: reply_content(EvaluateReport(4, 10, [5.5], [3.0]), "evaluate")))
def test_evaluate_reports(content: RecordDict) -> None:
    report = read(EvaluateReport.from_content, content, SLICE)
    if report is not None:
        assert (report.first, report.last) == (4, 10)
        assert type(report.loss) is type(report.metric) is float  # nan is one


@thoroughly(10)
@given(hostile(HOST.to_records))
def test_orders_to_a_node_with_several_devices(content: RecordDict) -> None:
    orders = read(HostOrders.from_message, message(content))
    if orders is None:
        return
    assert orders.contents
    assert all(type(rank) is int and rank >= 0 for rank in orders.contents)
    assert all(math.isfinite(norm) and norm >= 0 for norm in orders.update_norms)
    for own in orders.contents.values():
        read(TrainOrder.from_content, own, orders.arrays_key, orders.config_key)


def host_reply() -> RecordDict:
    part = reply_content(report_of(order_of()))
    del part["arrays"]
    failures = {1: Failure("raised", "Traceback\nRuntimeError: no"), 2: Failure("died", "")}
    return reply_content(HostReply({0: part}, failures, RecordDict({"arrays": toy_arrays()})))


@thoroughly(10)
@given(hostile(host_reply))
def test_replies_of_a_node_with_several_devices(content: RecordDict) -> None:
    reply = read(HostReply.from_content, content)
    if reply is None:
        return
    assert not set(reply.parts) & set(reply.failures)
    for failure in reply.failures.values():
        assert "\n" not in failure.brief


@thoroughly(5)
@given(hostile(SUM.to_records))
def test_orders_to_sum(content: RecordDict) -> None:
    order = read(SumOrder.from_message, message(content, "train.sum"))
    if order is not None:
        assert len(order.slices) == len(order.weights) >= 1
        assert all(0 <= weight <= 1 for weight in order.weights)
        assert math.isclose(sum(order.weights), 1, rel_tol=1e-6)


@thoroughly(5)
@given(hostile(lambda: reply_content(SumReport(toy_arrays(4.0), 1.25, 2.5), "train.sum")))
def test_sums(content: RecordDict) -> None:
    report = read(SumReport.from_content, content)
    if report is None:
        return
    assert is_time(report.started_at)
    assert is_time(report.ended_at)
