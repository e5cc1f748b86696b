"""Workers that score: forward only, they refresh recorded losses that training leaves old.

Each gets one order an epoch, when that is planned: samples that nobody has in it, those with the
oldest losses first, and the global model. Nobody waits for it. What was found is recorded when the
next epoch is planned, in worker order, so a run repeats. One that is not back by then is used at a
later plan, and its worker gets no other meanwhile; what is under way when a run ends is dropped.
"""

import functools
import logging
import time
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ..algorithm.local_steps import whole_parts
from ..algorithm.sampling import FloatArray, IntArray
from ..protocol import QUERY_SCORE, Failure, HostOrders, ScoreOrder, ScoreReport
from .patience import Patience
from .planner import Planner
from .profiles import node_messages, read_answer, replies_to
from .workers import Worker, WorkerRegistry

_LOG = logging.getLogger(__name__)

_SCORED_PER_TRAINED = 2.0
"""Scoring a sample takes about a third as long as training on it. A half is counted, so that an
order is back in time."""

_SHARE_AT_UNKNOWN_SPEED = 0.1
_FIRST_PATIENCE_SECONDS = 3600.0
_POLL_SECONDS = 0.02


def scored_per_epoch(seconds_per_step: float, batch_size: int, epoch_seconds: float) -> float:
    """Return how many samples a worker can score in an epoch, from the seconds of its steps."""
    return _SCORED_PER_TRAINED * batch_size * epoch_seconds / seconds_per_step


@dataclass
class Score:
    """An order to score, and the losses that were found, None before."""

    order: ScoreOrder
    losses: FloatArray | None = None
    resumed: bool = False  # it was under way in a checkpoint: it is sent again, and waited for
    message_id: str = ""  # once it is sent
    sent_at: float = 0.0  # on the monotonic clock

    @property
    def under_way(self) -> bool:
        """Whether it was sent, and not answered yet."""
        return bool(self.message_id) and self.losses is None


