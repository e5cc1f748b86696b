"""Workers that score: forward only, they refresh recorded losses that training leaves old.

Each gets one order an epoch, when that is planned: samples that nobody has in it, those with the
oldest losses first, and the global model. Nobody waits for it. What was found is recorded when the
next epoch is planned, so a run repeats. One that is not back by then counts at a later plan, and
its worker gets no other meanwhile; what is under way when a run ends is dropped.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ..algorithm.sampling import IntArray, LossTable
from ..protocol import QUERY_SCORE, ScoreOrder, ScoreReport
from .planner import Planner
from .profiles import node_messages, read_answer
from .workers import Worker, WorkerRegistry

_LOG = logging.getLogger(__name__)

SCORED_PER_TRAINED = 2.0
"""Scoring a sample takes about a third as long as training on it. A half is counted, so that an
order is back in time."""

_SHARE_AT_UNKNOWN_SPEED = 0.1
_LEAST_LATE_SECONDS = 600.0  # a process may have to start, and compile


@dataclass(frozen=True)
class _UnderWay:
    order: ScoreOrder
    message_id: str
    epoch: int
    sent_at: float  # on the monotonic clock


class Scoring:
    """Sends the workers that score their orders, and records what they find.

    An order that fails is counted and logged as one to train; it is late if it misses two plans,
    and ten minutes at least. After three in a row its worker is left out until the next epoch, and
    one failure more leaves it out again.

    Attributes
    ----------
    found : LossTable
        What was found, and is not recorded yet.
    num_used : int
        Losses that were recorded so far, in all epochs.
    """

    def __init__(self, registry: WorkerRegistry, planner: Planner) -> None:
        self._registry, self._planner = registry, planner
        self._warned = False
        self._under_way: dict[int, _UnderWay] = {}  # by worker index
        self.found = LossTable(planner.num_samples)
        self.num_used = 0

    def receive(self, grid: Grid) -> None:
        """Take the answers that are there."""
        ids = {sent.message_id: index for index, sent in self._under_way.items()}
        for reply in grid.pull_messages(list(ids)) if ids else ():
            index = ids.pop(reply.metadata.reply_to_message_id, None)
            if index is not None:
                order = self._under_way.pop(index).order
                self._take(self._registry.workers[index], reply, order)

    def end_epoch(self, grid: Grid) -> None:
        """Record what was found; call it before the next epoch is planned."""
        self.receive(grid)
        for index, sent in list(self._under_way.items()):
            late = time.monotonic() - sent.sent_at > _LEAST_LATE_SECONDS
            if late and sent.epoch < self._planner.epoch:
                worker = self._registry.workers[index]
                self._take(worker, None, self._under_way.pop(index).order)
                # A grid of ours stops a process that hangs.
                getattr(grid, "give_up", dict)({sent.message_id: worker.node_id})
        self.num_used += self._planner.table.refresh(self.found)
        self.found = LossTable(len(self.found))

    def begin_epoch(self, grid: Grid, server_round: int, arrays: ArrayRecord) -> None:
        """Send the workers that score their orders of an epoch, which was just planned.

        In the first one no loss is recorded yet, so there is nothing to score.
        """
        for worker in self._registry.workers:
            if not worker.trains and worker.present and worker.is_left_out:
                worker.excluded = ""
        workers = [w for w in self._registry.scoring if w.index not in self._under_way]
        if not workers:
            return
        if not self._warned and not self._planner.uses_losses:
            self._warned = True
            _LOG.warning(
                "%s: role=score is of no use, as this run chooses no sample by its loss; set "
                "selection or another sampler, or let it train",
                ", ".join(worker.label for worker in workers),
            )
        left = self._left_out()
        for worker in workers:
            indices, left = np.split(left, [self._count(worker)])
            if not len(indices):
                continue
            order = ScoreOrder(server_round, indices, arrays)
            content = (worker.address, order.to_records())
            sent = list(grid.push_messages(node_messages([content], QUERY_SCORE)))
            if sent and sent[0]:  # else Flower did not take it, and says so
                self._under_way[worker.index] = _UnderWay(
                    order, sent[0], self._planner.epoch, time.monotonic()
                )

    def _left_out(self) -> IntArray:
        """Return the samples that nobody has in this epoch, those with the oldest losses first.

        Without those that were never trained on: a sampler that goes by losses takes these first.
        """
        rounds = self._planner.table.rounds
        left = self._planner.plan.left_out(len(rounds))
        left = left[rounds[left] > 0]
        return left[np.argsort(rounds[left], kind="stable")]

    def _count(self, worker: Worker) -> int:
        """Return how many samples a worker is given; where a speed is not known, a tenth of N."""
        planner = self._planner
        speeds = [w.samples_per_second(planner.batch_size) for w in [worker, *planner.workers]]
        if not all(speeds):
            return int(_SHARE_AT_UNKNOWN_SPEED * planner.num_samples)
        share = speeds[0] / sum(speeds[1:])  # less than it could where the others wait
        return int(SCORED_PER_TRAINED * share * planner.plan.num_planned)

    def _take(self, worker: Worker, reply: Message | None, order: ScoreOrder) -> None:
        """Take the answer of a worker, None if it is late."""
        report = read_answer(
            reply, worker.local_rank, lambda content: ScoreReport.from_content(content, order)
        )
        if isinstance(report, ScoreReport):
            newer = self.found.rounds[order.indices] < order.round
            self.found.record(order.indices[newer], report.losses[newer], order.round)
            worker.failures_in_a_row, worker.fresh = 0, False
        elif worker.note_failed_order(report.kind, report.brief):
            _LOG.warning("%s did not score: %s", worker.label, report.brief)
