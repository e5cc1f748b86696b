"""Read the replies of a round: what each worker did, or why it counts 0."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from .algorithm.averaging import AnyArray, weighted_average
from .model_check import ModelShape, refuse_not_finite
from .protocol import METRICS, TIMING_KEYS, ProtocolError, TrainOrder, TrainReport
from .roster import Worker
from .round_log import TimeShare, WorkerRound, split_times

_LOG = logging.getLogger(__name__)

_RAISED = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)


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
    metrics : MetricRecord
        The figures in the reply.
    failure : str
        Why it failed, in one line.
    """

    worker: Worker
    order: TrainOrder
    report: TrainReport | None = None
    tensors: Mapping[str, AnyArray] = field(default_factory=dict)
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

    Returns
    -------
    list of Outcome
        One per order, in worker order.
    """
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    outcomes = [
        _read(worker, order, by_node.get(node_id), model_shape)
        for node_id, (worker, order) in orders.items()
    ]
    return sorted(outcomes, key=lambda outcome: outcome.worker.index)


def _read(
    worker: Worker, order: TrainOrder, reply: Message | None, model_shape: ModelShape
) -> Outcome:
    if reply is None:
        return _failed(worker, order, "it did not answer in time")
    if reply.has_error():
        reason = (reply.error.reason or f"error {reply.error.code}").strip()
        brief = reason.splitlines()[-1]
        if reply.error.code in _RAISED:
            worker.excluded = brief
            _LOG.error(
                "worker %s raised in round %d and is left out from now on:\n%s",
                worker.label,
                order.round,
                reason,
            )
            return Outcome(worker, order, failure=brief)
        return _failed(worker, order, brief)
    try:
        report = TrainReport.from_reply(reply, order)
        tensors = model_shape.checked(report.arrays)
        if report.momentum is not None:
            refuse_not_finite({name: a.numpy() for name, a in report.momentum.items()})
    except (ProtocolError, TypeError, ValueError) as error:
        return _failed(worker, order, str(error))
    metrics = next(iter(reply.content.metric_records.values()))
    return Outcome(worker, order, report, tensors, metrics)


def _failed(worker: Worker, order: TrainOrder, reason: str) -> Outcome:
    _LOG.warning("worker %s counts 0 in round %d: %s", worker.label, order.round, reason)
    return Outcome(worker, order, failure=reason)


def average_momentum(
    outcomes: Sequence[Outcome], weights: Sequence[float]
) -> dict[str, AnyArray] | None:
    """Average the momentum buffers that came with the models; None if none came."""
    counted = [
        ({name: a.numpy() for name, a in outcome.report.momentum.items()}, weight)
        for outcome, weight in zip(outcomes, weights, strict=True)
        if outcome.report is not None and outcome.report.momentum and weight > 0
    ]
    if not counted:
        return None
    total = sum(weight for _, weight in counted)
    return weighted_average([buffers for buffers, _ in counted], [w / total for _, w in counted])


def worker_rounds(
    outcomes: Sequence[Outcome], weights: Sequence[float], sent_at: float, received_at: float
) -> tuple[WorkerRound, ...]:
    """Return each worker's part of the round: what it did, its weight, and its times."""
    computing = {
        o.worker.index: (o.report.started_at, o.report.ended_at)
        for o in outcomes
        if o.report is not None and o.report.ended_at > 0
    }
    times = split_times(sent_at, received_at, computing)
    rows = []
    for outcome, weight in zip(outcomes, weights, strict=True):
        worker, report = outcome.worker, outcome.report
        time = times.get(worker.index, TimeShare())
        rows.append(
            WorkerRound(
                worker=worker.index,
                label=worker.label,
                fast=worker.fast,
                local_steps=outcome.order.local_steps,
                completed_steps=report.completed_steps if report else 0,
                num_examples=report.num_examples if report else 0,
                weight=weight,
                loss=report.mean_loss if report else float("nan"),
                start_seconds=time.start,
                compute_seconds=time.compute,
                waiting_seconds=time.waiting,
                transfer_seconds=time.transfer,
                failure=outcome.failure,
            )
        )
    return tuple(rows)
