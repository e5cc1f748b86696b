"""Exchange of orders and results between the script and the thread that answers messages."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from ..devices.worker_spec import WorkerSpec
from ..errors import UsageError, first_line
from ..flower.app_call import ProcessEndsError
from ..protocol import EvaluateOrder, EvaluateReport, ScriptInfo, TrainOrder, TrainReport


@dataclass(frozen=True)
class Work:
    """Work for the script: to train, to evaluate, or to end with a final model."""

    order: TrainOrder | EvaluateOrder | ArrayRecord
    result: "Future[Any]" = field(default_factory=Future)


@dataclass(frozen=True)
class Joined:
    """Session of a script before the first order.

    `arrays` returns the tensors of the model that are sent, and `optimizer_state` the state of the
    optimizer. `own_model` returns those tensors after a round, before the average is loaded.
    """

    info: ScriptInfo
    arrays: Callable[[], ArrayRecord]
    optimizer_state: Callable[[], ArrayRecord]
    own_model: Callable[[], ArrayRecord]


class Exchange:
    """Both sides of a script that runs as a worker.

    To the side of the messages, it is the `Executor` of the script: it hands work over, and waits
    for its result. The script waits for work in `next_work`. When it ends, work that is not done
    fails. `rank` is the worker's partition id, from 0.
    """

    num_test = 1  # the script evaluates as a whole

    def __init__(
        self, worker: WorkerSpec, rank: int, seed: int, batch_size: int, is_main: bool
    ) -> None:
        self.worker = worker
        self.rank = rank
        self.seed = seed
        self.batch_size = batch_size
        self.is_main = is_main
        self.joined: Future[Joined] = Future()
        self.ended: Future[None] = Future()
        """Set when the script has ended, with the reason if it failed."""
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._current: Work | None = None
        self._lock = threading.Lock()

    # --- the script's side

    def next_work(self) -> Work:
        """Wait for work, and return it; a final model counts as taken."""
        work = self._work.get()
        if isinstance(work.order, ArrayRecord):
            work.result.set_result(None)
        return work

    def end(self, error: BaseException | None) -> None:
        """Note that the script has ended; all work fails from now on, except a final model."""
        with self._lock:
            if self.ended.done():
                return
            if error is None:
                self.ended.set_result(None)
            else:  # not the error itself, which would keep the script's variables
                reason = UsageError(first_line(error))
                if not isinstance(error, UsageError):
                    what = f"the script raised {type(error).__name__}: {reason}"
                    reason = ProcessEndsError(what)
                self.ended.set_exception(reason)
            if not self.joined.done():
                self.joined.set_exception(self._reason())
            current, self._current = self._current, None
            self._fail(current)

    # --- the side of the messages

    def fingerprints(self) -> tuple[str, str]:
        """Return the fingerprints of data and model, when the script waits for an order."""
        info = self.joined.result().info
        return info.data_fingerprint, info.fingerprint

    def seconds_per_step(self, batch_size: int, seconds: float) -> float:
        """Return 0: the first rounds measure the speed, and their work counts."""
        return 0.0

    def optimizer_state(self) -> ArrayRecord:
        """Return the state of the script's optimizer."""
        return self.joined.result().optimizer_state()

    def train(self, order: TrainOrder) -> TrainReport:
        """Return the script's model after the steps of an order."""
        report: TrainReport = self._do(order)
        return report

    def own_model(self) -> ArrayRecord:
        """Return the script's model."""
        return self.joined.result().own_model()

    def evaluate(self, order: EvaluateOrder) -> EvaluateReport:
        """Return the figures of the script's function."""
        report: EvaluateReport = self._do(order)
        return report

    def finish(self, model: ArrayRecord) -> None:
        """Hand over the final model."""
        self._do(model)

    def _do(self, order: TrainOrder | EvaluateOrder | ArrayRecord) -> Any:
        """Hand work to the script once it has joined; return the result, or raise its error."""
        self.joined.result()
        work = Work(order)
        with self._lock:
            self._current = work
            if self.ended.done():
                self._fail(work)
            else:
                self._work.put(work)
        return work.result.result()

    def _fail(self, work: Work | None) -> None:
        if work is None or work.result.done():
            return
        if isinstance(work.order, ArrayRecord) and self.ended.exception() is None:
            work.result.set_result(None)
        else:
            work.result.set_exception(self._reason())

    def _reason(self) -> UsageError:
        """Return why the script does no more work, in one line; its traceback is in its output."""
        reason = self.ended.exception()
        if isinstance(reason, UsageError):
            return reason
        return UsageError(
            "the script ended before the run was over; continue to train until session.done, as in "
            "`while not session.done: for batch in loader: ...`"
        )


@dataclass
class ThisProcess:
    """Whether this process runs a script of ``blsgd launch``, its exchange, and its session.

    In a process that does not stay, that of a plain message to a SuperNode, no script runs.
    """

    has_script: bool = False
    exchange: Exchange | None = None
    has_joined: bool = False
    main_has_ended: Path | None = None
    """File that appears when the main worker's script has ended; None on SuperNodes."""
    main_first_blocks: int = 0


HERE = ThisProcess()