class Scoring:
    """Sends the workers that score their orders, and records what they find.

    An order that fails is counted and logged as one to train. After three in a row its worker is
    left out until the next epoch, and one failure more leaves it out again.

    Attributes
    ----------
    scores : dict of int to Score
        By worker index: orders that are under way, or done and not recorded yet.
    num_used : int
        Losses that were recorded so far, in all epochs.
    """

    def __init__(self, registry: WorkerRegistry, planner: Planner) -> None:
        self._registry, self._planner = registry, planner
        self._patience = Patience()
        self._warned = False
        self.scores: dict[int, Score] = {}
        self.num_used = 0

    def receive(self, grid: Grid) -> None:
        """Take the answers that are there, and send what a resumed run has to send again."""
        for worker in self._registry.scoring if self.scores else ():
            score = self.scores.get(worker.index)
            if score and score.losses is None and not score.message_id:
                self._send(grid, worker, score)
        ids = {s.message_id: index for index, s in self.scores.items() if s.under_way}
        for reply in grid.pull_messages(list(ids)) if ids else ():
            index = ids.pop(reply.metadata.reply_to_message_id, None)
            if index is not None:
                self._take(self._registry.workers[index], reply)
        for index in ids.values():
            worker, score = self._registry.workers[index], self.scores[index]
            samples = {worker.address: len(score.order.indices)}
            patience = self._patience.seconds(samples, _FIRST_PATIENCE_SECONDS)
            if time.monotonic() - score.sent_at > patience:
                self._take(worker, None)
                # A grid of ours stops a process that hangs.
                getattr(grid, "give_up", dict)({score.message_id: worker.node_id})

    def end_epoch(self, grid: Grid, server_round: int, arrays: ArrayRecord) -> float:
        """Record what was found, and score the rest of what the epoch left out if that is wanted.

        Call it before the next epoch is planned, with the last round and the model after it. Return
        for how many seconds workers that train scored.
        """
        self.receive(grid)
        while any(score.resumed and score.under_way for score in self.scores.values()):
            time.sleep(_POLL_SECONDS)
            self.receive(grid)
        done = [self.scores.pop(i) for i in sorted(self.scores) if not self.scores[i].under_way]
        for score in done:
            if score.losses is not None:  # else its worker has not come back since a resume
                self._record(score.order, score.losses)
        if not self._planner.refreshes_left_out or not self._planner.epoch:
            return 0.0
        began = time.perf_counter()
        found = [score.order.indices for score in done if score.losses is not None]
        left = self._left_out()
        left = left[np.isin(left, np.concatenate([left[:0], *found]), invert=True)]
        self._refresh(grid, server_round, arrays, left)
        return time.perf_counter() - began

    def begin_epoch(self, grid: Grid, server_round: int, arrays: ArrayRecord) -> None:
        """Send the workers that score their orders of an epoch, which was just planned.

        In the first one no loss is recorded yet, so there is nothing to score.
        """
        for worker in self._registry.workers:
            if not worker.trains and worker.present and worker.is_left_out:
                worker.excluded = ""
        workers = [w for w in self._registry.scoring if w.index not in self.scores]
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
            if len(indices):
                self._send(grid, worker, Score(ScoreOrder(server_round, indices, arrays)))

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
        planner, shape = self._planner, self._planner.plan.shape
        training = [w.profile.seconds_per_step for w in planner.workers]
        if not all([*training, worker.profile.seconds_per_step]):
            return int(_SHARE_AT_UNKNOWN_SPEED * planner.num_samples)
        pairs = zip(shape.samples_per_round, training, strict=True)
        longest = max(samples * seconds for samples, seconds in pairs) / planner.batch_size
        epoch_seconds = planner.plan.rounds * longest
        seconds = worker.profile.seconds_per_step
        return int(scored_per_epoch(seconds, planner.batch_size, epoch_seconds))

    def _send(self, grid: Grid, worker: Worker, score: Score) -> None:
        content = (worker.address, score.order.to_records())
        sent = list(grid.push_messages(node_messages([content], QUERY_SCORE)))
        if sent and sent[0]:  # else Flower did not take it, and says so
            score.message_id, score.sent_at = sent[0], time.monotonic()
            self.scores[worker.index] = score

    def _take(self, worker: Worker, reply: Message | None) -> None:
        """Take the answer of a worker, None if it is late."""
        score = self.scores[worker.index]
        report = _read(reply, worker, score.order)
        if isinstance(report, Failure):
            del self.scores[worker.index]
            if worker.note_failed_order(report.kind, report.brief):
                _LOG.warning("%s did not score: %s", worker.label, report.brief)
            return
        worker.failures_in_a_row, worker.fresh = 0, False
        samples = {worker.address: len(report.losses)}
        self._patience.learn(time.monotonic() - score.sent_at, samples)
        score.losses = report.losses
        score.order = replace(score.order, arrays=ArrayRecord())  # its memory is used again

    def _refresh(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, indices: IntArray
    ) -> None:
        """Let the workers that train score these samples, and wait for them."""
        samples = zip(
            self._planner.workers, self._planner.plan.shape.samples_per_round, strict=True
        )
        loads = {w.index: float(n) for w, n in samples if w in self._registry.active}
        cuts = np.split(indices, np.cumsum(whole_parts(len(indices), list(loads.values())))[:-1])
        orders = [
            (self._registry.workers[index], ScoreOrder(server_round, cut, arrays))
            for index, cut in zip(loads, cuts, strict=bool(loads))
            if len(cut)
        ]
        counts = {worker.address: len(order.indices) for worker, order in orders}
        starting = self._registry.start_seconds
        seconds = self._patience.seconds(counts, _FIRST_PATIENCE_SECONDS, starting)
        contents = [(worker.address, order.to_records()) for worker, order in orders]
        to_host = functools.partial(HostOrders, patience_seconds=seconds)
        began = time.monotonic()
        replies = replies_to(grid, node_messages(contents, QUERY_SCORE, to_host), seconds)
        if len(replies) == len({worker.node_id for worker, _ in orders}):
            self._patience.learn(time.monotonic() - began, counts)
        for worker, order in orders:
            report = _read(replies.get(worker.node_id), worker, order)
            if isinstance(report, ScoreReport):
                self._record(order, report.losses)
            elif worker.note_failure(f"{report.kind}, scoring"):
                _LOG.warning("%s did not score: %s", worker.label, report.brief)

    def _record(self, order: ScoreOrder, losses: FloatArray) -> None:
        self.num_used += self._planner.table.refresh(order.indices, losses, order.round)


def _read(reply: Message | None, worker: Worker, order: ScoreOrder) -> ScoreReport | Failure:
    return read_answer(
        reply, worker.local_rank, lambda content: ScoreReport.from_content(content, order)
    )
