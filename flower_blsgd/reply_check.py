"""Whether what a worker replied to its order can be used: asked by the server, and by a host."""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import MetricRecord, RecordDict

from .algorithm.averaging import AnyArray
from .model_check import ModelShape
from .protocol import TrainOrder, TrainReport
from .quick_records import records_of
from .wire import ProtocolError


@dataclass(frozen=True)
class CheckedReply:
    """A reply that can be used.

    Parameters
    ----------
    report : TrainReport
        What was done.
    metrics : MetricRecord
        The figures in the reply.
    tensors : dict
        The worker's model.
    momentum : dict
        Its optimizer's state, if it came along.
    """

    report: TrainReport
    metrics: MetricRecord
    tensors: Mapping[str, AnyArray]
    momentum: Mapping[str, AnyArray]


def check_reply(
    content: RecordDict, order: TrainOrder, model_shape: ModelShape, weighted_by_key: str
) -> CheckedReply:
    """Read the content of the reply to an order, and check it.

    Parameters
    ----------
    content : RecordDict
        Of the reply.
    order : TrainOrder
        What was asked.
    model_shape : ModelShape
        Of the global model.
    weighted_by_key : str
        A figure that it must hold.

    Raises
    ------
    ProtocolError
        If it cannot be used; the message says why.
    """
    report, metrics = read_report(content, order, weighted_by_key)
    tensors = model_shape.checked(report.arrays)
    momentum = model_shape.checked_momentum(report.momentum) if report.momentum else {}
    return CheckedReply(report, metrics, tensors, momentum)


def read_report(
    content: RecordDict, order: TrainOrder, weighted_by_key: str
) -> tuple[TrainReport, MetricRecord]:
    """Read what a worker says that it did, and its figures, without a look at its model.

    Raises
    ------
    ProtocolError
        If it does not fit the order.
    """
    report = TrainReport.from_content(content, order)
    metrics = next(iter(records_of(content, MetricRecord).values()))
    if not isinstance(metrics.get(weighted_by_key), int | float):
        raise ProtocolError(f"its figures have no number {weighted_by_key!r}")
    return report, metrics
