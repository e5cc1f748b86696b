"""One training round: orders, messages, replies and outcomes.

With an invalid reply, only the contribution of that node's workers is lost.
``docs/explanation/reliability.md`` describes what happens to a worker that fails.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict

from ..protocol import (
    ARRAYS,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    MOMENTUM_ZEROED,
    NUM_EXAMPLES,
    Failure,
    HostOrders,
    HostReply,
    Keys,
    ProtocolError,
    TrainOrder,
)
from ..protocol.records import records_of
from .messages import answer_of, node_asked, node_messages
from .replies import CheckedReply, ModelShape, check_reply, read_report
from .slow_reduce import SlowWorkerReduce
from .workers import Worker

_LOG = logging.getLogger(__name__)

Orders = Sequence[tuple[Worker, TrainOrder]]


@dataclass(eq=False)
class Outcome:
    """Outcome of an order: a reply, or a failure.

    `load` is the number of samples trained on, and `cut_off` the number of ordered ones that a
    deadline cut off; both are 0 if the order failed. `momentum_zeroed` tells that the optimizer's
    state was not finite, even if the order failed.
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


@dataclass(eq=False)
class Round:
    """One training round, with one order per worker that trains, in worker order.

    `arrays` is the global model at the start, and `batch_size` the run's samples per step. `epoch`
    and `round_in_epoch` are counted from 1. The workers waited `planning_seconds` for the orders.
    `sent_at` is the Unix time in seconds of the first message, and `reply_seconds` the time from
    then to the last reply; 0 until `read`. `seconds` is the time until `end`. Both are without
    `unread_seconds`, in which the replies waited for the caller of the loop. `sent_on_clock` and
    `ended_on_clock` are times of `time.perf_counter`. `slow_reduce` sums the models, if slow
    workers do that.
    """

    orders: Orders
    arrays: ArrayRecord
    keys: Keys
    batch_size: int
    epoch: int = 0
    round_in_epoch: int = 0
    rounds_in_epoch: int = 0
    planning_seconds: float = 0.0
    slow_reduce: SlowWorkerReduce | None = None
    sent_at: float = field(default=0.0, init=False)
    reply_seconds: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    unread_seconds: float = field(default=0.0, init=False)
    sent_on_clock: float = field(default=0.0, init=False)
    ended_on_clock: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.model_shape = ModelShape(self.arrays)
        self._sent: list[Metadata] = []

    def end(self) -> None:
        """End the clock of the round."""
        self.ended_on_clock = time.perf_counter()
        self.seconds = self.ended_on_clock - self.sent_on_clock - self.unread_seconds

    def messages(
        self,
        rule_at_nodes: Callable[[ArrayRecord, int], dict[str, Any]],
        config: ConfigRecord | None = None,
        patience_seconds: float = 600.0,
    ) -> list[Message]:
        """Return the messages with the orders, and start the clock of the round.

        A node with several devices gets the model once, the orders of all its workers, and the
        rule to average their models (`Averaging.at_nodes`). `config` is sent with every order; the
        keys of the order take precedence. The server waits `patience_seconds` for the replies.
        """
        contents = []
        for worker, order in self.orders:
            records = order.to_records(self.keys.arrays, self.keys.config)
            if config:
                own = records_of(records, ConfigRecord)[self.keys.config]
                for key in config.keys() - own.keys():
                    own[key] = config[key]
            contents.append((worker.address, records))

        def to_host(by_rank: dict[int, RecordDict]) -> HostOrders:
            longest_steps = max(order.local_steps for _, order in self.orders)
            rule = rule_at_nodes(self.arrays, longest_steps)
            keys = self.keys.arrays, self.keys.config, self.keys.weighted_by
            return HostOrders(by_rank, *keys, **rule, patience_seconds=patience_seconds)

        messages = node_messages(contents, "train", to_host)
        self._sent = [message.metadata for message in messages]  # ids are set when they are sent
        self.sent_at, self.sent_on_clock = time.time(), time.perf_counter()
        return messages

    def read(self, replies: Iterable[Message]) -> list[Outcome]:
        """Return the outcome of each order, in worker order: a checked reply, or a failure.

        An order whose message was not sent, by a subclass of the strategy, has no outcome. The
        replies may be in any order. Those of nodes without an order are ignored. Second replies,
        and replies to other messages, are dropped and recorded.
        """
        replies = list(replies)
        self.reply_seconds = time.perf_counter() - self.sent_on_clock - self.unread_seconds
        sent = {metadata.dst_node_id: metadata.message_id for metadata in self._sent}
        orders_of: dict[int, list[tuple[Worker, TrainOrder]]] = {}
        for worker, order in self.orders:
            orders_of.setdefault(worker.node_id, []).append((worker, order))
        node_of = {message_id: node_id for node_id, message_id in sent.items() if message_id}
        by_node: dict[int, Message] = {}
        for reply in replies:
            node_id, answered = node_asked(reply, node_of), reply.metadata.reply_to_message_id
            if answered != (sent.get(node_id) or answered):
                _drop(orders_of.get(node_id, ()), "reply of another round")
            elif by_node.setdefault(node_id, reply) is not reply:
                _drop(orders_of.get(node_id, ()), "second reply")
        outcomes: list[Outcome] = []
        for node_id, given in orders_of.items():
            if node_id in by_node or sent.get(node_id) or not any(sent.values()):
                outcomes += self._read_node(given, by_node.get(node_id))
        for outcome in outcomes:
            worker = outcome.worker
            if not outcome.failure:
                worker.failures_in_a_row, worker.fresh = 0, False
            if outcome.momentum_zeroed and not worker.momentum_zeroed:
                worker.momentum_zeroed = True
                _LOG.warning(
                    "worker %s: momentum was not finite after round %d and was set to zero; "
                    "summary.json counts these cases. A smaller learning rate may help",
                    worker.label,
                    outcome.order.round,
                )
        return sorted(outcomes, key=lambda outcome: outcome.worker.index)

    def _read_node(self, given: Orders, reply: Message | None) -> list[Outcome]:
        """Return the outcomes of the orders of one node."""
        answer, zeroed = answer_of(reply), False
        if isinstance(answer, RecordDict):
            try:
                if given[0][0].local_rank is not None:
                    return self._read_host(given, answer)
                ((worker, order),) = given
                metrics = records_of(answer, MetricRecord).values()
                zeroed = any(record.get(MOMENTUM_ZEROED) == 1 for record in metrics)
                checked = check_reply(answer, order, self.model_shape, self.keys.weighted_by)
                return [Outcome(worker, order, checked, None, zeroed)]
            except Exception as error:  # a wrong reply must not end the round
                answer = Failure.of(error)
        return _failed(given, answer, zeroed)

    def _read_host(self, given: Orders, content: RecordDict) -> list[Outcome]:
        """Read the reply of a node with several devices: one model, and a report per worker.

        ProtocolError if any part is invalid, because the content of the average is then unknown.
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
            reports[rank] = read_report(content, orders[rank], self.keys.weighted_by)
        total = sum(report.num_examples for report, _ in reports.values())
        averaged = host.shared.metric_records.get(METRICS, MetricRecord()).get(NUM_EXAMPLES)
        if averaged != total:
            raise ProtocolError(
                f"its node averaged models of {averaged!r} samples, but its workers trained on "
                f"{total}"
            )
        if total and arrays is None:
            raise ProtocolError(f"its node sent no model {ARRAYS!r}")
        tensors = self.model_shape.checked(arrays) if arrays is not None and total else {}
        momentum = self.model_shape.checked_momentum(
            host.shared.array_records.get(MOMENTUM, ArrayRecord()) if total else ArrayRecord()
        )
        loads: Any = dict(host.shared.metric_records.get(MOMENTUM_LOADS, {}))
        for name, load in loads.items():
            if name not in momentum or not isinstance(load, int | float) or not 0 < load <= total:
                raise ProtocolError(f"its node averaged state {name!r} of {load!r} samples")
        outcomes = []
        for worker, order in given:
            rank = worker.local_rank or 0
            if failure := host.failures.get(rank):
                outcomes += _failed([(worker, order)], failure)
            else:
                reply = CheckedReply(*reports[rank], tensors, momentum, loads)
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
