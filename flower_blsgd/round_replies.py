"""Read the replies of a round: what each worker did, or why it counts 0."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from .algorithm.averaging import AnyArray, LoadWeighting, weighted_average
from .algorithm.loss_table import LossTable
from .model_check import ModelShape
from .protocol import METRICS, NUM_EXAMPLES, TIMING_KEYS, TrainOrder, TrainReport
from .roster import Worker
from .wire import ProtocolError

_LOG = logging.getLogger(__name__)

RAISED = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
"""The same message would most likely raise again."""


@dataclass(frozen=True)
class Outcome:
    """What became of one order.

    Parameters
    ----------
    worker : Worker
        Who had it.
    order : TrainOrder
        What was asked.
    report : TrainReport, optional
        What was done; None if the order failed.
    tensors : dict
        The worker's model; empty if the order failed.
    momentum : dict
        Its optimizer's state, if it came along.
    metrics : MetricRecord
        The figures in the reply.
    failure : str
        Why it failed, in one line.
    """

    worker: Worker
    order: TrainOrder
    report: TrainReport | None = None
    tensors: Mapping[str, AnyArray] = field(default_factory=dict)
    momentum: Mapping[str, AnyArray] = field(default_factory=dict)
    metrics: MetricRecord = field(default_factory=MetricRecord)
    failure: str = ""

    @property
    def load(self) -> float:
        """Completed steps times batch size; 0 if it failed."""
        return float(self.report.num_examples) if self.report else 0.0

    def metric_content(self) -> RecordDict:
        """Return the figures for Flower's metric aggregation, without the times."""
        kept = {key: v for key, v in self.metrics.items() if key not in TIMING_KEYS}
        return RecordDict({METRICS: MetricRecord(kept)})


def read_replies(
    replies: Iterable[Message],
    orders: Mapping[int, tuple[Worker, TrainOrder]],
    model_shape: ModelShape,
    weighted_by_key: str = NUM_EXAMPLES,
) -> list[Outcome]:
    """Match replies with orders and check them.

    A worker whose ClientApp raised is excluded for good, and its traceback is logged once.

    Parameters
    ----------
    replies : iterable of Message
        In any order; those of nobody's order are ignored.
    orders : mapping of int to (Worker, TrainOrder)
        By node id.
    model_shape : ModelShape
        Of the global model.
    weighted_by_key : str (default: "num-examples")
        A figure that every reply must hold.

    Returns
    -------
    list of Outcome
        One per order, in worker order.
    """
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    outcomes = []
    for node_id, (worker, order) in orders.items():
        reply = by_node.get(node_id)
        if reply is None:
            outcomes.append(_failed(worker, order, "it did not answer in time"))
        elif reply.has_error():
            outcomes.append(_read_error(worker, order, reply))
        else:
            outcomes.append(_read(worker, order, reply, model_shape, weighted_by_key))
    return sorted(outcomes, key=lambda outcome: outcome.worker.index)


def _read(
    worker: Worker,
    order: TrainOrder,
    reply: Message,
    model_shape: ModelShape,
    weighted_by_key: str,
) -> Outcome:
    try:
        report = TrainReport.from_reply(reply, order)
        metrics = next(iter(reply.content.metric_records.values()))
        if not isinstance(metrics.get(weighted_by_key), int | float):
            raise ProtocolError(f"its figures have no number {weighted_by_key!r}")
        tensors = model_shape.checked(report.arrays)
        momentum = model_shape.checked_momentum(report.momentum) if report.momentum else {}
    except Exception as error:  # whatever a node sends, it costs only its own share
        return _failed(worker, order, str(error) or type(error).__name__)
    return Outcome(worker, order, report, tensors, momentum, metrics)


def _read_error(worker: Worker, order: TrainOrder, reply: Message) -> Outcome:
    reason = (reply.error.reason or "").strip() or f"error {reply.error.code}"
    brief = reason.splitlines()[-1]
    if reply.error.code not in RAISED:
        return _failed(worker, order, brief)
    worker.excluded = brief
    _LOG.error(
        "worker %s raised in round %d and is left out from now on:\n%s",
        worker.label,
        order.round,
        reason,
    )
    return Outcome(worker, order, failure=brief)


def _failed(worker: Worker, order: TrainOrder, reason: str) -> Outcome:
    _LOG.warning("worker %s counts 0 in round %d: %s", worker.label, order.round, reason)
    return Outcome(worker, order, failure=reason)


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
    """Average the figures of the workers that count, as Flower does, and add up their samples."""
    counted = [outcome for outcome in outcomes if outcome.load > 0]
    metrics = average([outcome.metric_content() for outcome in counted], weighted_by_key)
    metrics[weighted_by_key] = int(sum(outcome.load for outcome in counted))
    return metrics


def average_momentum(outcomes: Sequence[Outcome]) -> dict[str, AnyArray] | None:
    """Average the optimizers' states that came along, by load; None if none came.

    Each tensor over those that have it: a worker may have trained other parameters. Counters of
    steps are averaged too and become fractions, as fits a mixture of states.
    """
    counted = [outcome for outcome in outcomes if outcome.momentum and outcome.load > 0]
    if not counted:
        return None
    average: dict[str, AnyArray] = {}
    for name in dict.fromkeys(name for outcome in counted for name in outcome.momentum):
        having = [outcome for outcome in counted if name in outcome.momentum]
        weights = LoadWeighting().weights([outcome.load for outcome in having])
        average |= weighted_average([{name: o.momentum[name]} for o in having], weights)
    return average
