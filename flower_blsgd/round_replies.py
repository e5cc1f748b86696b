"""Read the replies of a round: what each worker did, or why it counts 0."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from .algorithm.averaging import AnyArray
from .algorithm.loss_table import LossTable
from .algorithm.nesting import average_by_load
from .host_replies import HostModel, HostOutcome, read_host_reply
from .model_check import ModelShape
from .protocol import METRICS, NUM_EXAMPLES, TIMING_KEYS, TrainOrder, TrainReport
from .quick_records import quick_content, quick_record
from .reply_check import check_reply
from .roster import Worker

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
    host : HostModel, optional
        Instead of `tensors` and `momentum`, for a worker behind a node with several devices: the
        average that holds its model. All that are in it have the same object.
    """

    worker: Worker
    order: TrainOrder
    report: TrainReport | None = None
    tensors: Mapping[str, AnyArray] = field(default_factory=dict)
    momentum: Mapping[str, AnyArray] = field(default_factory=dict)
    metrics: MetricRecord = field(default_factory=MetricRecord)
    failure: str = ""
    host: HostModel | None = None

    @property
    def load(self) -> float:
        """Completed steps times batch size; 0 if it failed."""
        return float(self.report.num_examples) if self.report else 0.0

    def metric_content(self) -> RecordDict:
        """Return the figures for Flower's metric aggregation, without the times."""
        kept = {key: v for key, v in self.metrics.items() if key not in TIMING_KEYS}
        return quick_content({METRICS: quick_record(MetricRecord, kept)})


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
        By worker index. The workers behind one node have one reply together.
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
    behind: dict[int, list[tuple[Worker, TrainOrder]]] = {}
    for worker, order in orders.values():
        behind.setdefault(worker.node_id, []).append((worker, order))
    outcomes = []
    for node_id, given in behind.items():
        reply = by_node.get(node_id)
        if reply is None:
            outcomes += [_failed(*each, "it did not answer in time") for each in given]
        elif reply.has_error():
            outcomes += _read_error(given, reply.error.code, reply.error.reason or "")
        elif given[0][0].place is None:
            outcomes += [_read(*each, reply, model_shape, weighted_by_key) for each in given]
        else:
            outcomes += _read_host(given, reply, model_shape, weighted_by_key)
    return sorted(outcomes, key=lambda outcome: outcome.worker.index)


def _read(
    worker: Worker,
    order: TrainOrder,
    reply: Message,
    model_shape: ModelShape,
    weighted_by_key: str,
) -> Outcome:
    try:
        checked = check_reply(reply.content, order, model_shape, weighted_by_key)
    except Exception as error:  # whatever a node sends, it costs only its own share
        return _failed(worker, order, str(error) or type(error).__name__)
    return Outcome(
        worker, order, checked.report, checked.tensors, checked.momentum, checked.metrics
    )


def _read_host(
    given: Sequence[tuple[Worker, TrainOrder]],
    reply: Message,
    model_shape: ModelShape,
    weighted_by_key: str,
) -> list[Outcome]:
    orders = {worker.place or 0: order for worker, order in given}
    try:
        found = read_host_reply(reply.content, orders, model_shape, weighted_by_key)
    except Exception as error:  # likewise; nobody can say whose part of the average is wrong
        reason = str(error) or type(error).__name__
        return [_failed(worker, order, reason) for worker, order in given]
    return [_outcome_behind(worker, order, found) for worker, order in given]


def _outcome_behind(worker: Worker, order: TrainOrder, found: HostOutcome) -> Outcome:
    failure = found.failures.get(worker.place or 0)
    if failure is None:
        report, metrics = found.reports[worker.place or 0]
        host = found.model if report.num_examples else None
        return Outcome(worker, order, report, metrics=metrics, host=host)
    (outcome,) = _read_error([(worker, order)], failure.code, failure.reason)
    if failure.code == ErrorCode.NODE_UNAVAILABLE:  # its node will not start it again
        worker.excluded = outcome.failure
    return outcome


def _read_error(
    given: Sequence[tuple[Worker, TrainOrder]], code: int, reason: str
) -> list[Outcome]:
    reason = reason.strip() or f"error {code}"
    brief = reason.splitlines()[-1]
    if code not in RAISED:
        return [_failed(worker, order, brief) for worker, order in given]
    for worker, _ in given:
        worker.excluded = brief
    _LOG.error(
        "%s %s raised in round %d and %s left out from now on:\n%s",
        "worker" if len(given) == 1 else "workers",
        ", ".join(worker.label for worker, _ in given),
        given[0][1].round,
        "is" if len(given) == 1 else "are",
        reason,
    )
    return [Outcome(worker, order, failure=brief) for worker, order in given]


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
    states: list[Mapping[str, AnyArray]] = []
    loads: list[Mapping[str, float]] = []
    hosts: set[int] = set()
    for outcome in outcomes:
        host = outcome.host
        if host is not None and id(host) not in hosts:
            hosts.add(id(host))
            states.append(host.momentum)
            loads.append(host.momentum_loads)
        elif host is None and outcome.load > 0:
            states.append(outcome.momentum)
            loads.append(dict.fromkeys(outcome.momentum, outcome.load))
    return average_by_load(states, loads)[0] or None
