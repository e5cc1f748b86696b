"""Read the reply of a node with several devices: one model, and what each worker did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .algorithm.averaging import AnyArray
from .model_check import ModelShape
from .protocol import (
    ARRAYS,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    NUM_EXAMPLES,
    Failure,
    HostReply,
    TrainOrder,
    TrainReport,
)
from .reply_check import read_report
from .wire import ProtocolError


@dataclass(frozen=True, eq=False)
class HostModel:
    """The average of the models behind one node.

    Parameters
    ----------
    tensors : mapping
        The average, by name.
    momentum : mapping
        That of the optimizers' states, if they came along.
    momentum_loads : mapping of str to float
        The load behind each tensor of it.
    """

    tensors: Mapping[str, AnyArray]
    momentum: Mapping[str, AnyArray] = field(default_factory=dict)
    momentum_loads: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HostOutcome:
    """What became of the orders behind one node.

    Parameters
    ----------
    model : HostModel, optional
        None if no worker completed a step.
    reports : mapping of int to (TrainReport, MetricRecord)
        By place.
    failures : mapping of int to Failure
        By place.
    """

    model: HostModel | None
    reports: Mapping[int, tuple[TrainReport, MetricRecord]]
    failures: Mapping[int, Failure]


def read_host_reply(
    content: RecordDict,
    orders: Mapping[int, TrainOrder],
    model_shape: ModelShape,
    weighted_by_key: str,
) -> HostOutcome:
    """Read and check the content of a host's reply.

    Parameters
    ----------
    content : RecordDict
        Of the reply.
    orders : mapping of int to TrainOrder
        By place.
    model_shape : ModelShape
        Of the global model.
    weighted_by_key : str
        A figure that every worker's report must hold.

    Raises
    ------
    ProtocolError
        If anything in it cannot be used. Then none of its workers count: nobody can say what is
        in the average.
    """
    reply = HostReply.from_content(content)
    if reply.parts.keys() | reply.failures.keys() != orders.keys() or (
        reply.parts.keys() & reply.failures.keys()
    ):
        raise ProtocolError(
            f"its node answered for the devices {sorted([*reply.parts, *reply.failures])}, not "
            f"for {sorted(orders)}"
        )
    arrays = reply.shared.array_records.get(ARRAYS)
    reports = {}
    for place, part in reply.parts.items():
        own = RecordDict({**part, ARRAYS: ArrayRecord() if arrays is None else arrays})
        reports[place] = read_report(own, orders[place], weighted_by_key)
    total = sum(report.num_examples for report, _ in reports.values())
    told = reply.shared.metric_records.get(METRICS, MetricRecord()).get(NUM_EXAMPLES)
    if told != total:
        raise ProtocolError(
            f"its node averaged models of {told!r} samples, but its workers trained on {total}"
        )
    if not total:
        return HostOutcome(None, reports, reply.failures)
    if arrays is None:
        raise ProtocolError(f"its node sent no model {ARRAYS!r}")
    model = HostModel(model_shape.checked(arrays), *_momentum(reply.shared, model_shape))
    return HostOutcome(model, reports, reply.failures)


def _momentum(
    shared: RecordDict, model_shape: ModelShape
) -> tuple[Mapping[str, AnyArray], Mapping[str, float]]:
    arrays = shared.array_records.get(MOMENTUM)
    if not arrays:
        return {}, {}
    loads: Any = shared.config_records.get(MOMENTUM_LOADS, ConfigRecord()).get(MOMENTUM_LOADS)
    names = sorted(arrays)
    if (
        not isinstance(loads, list)
        or len(loads) != len(names)
        or not all(isinstance(load, float) and load > 0 for load in loads)
    ):
        raise ProtocolError("its node does not say what load is behind its optimizers' state")
    checked = model_shape.checked_momentum(arrays)
    return checked, {name: float(load) for name, load in zip(names, loads, strict=True)}
