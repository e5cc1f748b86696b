"""Replies of a round: read and check them, so that only models that can be averaged count.

What happens when a worker fails: it has weight 0 in the round, the others' weights are
renormalised, its samples are given up for this epoch, and the log says why. Then,

- if its process died, its node is gone, it did not answer in time, or its reply cannot be used:
  it gets an order again in the next round, if its node is connected (`workers.WorkerRegistry`);
- if its ClientApp raised: it is excluded until its node connects with a new node id, as the same
  message would most likely raise again. A SuperNode that starts again gets a new id, unless its
  key is registered; on the local grid the worker is excluded for the rest of the run. Excluded is
  also a device of a node with several that the node does not start again;
- if nobody is left with a completed step: `BiasedLocalSGD` raises AggregationError.

What a node sends, whatever it is, costs no more than the share of its own workers.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from ..algorithm.averaging import AnyArray, average_by_load
from ..algorithm.sampling import LossTable
from ..algorithm.tensor_sum import first_not_finite
from ..array_records import FlatTensors, flat_of
from ..protocol import (
    ARRAYS,
    COUNTERS,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    NUM_EXAMPLES,
    SLOTS,
    TIMING_KEYS,
    Failure,
    HostReply,
    TrainOrder,
    TrainReport,
    state_name,
)
from ..protocol.records import ProtocolError, records_of, unchecked_content, unchecked_record
from .profiles import answer_of
from .workers import Worker

_LOG = logging.getLogger(__name__)

RAISED = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
"""Errors of a ClientApp that the same message would most likely raise again."""

_Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype."""

_COUNTER: _Kind = ((), np.dtype(np.float32))

Orders = Sequence[tuple[Worker, TrainOrder]]


# --- models ---------------------------------------------------------------------------------


