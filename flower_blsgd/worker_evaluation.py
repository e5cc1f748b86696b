"""Share the evaluation of the global model among the fast workers."""

import logging
from collections.abc import Callable, Iterable, Sequence

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from .profile_query import Address
from .protocol import EVALUATE, EvaluateOrder, EvaluateReport, Failure, HostOrders, HostReply
from .roster import Roster, Worker
from .round_replies import RAISED
from .wire import ProtocolError

_LOG = logging.getLogger(__name__)

EvaluateHere = Callable[[ArrayRecord, int, int], EvaluateReport]
"""(model, first, last) -> sums of that slice of the test set."""


class WorkerEvaluation:
    """An ``evaluate_fn`` for `fit`: each fast worker evaluates its slice of the test set.

    The slices are contiguous and as equal as can be; the sums are added in worker order. Without
    a fast worker all take part. The slice of a worker that fails, is late or answers nonsense is
    evaluated here, with a warning; one that raised or answered nonsense is not asked again.

    Parameters
    ----------
    grid : Grid
        Where the workers are.
    roster : Roster
        Who they are.
    num_test : int
        Samples of the test set, >= 1.
    here : callable
        Evaluates a slice in this process.
    timeout : float (default: 3600)
        Seconds to wait for the replies.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        num_test: int,
        here: EvaluateHere,
        timeout: float = 3600,
    ) -> None:
        self._grid = grid
        self._roster = roster
        self._num_test = num_test
        self._here = here
        self._timeout = timeout
        self._unable: set[Address] = set()

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return ``accuracy`` and ``loss`` of a model on the whole test set."""
        orders = self._orders(server_round, arrays)
        messages = _messages(orders)
        replies = {}
        if messages:
            received = self._send(messages)
            replies = {reply.metadata.src_node_id: reply for reply in received}
        loss_sum = metric_sum = 0.0
        for worker, order in orders:
            report = self._report(worker, order, replies.get(worker.node_id))
            loss_sum += report.loss_sum
            metric_sum += report.metric_sum
        if not orders:
            report = self._here(arrays, 0, self._num_test)
            loss_sum, metric_sum = report.loss_sum, report.metric_sum
        return MetricRecord(
            {"accuracy": metric_sum / self._num_test, "loss": loss_sum / self._num_test}
        )

    def _send(self, messages: Sequence[Message]) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=self._timeout)

    def _orders(self, server_round: int, arrays: ArrayRecord) -> list[tuple[Worker, EvaluateOrder]]:
        there = set(self._grid.get_node_ids())
        workers = [
            worker
            for worker in self._roster.active
            if worker.node_id in there and worker.address not in self._unable
        ]
        workers = [worker for worker in workers if worker.fast] or workers
        bounds = [
            place * self._num_test // max(1, len(workers)) for place in range(len(workers) + 1)
        ]
        return [
            (worker, EvaluateOrder(server_round, first, last, arrays))
            for worker, first, last in zip(workers, bounds[:-1], bounds[1:], strict=True)
            if first < last
        ]

    def _report(
        self, worker: Worker, order: EvaluateOrder, reply: Message | None
    ) -> EvaluateReport:
        try:
            answer = _answer_of(worker, reply)
            if isinstance(answer, RecordDict):
                return EvaluateReport.from_content(answer, order)
            reason, unable = answer.brief, answer.code in RAISED
        except ProtocolError as error:
            reason, unable = str(error), True
        if unable:
            self._unable.add(worker.address)
        _LOG.warning(
            "worker %s did not evaluate after round %d, so the server does its %d samples: %s",
            worker.label,
            order.round,
            order.last - order.first,
            reason,
        )
        return self._here(order.arrays, order.first, order.last)


def _messages(orders: Sequence[tuple[Worker, EvaluateOrder]]) -> list[Message]:
    """Return a message for each node; those with several devices get the slices of all."""
    messages = []
    behind: dict[int, dict[int, RecordDict]] = {}
    for worker, order in orders:
        if worker.place is None:
            messages.append(Message(order.to_records(), worker.node_id, EVALUATE))
        else:
            behind.setdefault(worker.node_id, {})[worker.place] = order.to_records()
    for node_id, contents in behind.items():
        messages.append(Message(HostOrders(contents).to_records(), node_id, EVALUATE))
    return messages


def _answer_of(worker: Worker, reply: Message | None) -> RecordDict | Failure:
    """Return the records of a worker's own answer, or why there are none."""
    if reply is None:
        return Failure(0, "it did not answer in time")
    if reply.has_error():
        return Failure(reply.error.code, reply.error.reason or "")
    if worker.place is None:
        return reply.content
    found = HostReply.from_content(reply.content)
    missing = Failure(0, "its node did not say what became of it")
    return found.parts.get(worker.place) or found.failures.get(worker.place, missing)
