"""Evaluate the global model on its own copy, in a process of its own, while training goes on."""

import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from .background import Background
from .protocol import EVALUATE, EvaluateOrder, WorkerProfile
from .roster import Roster, Worker
from .worker_evaluation import EvaluateHere, WorkerEvaluation

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_MOST_WAITING = 2
"""Models; with more, who trains waits: memory stays bounded."""

Metrics = concurrent.futures.Future[MetricRecord]


class AsideEvaluation(WorkerEvaluation):
    """Evaluates models in the order in which they come, on a grid that does nothing else.

    What its worker does not evaluate, this process does, with a warning, and likewise while
    training goes on. At most two models wait; each is let go as soon as it is evaluated.

    Parameters
    ----------
    grid : Grid
        A grid of one node. It is not closed here.
    profile : WorkerProfile
        Names it in warnings.
    num_test : int
        Samples of the test set, >= 1.
    here : callable
        Evaluates a slice in this process; called in a thread of its own.
    timeout : float (default: 3600)
        Seconds to wait for an evaluation.
    """

    def __init__(
        self,
        grid: Grid,
        profile: WorkerProfile,
        num_test: int,
        here: EvaluateHere,
        timeout: float = 3600,
    ) -> None:
        (self._node_id,) = grid.get_node_ids()
        self._worker = Worker(0, self._node_id, profile)
        roster = Roster(1)
        roster.workers.append(self._worker)
        super().__init__(grid, roster, num_test, here, timeout)
        self._work = Background()
        self._waiting: deque[Metrics] = deque()
        self._closing = Event()
        self._ready = Event()

    @property
    def ready(self) -> bool:
        """Whether its process has started, and neither given up nor refused to evaluate."""
        there = self._node_id in self._grid.get_node_ids()
        return self._ready.is_set() and there and self._worker.address not in self._unable

    @property
    def behind(self) -> bool:
        """Whether as many models wait as may."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        return len(self._waiting) >= _MOST_WAITING

    def warm_up(self, arrays: ArrayRecord) -> None:
        """Let the process start and load what it needs; returns at once."""
        self._put(lambda: self._try(arrays))

    def begin(self, server_round: int, arrays: ArrayRecord) -> Metrics:
        """Begin to evaluate a model; waits first while as many wait as may."""
        while self.behind:
            concurrent.futures.wait([self._waiting[0]])
        metrics = Metrics()
        self._waiting.append(metrics)
        self._put(lambda: self._evaluate(server_round, arrays, metrics))
        return metrics

    def close(self) -> None:
        """Give up what has not been evaluated. May be called twice."""
        self._closing.set()
        for metrics in self._waiting:
            metrics.cancel()
        self._work.close()

    def _put(self, work: Callable[[], object]) -> None:
        self._work.put(work)
        self._work.start()

    def _evaluate(self, server_round: int, arrays: ArrayRecord, metrics: Metrics) -> None:
        if not metrics.set_running_or_notify_cancel():
            return
        try:
            metrics.set_result(self(server_round, arrays))
        except BaseException as error:  # it belongs to whoever asks for the metrics
            metrics.set_exception(error)

    def _try(self, arrays: ArrayRecord) -> None:
        order = EvaluateOrder(0, 0, 1, arrays)
        try:
            for reply in self._send([Message(order.to_records(), self._node_id, EVALUATE)]):
                if not reply.has_error():
                    self._ready.set()
        except _ClosedError:
            return
        if not self._ready.is_set():
            _LOG.warning("%s: its process did not start as it should", self._worker.label)

    def _send(self, messages: Sequence[Message]) -> Iterable[Message]:
        """Ask again and again, so that nobody waits for an answer when the run is over."""
        ids = list(self._grid.push_messages(messages))
        deadline = time.monotonic() + self._timeout
        replies: list[Message] = []
        while len(replies) < len(ids) and time.monotonic() < deadline:
            if self._closing.wait(_POLL_SECONDS):
                raise _ClosedError("the run ended before this model was evaluated")
            replies += self._grid.pull_messages(ids)
        return replies


class _ClosedError(Exception):
    """The run is over."""
