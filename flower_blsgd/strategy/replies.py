"""Read and check the replies of a round.

A wrong reply costs only the contribution of that node's workers. ``docs/reliability.md`` describes
what happens to a worker that fails.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from ..algorithm.tensor_sum import AnyArray, first_not_finite
from ..grids.array_records import FlatTensors, flat_of
from ..protocol import (
    ARRAYS,
    COUNTERS,
    GRAD_SCALER,
    METRICS,
    MOMENTUM,
    MOMENTUM_ZEROED,
    NUM_EXAMPLES,
    SLOTS,
    Failure,
    HostReply,
    NotFiniteError,
    ProtocolError,
    TrainOrder,
    TrainReport,
    state_name,
)
from ..protocol.records import records_of
from .messages import answer_of
from .workers import Worker

_LOG = logging.getLogger(__name__)

_MOST_SECONDS = 1e9
"""Upper limit of the seconds of computing; keeps sums and speeds finite."""

_Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype."""

_COUNTER: _Kind = ((), np.dtype(np.float32))
_SCALE: _Kind = ((2,), np.dtype(np.float32))

Orders = Sequence[tuple[Worker, TrainOrder]]


# --- models ---------------------------------------------------------------------------------


class ModelShape:
    """Names, shapes and dtypes of the tensors of a model, to check replies."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self._tensors: dict[str, _Kind] = {
            name: (tuple(array.shape), np.dtype(array.dtype)) for name, array in arrays.items()
        }
        flat = flat_of(arrays)
        self._layout = flat.layout if flat else None

    @property
    def num_bytes(self) -> int:
        """Size of the model in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors.values())

    def checked(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return the tensors of a model by name.

        ProtocolError names the first tensor that is missing, extra, not finite, or has another
        shape or dtype.
        """
        flat = flat_of(arrays)
        if flat is not None and flat.layout == self._layout and not first_not_finite(flat.runs()):
            return FlatTensors(arrays, flat)
        missing = sorted(set(self._tensors) - set(arrays))
        if missing:
            raise ProtocolError(f"its model lacks tensor {missing[0]!r}")
        return _checked(arrays, self._tensors, "its model")

    def checked_momentum(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return the tensors of an optimizer's state by `state_name`.

        Any may be missing: a parameter may be frozen, and a worker begins with zero where something
        is missing. Those of a custom optimizer may have any shape and dtype. ProtocolError names
        the first tensor that belongs to no parameter, is not finite, or has another shape or dtype
        than torch's SGD and AdamW give it.
        """
        expected: dict[str, _Kind | None] = {GRAD_SCALER: _SCALE}
        for slots, (name, kind) in itertools.product(SLOTS.values(), self._tensors.items()):
            kinds = (_COUNTER if slot in COUNTERS else kind for slot in slots)
            expected |= zip((state_name(slot, name) for slot in slots), kinds, strict=True)
        for key in arrays:
            if key.partition("/")[2] in self._tensors:
                expected.setdefault(key, None)
        return _checked(arrays, expected, "its optimizer's state")


def _checked(
    arrays: ArrayRecord, expected: Mapping[str, _Kind | None], what: str
) -> dict[str, AnyArray]:
    """Return the tensors in the expected order; some may be missing."""
    held = dict(arrays.items())
    extra = sorted(set(held) - set(expected))
    if extra:
        raise ProtocolError(f"{what} has an extra tensor {extra[0]!r}")
    tensors = {}
    for name, kind in expected.items():
        array = held.get(name)
        if array is None:
            continue
        tensor = array.numpy()  # the record's own shape and dtype may be wrong
        if kind is not None and (tensor.shape, tensor.dtype) != kind:
            raise ProtocolError(
                f"its tensor {name!r} is {tensor.dtype} of shape {tensor.shape}, "
                f"not {kind[1]} of shape {kind[0]}"
            )
        tensors[name] = tensor
    wrong = first_not_finite(tensors)
    if wrong is not None:
        raise NotFiniteError(
            f"its tensor {wrong!r} is not finite; a smaller learning rate may help"
        )
    return tensors


# --- one worker's reply -----------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedReply:
    """A worker's reply that can be used.

    Parameters
    ----------
    report : TrainReport
        The report.
    metrics : MetricRecord
        All metrics of the reply.
    tensors : mapping
        The model by name. The workers of a node with several devices share the average of their
        models, one object; it is empty if none of them completed a step.
    momentum : mapping
        The optimizer's state, or its average for such a node; empty if it was not sent.
    """

    report: TrainReport
    metrics: MetricRecord
    tensors: Mapping[str, AnyArray]
    momentum: Mapping[str, AnyArray]


def check_reply(
    content: RecordDict, order: TrainOrder, model_shape: ModelShape, weighted_by_key: str
) -> CheckedReply:
    """Read and check the reply to an order; it must have the metric `weighted_by_key`.

    ProtocolError gives the reason if the reply cannot be used.
    """
    report, metrics = _read_report(content, order, weighted_by_key)
    tensors = model_shape.checked(report.arrays)
    momentum = model_shape.checked_momentum(report.momentum) if report.momentum else {}
    return CheckedReply(report, metrics, tensors, momentum)


def _read_report(
    content: RecordDict, order: TrainOrder, weighted_by_key: str
) -> tuple[TrainReport, MetricRecord]:
    report = TrainReport.from_content(content, order)
    if report.compute_seconds > _MOST_SECONDS:
        raise ProtocolError(f"it computed for {report.compute_seconds:g} s")
    metrics = next(iter(records_of(content, MetricRecord).values()))
    weight = metrics.get(weighted_by_key)
    if not isinstance(weight, int | float):
        raise ProtocolError(f"its metrics have no number {weighted_by_key!r}")
    if not (0 < weight < math.inf or (weight == 0 and not report.num_examples)):
        raise ProtocolError(f"its metrics have {weighted_by_key!r} = {weight}")
    return report, metrics


# --- all replies of a round -------------------------------------------------------------------


@dataclass(eq=False)
class Outcome:
    """Outcome of an order.

    Parameters
    ----------
    worker, order
        The worker, and its order.
    reply : CheckedReply, optional
        None if the order failed.
    failure : Failure, optional
        Why the order failed; None if it succeeded.
    momentum_zeroed : bool (default: False)
        Whether the optimizer's state was not finite, even if the order failed.

    Attributes
    ----------
    report : TrainReport, optional
        The report in the reply.
    load : float
        Completed steps times batch size; 0 if the order failed.
    cut_off : int
        Samples of the order that a deadline cut off; 0 if the order failed.
    """

    worker: Worker
    order: TrainOrder
    reply: CheckedReply | None = None
    failure: Failure | None = None
    momentum_zeroed: bool = False

    def __post_init__(self) -> None:
        self.report = self.reply.report if self.reply else None
        done = self.report.num_examples if self.report else 0
        self.load = float(done)
        self.cut_off = len(self.order.indices) - done if self.report else 0


def read_replies(
    replies: Iterable[Message],
    orders: Orders,
    model_shape: ModelShape,
    weighted_by_key: str = NUM_EXAMPLES,
    message_ids: Mapping[int, str] | None = None,
) -> list[Outcome]:
    """Match replies with orders, check them, and record the failures of each worker.

    Parameters
    ----------
    replies : iterable of Message
        In any order. Replies of nodes without an order are ignored. Second replies, and replies to
        other messages, are dropped and recorded.
    orders : sequence of (Worker, TrainOrder)
        One per worker. The workers of one node share one reply.
    model_shape : ModelShape
        Shape of the global model.
    weighted_by_key : str (default: "num-examples")
        A metric that every reply must have.
    message_ids : mapping of int to str, optional
        Id of the message to each node, by node id, if known.

    Returns
    -------
    list of Outcome
        One per order, in worker order.
    """
    orders_of: dict[int, list[tuple[Worker, TrainOrder]]] = {}
    for worker, order in orders:
        orders_of.setdefault(worker.node_id, []).append((worker, order))
    by_node: dict[int, Message] = {}
    for reply in replies:
        node_id = reply.metadata.src_node_id
        answered = (message_ids or {}).get(node_id) or reply.metadata.reply_to_message_id
        if reply.metadata.reply_to_message_id != answered:
            _drop(orders_of.get(node_id, ()), "reply of another round")
        elif by_node.setdefault(node_id, reply) is not reply:
            _drop(orders_of.get(node_id, ()), "second reply")
    outcomes: list[Outcome] = []
    for node_id, given in orders_of.items():
        answer, zeroed = answer_of(by_node.get(node_id), None), False
        if isinstance(answer, RecordDict):
            try:
                if given[0][0].local_rank is not None:
                    outcomes += _read_host(given, answer, model_shape, weighted_by_key)
                else:
                    ((worker, order),) = given
                    metrics = records_of(answer, MetricRecord).values()
                    zeroed = any(record.get(MOMENTUM_ZEROED) == 1 for record in metrics)
                    checked = check_reply(answer, order, model_shape, weighted_by_key)
                    outcomes.append(Outcome(worker, order, checked, None, zeroed))
                continue
            except Exception as error:  # a wrong reply must not end the round
                answer = Failure.of(error)
        outcomes += _failed(given, answer, zeroed)
    for outcome in outcomes:
        if not outcome.failure:
            outcome.worker.failures_in_a_row, outcome.worker.fresh = 0, False
    return sorted(outcomes, key=lambda outcome: outcome.worker.index)


def _read_host(
    given: Orders, content: RecordDict, model_shape: ModelShape, weighted_by_key: str
) -> list[Outcome]:
    """Read the reply of a node with several devices: one model, and a report per worker.

    ProtocolError if any part is wrong, because the content of the average is then unknown.
    """
    host = HostReply.from_content(content)
    orders = {worker.local_rank or 0: order for worker, order in given}
    if sorted([*host.parts, *host.failures]) != sorted(orders):
        raise ProtocolError(
            f"its node answered for the devices {sorted([*host.parts, *host.failures])}, not "
            f"for {sorted(orders)}"
        )
    arrays = host.shared.array_records.get(ARRAYS)
    reports = {}
    for rank, part in host.parts.items():
        content = RecordDict({**part, ARRAYS: ArrayRecord() if arrays is None else arrays})
        reports[rank] = _read_report(content, orders[rank], weighted_by_key)
    total = sum(report.num_examples for report, _ in reports.values())
    averaged = host.shared.metric_records.get(METRICS, MetricRecord()).get(NUM_EXAMPLES)
    if averaged != total:
        raise ProtocolError(
            f"its node averaged models of {averaged!r} samples, but its workers trained on {total}"
        )
    if total and arrays is None:
        raise ProtocolError(f"its node sent no model {ARRAYS!r}")
    tensors = model_shape.checked(arrays) if arrays is not None and total else {}
    momentum = model_shape.checked_momentum(
        host.shared.array_records.get(MOMENTUM, ArrayRecord()) if total else ArrayRecord()
    )
    outcomes = []
    for worker, order in given:
        rank = worker.local_rank or 0
        if failure := host.failures.get(rank):
            outcomes += _failed([(worker, order)], failure)
        else:
            reply = CheckedReply(*reports[rank], tensors, momentum)
            zeroed = bool(reply.report.momentum_zeroed)
            outcomes.append(Outcome(worker, order, reply, None, zeroed))
    return outcomes


def _failed(given: Orders, failure: Failure, zeroed: bool = False) -> list[Outcome]:
    """Record failed orders, log the first of each kind, and return their outcomes."""
    first = [w for w, _ in given if w.note_failed_order(failure.kind, failure.brief)]
    if first:
        raised = failure.in_app
        _LOG.log(
            logging.ERROR if raised else logging.WARNING,
            "%s %s weight 0 in round %d: %s",
            ", ".join(f"worker {worker.label}" for worker in first),
            "has" if len(first) == 1 else "have",
            given[0][1].round,
            failure.reason.strip() if raised and failure.reason.strip() else failure.brief,
        )
    return [Outcome(worker, order, None, failure, zeroed) for worker, order in given]


def _drop(given: Orders, kind: str) -> None:
    """Record an unexpected reply, unless its node has no order."""
    for worker, order in given:
        if worker.note_failure(kind):
            _LOG.warning("worker %s in round %d: %s, dropped", worker.label, order.round, kind)
