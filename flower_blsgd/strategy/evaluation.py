"""Evaluation of the global model by the workers, between rounds or while others train."""

import functools
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from ..engines.features import features_of
from ..protocol import EVALUATE, EvaluateOrder, EvaluateReport, Failure, HostOrders
from .messages import Address, node_messages, read_answer, replies_to
from .patience import Patience
from .rounds import EpochEnd
from .workers import Worker, WorkerRegistry

_LOG = logging.getLogger(__name__)

_FIRST_PATIENCE_SECONDS = 3600.0
_RAISED = "raised, evaluating"

FORWARD_PER_STEP = 3.0
"""Default for the samples evaluated in the time of training on one, before it is measured. A
backward pass takes about twice as long as a forward pass (measured: 3.7 with resnet8 and with the
CNN of the digits, on one core)."""

Orders = list[tuple[Worker, EvaluateOrder]]


def batches_by_speed(num_batches: int, speeds: Sequence[float]) -> list[int]:
    """Return the number of batches of each worker that minimizes the total time.

    Ties go to the first worker. A worker with speed 0 gets none; at least one speed is above 0.
    """
    counts = [0] * len(speeds)
    ready = [(1 / speed, rank) for rank, speed in enumerate(speeds) if speed > 0]
    heapq.heapify(ready)
    for _ in range(num_batches):
        rank = ready[0][1]
        counts[rank] += 1
        heapq.heapreplace(ready, ((counts[rank] + 1) / speeds[rank], rank))
    return counts