class ModelShape:
    """Names, shapes and dtypes of a model's tensors, to check replies against.

    Parameters
    ----------
    arrays : ArrayRecord
        The global model.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self._tensors: dict[str, _Kind] = {
            name: (tuple(array.shape), np.dtype(array.dtype)) for name, array in arrays.items()
        }
        flat = flat_of(arrays)
        self._layout = flat.layout if flat else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors.values())

    def checked(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return a model's tensors by name.

        Raises
        ------
        ProtocolError
            If a tensor is missing, extra, of another shape or dtype, or not finite; the message
            names the first.
        """
        flat = flat_of(arrays)
        if flat is not None and flat.layout == self._layout and not first_not_finite(flat.runs()):
            return FlatTensors(arrays, flat)
        missing = sorted(set(self._tensors) - set(arrays))
        if missing:
            raise ProtocolError(f"its model lacks tensor {missing[0]!r}")
        return _checked(arrays, self._tensors, "its model")

    def checked_momentum(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return the tensors of an optimizer's state, by `state_name`.

        It may lack those of a parameter altogether, such as a frozen one.

        Raises
        ------
        ProtocolError
            If some of a parameter's tensors are missing and others not, or a tensor is extra, of
            another shape or dtype, or not finite; the message names the first.
        """
        expected: dict[str, _Kind] = {}
        for slots, (name, kind) in itertools.product(SLOTS.values(), self._tensors.items()):
            keys = [state_name(slot, name) for slot in slots]
            missing = [key for key in keys if key not in arrays]
            if 0 < len(missing) < len(keys):
                raise ProtocolError(f"its optimizer's state lacks tensor {missing[0]!r}")
            kinds = (_COUNTER if slot in COUNTERS else kind for slot in slots)
            expected |= zip(keys, kinds, strict=True)
        return _checked(arrays, expected, "its optimizer's state")


def _checked(arrays: ArrayRecord, expected: Mapping[str, _Kind], what: str) -> dict[str, AnyArray]:
    """Return the tensors in the order of those that are expected; some may be missing."""
    held = dict(arrays.items())
    extra = sorted(set(held) - set(expected))
    if extra:
        raise ProtocolError(f"{what} has an extra tensor {extra[0]!r}")
    tensors = {}
    for name, kind in expected.items():
        array = held.get(name)
        if array is None:
            continue
        tensor = array.numpy()  # what it holds counts, not what its header says
        if (tensor.shape, tensor.dtype) != kind:
            raise ProtocolError(
                f"its tensor {name!r} is {tensor.dtype} of shape {tensor.shape}, "
                f"not {kind[1]} of shape {kind[0]}"
            )
        tensors[name] = tensor
    wrong = first_not_finite(tensors)
    if wrong is not None:
        raise ProtocolError(f"its tensor {wrong!r} is not finite; a smaller learning rate may help")
    return tensors


# --- one worker's reply -----------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedReply:
    """A worker's reply that can be used.

    Parameters
    ----------
    report : TrainReport
        What was done.
    metrics : MetricRecord
        All of its metrics.
    tensors : mapping
        Its model by name. The workers of a node with several devices have the same object: the
        average that their models are in, empty if none of them completed a step.
    momentum : mapping
        The optimizer's state, if it was sent; of such a node averaged likewise.
    momentum_loads : mapping of str to float
        The completed load behind each tensor of that state.
    """

    report: TrainReport
    metrics: MetricRecord
    tensors: Mapping[str, AnyArray]
    momentum: Mapping[str, AnyArray]
    momentum_loads: Mapping[str, float]


def check_reply(
    content: RecordDict, order: TrainOrder, model_shape: ModelShape, weighted_by_key: str
) -> CheckedReply:
    """Read and check the reply to an order, on the server or on a node with several devices.

    Raises
    ------
    ProtocolError
        If it cannot be used, such as without the metric `weighted_by_key`; the message says why.
    """
    report, metrics = _read_report(content, order, weighted_by_key)
    tensors = model_shape.checked(report.arrays)
    momentum = model_shape.checked_momentum(report.momentum) if report.momentum else {}
    loads = dict.fromkeys(momentum, float(report.num_examples))
    return CheckedReply(report, metrics, tensors, momentum, loads)


def _read_report(
    content: RecordDict, order: TrainOrder, weighted_by_key: str
) -> tuple[TrainReport, MetricRecord]:
    report = TrainReport.from_content(content, order)
    metrics = next(iter(records_of(content, MetricRecord).values()))
    if not isinstance(metrics.get(weighted_by_key), int | float):
        raise ProtocolError(f"its metrics have no number {weighted_by_key!r}")
    return report, metrics


# --- all replies of a round -------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one order.

    Parameters
    ----------
    worker : Worker
        The worker that had it.
    order : TrainOrder
        What was ordered.
    reply : CheckedReply, optional
        None if the order failed.
    failure : str
        Why it failed, in one line; empty if it did not.
    """

    worker: Worker
    order: TrainOrder
    reply: CheckedReply | None = None
    failure: str = ""

    @property
    def report(self) -> TrainReport | None:
        """The worker's report; None if the order failed."""
        return self.reply.report if self.reply else None

    @property
    def load(self) -> float:
        """Completed steps times batch size; 0 if it failed."""
        return float(self.report.num_examples) if self.report else 0.0


def read_replies(
    replies: Iterable[Message],
    orders: Orders,
    model_shape: ModelShape,
    weighted_by_key: str = NUM_EXAMPLES,
) -> list[Outcome]:
    """Match replies with orders and check them.

    Parameters
    ----------
    replies : iterable of Message
        In any order; those of nodes without an order are ignored.
    orders : sequence of (Worker, TrainOrder)
        One per worker. The workers of one node share one reply.
    model_shape : ModelShape
        Of the global model.
    weighted_by_key : str (default: "num-examples")
        A metric that every reply must hold.

    Returns
    -------
    list of Outcome
        One per order, in worker order.
    """
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    orders_of: dict[int, list[tuple[Worker, TrainOrder]]] = {}
    for worker, order in orders:
        orders_of.setdefault(worker.node_id, []).append((worker, order))
    outcomes = []
    for node_id, given in orders_of.items():
        answer = answer_of(by_node.get(node_id), None)
        if isinstance(answer, RecordDict):
            try:
                if given[0][0].local_rank is not None:
                    outcomes += _read_host(given, answer, model_shape, weighted_by_key)
                else:
                    ((worker, order),) = given
                    reply = check_reply(answer, order, model_shape, weighted_by_key)
                    outcomes.append(Outcome(worker, order, reply))
                continue
            except Exception as error:  # whatever a node sends costs its own share only
                answer = Failure(0, str(error) or type(error).__name__)
        outcomes += _failed(given, answer)
    return sorted(outcomes, key=lambda outcome: outcome.worker.index)


def _read_host(
    given: Orders, content: RecordDict, model_shape: ModelShape, weighted_by_key: str
) -> list[Outcome]:
    """Read the reply of a node with several devices: one model, and each worker's report.

    Raises
    ------
    ProtocolError
        If anything in it cannot be used. Then none of its workers count: nobody can say what is
        in the average.
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
    momentum, loads = _host_momentum(host.shared, model_shape) if total else ({}, {})
    outcomes = []
    for worker, order in given:
        rank = worker.local_rank or 0
        if failure := host.failures.get(rank):
            outcomes += _failed([(worker, order)], failure)
            if failure.code == ErrorCode.NODE_UNAVAILABLE:  # its node will not start it again
                worker.excluded = outcomes[-1].failure
        else:
            reply = CheckedReply(*reports[rank], tensors, momentum, loads)
            outcomes.append(Outcome(worker, order, reply))
    return outcomes


def _host_momentum(
    shared: RecordDict, model_shape: ModelShape
) -> tuple[Mapping[str, AnyArray], Mapping[str, float]]:
    arrays = shared.array_records.get(MOMENTUM, ArrayRecord())
    loads: Any = shared.config_records.get(MOMENTUM_LOADS, ConfigRecord()).get(MOMENTUM_LOADS, [])
    if len(loads) != len(arrays) or not all(type(load) is float and load > 0 for load in loads):
        raise ProtocolError("its node does not say what load is behind its optimizers' state")
    return model_shape.checked_momentum(arrays), dict(zip(sorted(arrays), loads, strict=True))


def _failed(given: Orders, failure: Failure) -> list[Outcome]:
    """Return the outcomes of orders that failed; workers whose ClientApp raised are excluded."""
    outcomes = [Outcome(worker, order, failure=failure.brief) for worker, order in given]
    if failure.code not in RAISED:
        for worker, order in given:
            _LOG.warning(
                "worker %s has weight 0 in round %d: %s", worker.label, order.round, failure.brief
            )
        return outcomes
    for worker, _ in given:
        worker.excluded = failure.brief
    _LOG.error(
        "%s raised in round %d and takes no part from now on:\n%s",
        ", ".join(f"worker {worker.label}" for worker, _ in given),
        given[0][1].round,
        failure.reason.strip() or failure.brief,
    )
    return outcomes


# --- losses, metrics, momentum ----------------------------------------------------------------


def record_losses(outcomes: Sequence[Outcome], table: LossTable, server_round: int) -> int:
    """Write the reported losses into the table; return the samples of orders that failed."""
    given_up = 0
    for outcome in reversed(outcomes):  # the lowest worker index is written last and wins
        if outcome.report is None:
            given_up += len(outcome.order.indices)
        else:
            done = outcome.order.indices[: len(outcome.report.losses)]
            table.record(done, outcome.report.losses, server_round)
    return given_up


def average_metrics(
    outcomes: Sequence[Outcome], average: Callable[..., MetricRecord], weighted_by_key: str
) -> MetricRecord:
    """Average the metrics of the workers that count, as Flower does, and add up their samples.

    Times are left out: their average means nothing.
    """
    contents = []
    for reply in _counted(outcomes):
        kept = {key: v for key, v in reply.metrics.items() if key not in TIMING_KEYS}
        contents.append(unchecked_content({METRICS: unchecked_record(MetricRecord, kept)}))
    metrics = average(contents, weighted_by_key)
    metrics[weighted_by_key] = int(sum(outcome.load for outcome in outcomes))
    return metrics


def average_momentum(outcomes: Sequence[Outcome]) -> dict[str, AnyArray] | None:
    """Average the optimizers' states that were sent, by load; None if none was.

    Each tensor over those that have it: a worker may have trained other parameters. Counters of
    steps are averaged too and become fractions, as fits a mixture of states.
    """
    # That of a node with several devices once.
    once = {id(reply.momentum): reply for reply in _counted(outcomes)}.values()
    loads = [reply.momentum_loads for reply in once]
    return average_by_load([reply.momentum for reply in once], loads)[0] or None


def _counted(outcomes: Sequence[Outcome]) -> list[CheckedReply]:
    return [o.reply for o in outcomes if o.reply is not None and o.load > 0]
