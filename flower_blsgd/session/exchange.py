"""Exchange of orders and results between the script and the thread that answers messages."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from ..devices.worker_spec import WorkerSpec
from ..errors import UsageError, first_line
from ..flower.app_call import ProcessEndsError
from ..protocol import EvaluateOrder, EvaluateReport, SessionInfo, TrainOrder, TrainReport


@dataclass(frozen=True)
class Train:
    """An order to train."""

    order: TrainOrder
    result: "Future[TrainReport]" = field(default_factory=Future)


@dataclass(frozen=True)
class Evaluate:
    """An order to evaluate a model."""

    order: EvaluateOrder
    result: "Future[EvaluateReport]" = field(default_factory=Future)


@dataclass(frozen=True)
class End:
    """The end of the run, with the final model."""

    arrays: ArrayRecord
    result: "Future[None]" = field(default_factory=Future)


Work = Train | Evaluate | End


@dataclass(frozen=True)
class Joined:
    """Settings of a session before the first order.

    `arrays` returns the tensors of the model that are sent, and `momentum` the state of the
    optimizer.
    """

    info: SessionInfo
    arrays: Callable[[], ArrayRecord]
    momentum: Callable[[], ArrayRecord]


class Exchange:
    """Both sides of a script that runs as a worker.

    The script waits for work in `next_work`. The thread that answers messages hands work over with
    `do`, and waits for its result. When the script ends, work that is not done fails. `rank` is the
    worker's partition id, from 0; `is_main` says whether this is the first worker that trains.
    """

    def __init__(
        self, worker: WorkerSpec, rank: int, seed: int, batch_size: int, is_main: bool
    ) -> None:
        self.worker, self.rank, self.seed, self.batch_size = worker, rank, seed, batch_size
        self.is_main = is_main
        self.joined: Future[Joined] = Future()
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._current: Work | None = None
        self._lock = threading.Lock()
        self.ended: Future[None] = Future()
        """Set when the script has ended, with the reason if it failed."""

    # --- the script's side

    def ready(self, joined: Joined) -> None:
        """Say that the script waits for its first order."""
        self.joined.set_result(joined)

    def next_work(self) -> Work:
        """Wait for work, and return it; `End` is done when the script has it."""
        work = self._work.get()
        if isinstance(work, End):
            work.result.set_result(None)
        return work

    def end(self, error: BaseException | None) -> None:
        """Note that the script has ended; all work fails from now on, except `End`."""
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
            self._finish(current)

    # --- the side of the messages

    def do(self, work: Any) -> Any:
        """Hand work to the script once it has joined, and return the result.

        Raises what the script raised.
        """
        self.joined.result()
        with self._lock:
            self._current = work
            if self.ended.done():
                self._finish(work)
            else:
                self._work.put(work)
        return work.result.result()

    def _finish(self, work: Work | None) -> None:
        if work is None or work.result.done():
            return
        if isinstance(work, End) and self.ended.exception() is None:
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
    """The exchange of this process, None without ``blsgd launch``, and whether it has a session."""

    exchange: Exchange | None = None
    has_joined: bool = False


HERE = ThisProcess()
