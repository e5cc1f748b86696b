"""Evaluation of the global model, shared among the fast workers."""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from ..protocol import EVALUATE, EvaluateOrder, EvaluateReport, HostOrders
from .patience import Patience
from .profiles import node_messages, read_answer, replies_to
from .workers import Worker, WorkerRegistry

_LOG = logging.getLogger(__name__)

_FIRST_PATIENCE_SECONDS = 3600.0
_RAISED = "raised, evaluating"


@dataclass
class WorkerEvaluation:
    """An ``evaluate_fn`` for `fit`: each fast worker evaluates its slice of the test set.

    The slices are contiguous and as equal as can be; the sums are added in worker order. Without
    a fast worker all take part. The slice of a worker that fails, is late or sends a reply that
    cannot be used is evaluated by the server, with a warning. A worker that raised gets no further
    slices.

    Parameters
    ----------
    grid, registry
        Where the workers are, and who they are.
    num_test : int
        Samples of the test set, >= 1.
    evaluate_slice : callable
        ``(model, first, last) -> sums`` over a slice, in this process.
    """

    grid: Grid
    registry: WorkerRegistry
    num_test: int
    evaluate_slice: Callable[[ArrayRecord, int, int], EvaluateReport]
    _patience: Patience = field(default_factory=Patience, init=False)

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return `EvaluateReport.metrics` of a model on the whole test set."""
        orders = self._orders(server_round, arrays)
        contents = ((worker.address, order.to_records()) for worker, order in orders)
        samples = {worker.address: order.last - order.first for worker, order in orders}
        starting = self.registry.start_seconds
        seconds = self._patience.seconds(samples, _FIRST_PATIENCE_SECONDS, starting)
        to_host = functools.partial(HostOrders, patience_seconds=seconds)
        began = time.monotonic()
        replies = replies_to(self.grid, node_messages(contents, EVALUATE, to_host), seconds)
        if len(replies) == len({worker.node_id for worker, _ in orders}):
            self._patience.learn(time.monotonic() - began, samples)
        reports = [
            self._report(worker, order, replies.get(worker.node_id)) for worker, order in orders
        ] or [self.evaluate_slice(arrays, 0, self.num_test)]
        return EvaluateReport.total(reports).metrics()

    def _orders(self, server_round: int, arrays: ArrayRecord) -> list[tuple[Worker, EvaluateOrder]]:
        online = set(self.grid.get_node_ids())
        workers = [
            worker
            for worker in self.registry.active
            if worker.node_id in online and _RAISED not in worker.failures
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
        report = read_answer(
            reply, worker.local_rank, lambda content: EvaluateReport.from_content(content, order)
        )
        if isinstance(report, EvaluateReport):
            return report
        worker.note_failure(f"{report.kind}, evaluating")
        _LOG.warning(
            "worker %s did not evaluate after round %d, so the server does its %d samples: %s",
            worker.label,
            order.round,
            order.last - order.first,
            report.brief,
        )
        return self.evaluate_slice(order.arrays, order.first, order.last)
