"""Evaluation of the global model, shared among the fast workers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from ..protocol import EVALUATE, EvaluateOrder, EvaluateReport
from ..protocol.records import ProtocolError
from .profiles import Address, answer_of, node_messages, replies_to
from .replies import RAISED
from .workers import Worker, WorkerRegistry

_LOG = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 3600.0

EvaluateSlice = Callable[[ArrayRecord, int, int], EvaluateReport]
"""(model, first, last) -> sums over that slice of the test set, in this process."""


@dataclass
class WorkerEvaluation:
    """An ``evaluate_fn`` for `fit`: each fast worker evaluates its slice of the test set.

    The slices are contiguous and as equal as can be; the sums are added in worker order. Without
    a fast worker all take part. The slice of a worker that fails, is late or sends a reply that
    cannot be used is evaluated by the server, with a warning; a worker that raised, or sent such a
    reply, gets no further slices.

    Parameters
    ----------
    grid, registry
        Where the workers are, and who they are.
    num_test : int
        Samples of the test set, >= 1.
    evaluate_slice : callable
        Evaluates a slice in this process.
    """

    grid: Grid
    registry: WorkerRegistry
    num_test: int
    evaluate_slice: EvaluateSlice
    _unable: set[Address] = field(default_factory=set, init=False)

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return ``accuracy`` and ``loss`` of a model on the whole test set."""
        orders = self._orders(server_round, arrays)
        contents = ((worker.address, order.to_records()) for worker, order in orders)
        replies = replies_to(self.grid, node_messages(contents, EVALUATE), _TIMEOUT_SECONDS)
        reports = [
            self._report(worker, order, replies.get(worker.node_id)) for worker, order in orders
        ] or [self.evaluate_slice(arrays, 0, self.num_test)]
        loss_sum = sum(report.loss_sum for report in reports)
        metric_sum = sum(report.metric_sum for report in reports)
        return MetricRecord(
            {"accuracy": metric_sum / self.num_test, "loss": loss_sum / self.num_test}
        )

    def _orders(self, server_round: int, arrays: ArrayRecord) -> list[tuple[Worker, EvaluateOrder]]:
        online = set(self.grid.get_node_ids())
        workers = [
            worker
            for worker in self.registry.active
            if worker.node_id in online and worker.address not in self._unable
        ]
        workers = [worker for worker in workers if worker.fast] or workers
        count = max(1, len(workers))
        bounds = [rank * self.num_test // count for rank in range(len(workers) + 1)]
        return [
            (worker, EvaluateOrder(server_round, first, last, arrays))
            for worker, first, last in zip(workers, bounds[:-1], bounds[1:], strict=True)
            if first < last
        ]

    def _report(
        self, worker: Worker, order: EvaluateOrder, reply: Message | None
    ) -> EvaluateReport:
        try:
            answer = answer_of(reply, worker.local_rank)
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
        return self.evaluate_slice(order.arrays, order.first, order.last)
