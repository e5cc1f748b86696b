"""Records from the wire with anything in them: a ProtocolError, or values that make sense."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.protocol import (
    EvaluateOrder,
    EvaluateReport,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    ProtocolError,
    ScriptInfo,
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
INFO = ScriptInfo(600, 8, 50, "accuracy", "max", "0f", ["weight"])
ORDERS = {0: ORDER.to_records(), 1: order_of().to_records()}


def reply_content(report: Any, kind: str = "train") -> RecordDict:
    message = Message(RecordDict({"x": toy_arrays()}), 7, kind)
    return report.to_reply(message).content


def host_reply() -> RecordDict:
    part = reply_content(report_of(order_of()))
    del part["arrays"]
    failures = {1: Failure("raised", "Traceback\nRuntimeError: no"), 2: Failure("died", "")}
    return reply_content(HostReply({0: part}, failures, RecordDict({"arrays": toy_arrays()})))


def message(content: RecordDict) -> Message:
    return Message(content, 7, "train")


RECORDS: dict[str, tuple[Callable[[], RecordDict], Callable[[RecordDict], Any]]] = {
    "order": (ORDER.to_records, lambda c: TrainOrder.from_message(message(c))),
    "report": (
        lambda: reply_content(report_of(order_of(), 1, momentum=toy_arrays(5.0))),
        lambda c: TrainReport.from_content(c, order_of()),
    ),
    "profile": (
        lambda: reply_content(fast_profile(3, name="a", steps=2, seconds_per_step=0.5)),
        WorkerProfile.from_content,
    ),
    "query": (
        ProfileQuery(True, 8, 0.5).to_records,
        lambda c: ProfileQuery.from_message(message(c)),
    ),
    "evaluate order": (SLICE.to_records, lambda c: EvaluateOrder.from_message(message(c), 20)),
    "evaluate report": (
        lambda: reply_content(EvaluateReport(4, 10, [5.5], [3.0]), "evaluate"),
        lambda c: EvaluateReport.from_content(c, SLICE),
    ),
    "host orders": (
        HostOrders(ORDERS, update_norms=(0.0, 1.0), moving=("weight",)).to_records,
        lambda c: HostOrders.from_message(message(c)),
    ),
    "host reply": (host_reply, HostReply.from_content),
    "session": (lambda: INFO.to_records(toy_arrays()), ScriptInfo.from_content),
    "sum order": (SUM.to_records, lambda c: SumOrder.from_message(message(c))),
    "sum": (
        lambda: reply_content(SumReport(toy_arrays(4.0), 1.25, 2.5), "train.sum"),
        SumReport.from_content,
    ),
}
"""What makes a content, and what reads it."""


def numbers_in(record: Any) -> Iterator[tuple[str, float]]:
    for field in fields(record):
        value = getattr(record, field.name)
        for number in value if isinstance(value, list | tuple | np.ndarray) else [value]:
            if isinstance(number, int | float | np.number):
                yield field.name, float(number)


@pytest.mark.parametrize("name", RECORDS)
@thoroughly(10)
@given(st.data())
def test_records(name: str, data: st.DataObject) -> None:
    make, read = RECORDS[name]
    try:
        record = read(data.draw(hostile(make)))
    except ProtocolError:
        return
    for field, number in numbers_in(record):
        if name != "evaluate report" and field != "learning_rate":  # if the model diverged
            assert math.isfinite(number), field
            assert number >= (-1 if field in ("partition_id", "evaluate_every") else 0), field
    if isinstance(record, TrainOrder):
        assert record.indices.shape == (record.local_steps * record.batch_size,)
    if isinstance(record, TrainReport):
        assert record.completed_steps <= order_of().local_steps
        assert len(record.losses) in (0, record.num_examples)
        assert len(record.losses) <= len(order_of().indices)
    if isinstance(record, EvaluateOrder):
        assert record.first < record.last <= 20
    if isinstance(record, HostReply):
        assert not set(record.parts) & set(record.failures)
    if isinstance(record, SumOrder):
        assert math.isclose(sum(record.weights), 1, rel_tol=1e-6)