@dataclass
class WorkerEvaluation:
    """The ``evaluate_fn`` for `fit` with which each worker evaluates a slice of the test set.

    Slices are proportional to the workers' forward speeds. These are measured in earlier
    evaluations, or derived from training speeds; if both are unknown, the fast workers get equal
    slices. A worker that gets no slice counts as four times as fast in the next one, up to the
    speed that follows from training. A slice has whole batches, whose sums are added in order, so
    the result does not depend on the slices if all devices compute the same bits.

    If a worker fails, is late or sends an unusable reply, the server evaluates its slice with
    ``evaluate_slice(model, first, last)`` and logs a warning. A worker that raised an exception
    gets no further slices. `to_metrics` converts the report of the whole test set, by default to
    the means.

    Workers with ``role=evaluate`` evaluate the models given to `begin` while the others train. If
    they are idle and their speed is known, they also get a slice. `unevaluated` has the models
    without a result: the one being evaluated and one that waits. Those of a checkpoint are
    evaluated again.
    """

    grid: Grid
    registry: WorkerRegistry
    num_test: int
    batch_size: int
    evaluate_slice: Callable[[ArrayRecord, int, int], EvaluateReport]
    to_metrics: Callable[[EvaluateReport], MetricRecord] = EvaluateReport.metrics
    unevaluated: list[EpochEnd] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._patience = Patience()
        self._samples_per_second: dict[int, float] = {}  # forward, by worker index
        # With message ids; "" if Flower did not accept a message.
        self._sent: list[tuple[Worker, EvaluateOrder, str]] = []
        self._replies: dict[str, Message] = {}
        self._sent_at = self._seconds = 0.0

    # --- between rounds, by all workers

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return the metrics of a model on the whole test set."""
        workers = [w for w in self.registry.active if _RAISED not in w.failures]
        if not self._sent:
            idle = (w for w in self.registry.evaluating if not w.failures_in_a_row)
            workers += [w for w in idle if self._speed(w)]
        orders = self._orders(workers, server_round, arrays)
        contents = ((worker.address, order.to_records()) for worker, order in orders)
        samples, starting = _samples(orders), self.registry.restart_seconds
        seconds = self._patience.seconds(samples, _FIRST_PATIENCE_SECONDS, starting)
        to_host = functools.partial(HostOrders, patience_seconds=seconds)
        began = time.monotonic()
        replies = replies_to(self.grid, node_messages(contents, EVALUATE, to_host), seconds)
        if len(replies) == len({worker.node_id for worker, _ in orders}):
            self._patience.learn(time.monotonic() - began, samples)
        reports = []
        for worker, order in orders:
            report = self._report(worker, order, replies.get(worker.node_id))
            if isinstance(report, Failure):
                worker.note_failure(f"{report.kind}, evaluating")
                _LOG.warning(
                    "worker %s did not evaluate after round %d, so the server evaluates its %d "
                    "samples: %s",
                    worker.label,
                    order.round,
                    order.last - order.first,
                    report.brief,
                )
                report = self.evaluate_slice(order.arrays, order.first, order.last)
            reports.append(report)
        reports = reports or [self.evaluate_slice(arrays, 0, self.num_test)]
        return self.to_metrics(EvaluateReport.total(reports))

    def _orders(self, workers: Sequence[Worker], server_round: int, arrays: ArrayRecord) -> Orders:
        online = set(self.grid.get_node_ids())
        workers = [worker for worker in workers if worker.node_id in online]
        if not workers:
            return []
        counts = batches_by_speed(-(-self.num_test // self.batch_size), self._speeds(workers))
        for worker, count in zip(workers, counts, strict=True):
            known = self._samples_per_second.get(worker.index)
            if known and not count:  # it may have been slow only once
                most = self._by_training(worker) or math.inf
                self._samples_per_second[worker.index] = max(known, min(4 * known, most))
        ends = [min(n * self.batch_size, self.num_test) for n in itertools.accumulate(counts)]
        return [
            (worker, EvaluateOrder(server_round, first, last, arrays))
            for worker, first, last in zip(workers, [0, *ends], ends, strict=False)
            if first < last
        ]

    def _speeds(self, workers: Sequence[Worker]) -> list[float]:
        """Return the samples per second of each worker; 0 if it gets no slice."""
        needed = [worker for worker in workers if worker.trains] or workers
        if all(map(self._speed, needed)):
            return [self._speed(worker) for worker in workers]
        equal = [worker for worker in needed if worker.fast] or needed
        return [float(worker in equal) for worker in workers]

    def _speed(self, worker: Worker) -> float:
        return self._samples_per_second.get(worker.index) or self._by_training(worker)

    def _by_training(self, worker: Worker) -> float:
        seconds = worker.training_seconds_per_step or worker.profile.seconds_per_step
        trained = worker.own_batch(self.registry.batch_size) / seconds if seconds else 0.0
        return FORWARD_PER_STEP * trained

    def _report(
        self, worker: Worker, order: EvaluateOrder, reply: Message | None
    ) -> EvaluateReport | Failure:
        report = read_answer(
            reply, worker.local_rank, lambda content: EvaluateReport.from_content(content, order)
        )
        if isinstance(report, EvaluateReport) and report.seconds:
            self._samples_per_second[worker.index] = report.num_examples / report.seconds
        return report

    # --- by workers with role=evaluate, while the others train

    def begin(self, end: EpochEnd) -> bool:
        """Let workers with ``role=evaluate`` evaluate a model; return False without such workers.

        While they are busy, the model waits. It replaces another waiting model.
        """
        if not self._sent and not self.registry.evaluating:
            return False
        self.unevaluated[1:] = [end]
        self._send()
        return True

    def has_ended(self) -> bool:
        """Return whether the evaluation of a model has ended, so that `take` returns it."""
        if not self.unevaluated:
            return False
        self._send()  # a model of a checkpoint
        missing = [i for *_, i in self._sent if i and i not in self._replies]
        for reply in self.grid.pull_messages(missing):
            self._replies[reply.metadata.reply_to_message_id] = reply
        left = self._left = {i: w for w, _, i in self._sent if i not in self._replies}
        is_late = time.monotonic() - self._sent_at > self._seconds
        return not left or is_late or not all(i and worker.present for i, worker in left.items())

    def take(self) -> EpochEnd | None:
        """Return the model whose evaluation has ended, or None.

        It has no metrics if a worker failed. It stays in `unevaluated` until `finish`.
        """
        if not self.has_ended():
            return None
        end = self.unevaluated[0]
        if not self._sent:
            return end
        # The local grid stops processes that hang.
        features_of(self.grid).give_up({i: worker.node_id for i, worker in self._left.items()})
        reports = []
        for worker, order, message_id in self._sent:
            report = self._report(worker, order, self._replies.get(message_id))
            if isinstance(report, EvaluateReport):
                worker.failures_in_a_row, worker.fresh = 0, False
                reports.append(report)
            elif worker.note_failed_order(f"{report.kind}, evaluating", report.brief):
                what = "worker %s did not evaluate the model of round %d: %s"
                _LOG.warning(what, worker.label, end.round, report.brief)
        sent, self._sent, self._replies = self._sent, [], {}
        if len(reports) < len(sent):
            return end
        samples = _samples((worker, order) for worker, order, _ in sent)
        self._patience.learn(time.monotonic() - self._sent_at, samples)
        busy = sum(report.seconds for report in reports)
        return replace(
            end, metrics=self.to_metrics(EvaluateReport.total(reports)), busy_seconds=busy
        )

    def finish(self) -> None:
        """Remove the model that `take` returned, and start with the next one."""
        del self.unevaluated[0]
        self._send()

    def _send(self) -> None:
        """Send the next model to the workers with ``role=evaluate`` if they are idle."""
        if self._sent or not self.unevaluated:
            return
        end = self.unevaluated[0]
        orders = self._orders(self.registry.evaluating, end.round, end.arrays)
        contents = ((worker.address, order.to_records()) for worker, order in orders)
        ids = self.grid.push_messages(node_messages(contents, EVALUATE)) if orders else []
        self._sent = [(*pair, i or "") for pair, i in itertools.zip_longest(orders, ids)]
        is_starting = any(worker.fresh for worker, _ in orders)
        starting = self.registry.start_seconds if is_starting else 0.0
        self._seconds = self._patience.seconds(_samples(orders), _FIRST_PATIENCE_SECONDS, starting)
        self._sent_at = time.monotonic()


def _samples(orders: Iterable[tuple[Worker, EvaluateOrder]]) -> dict[Address, int]:
    return {worker.address: order.last - order.first for worker, order in orders}
