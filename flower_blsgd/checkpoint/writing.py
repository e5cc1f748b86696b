"""Write checkpoints during training, and let signals that end a run wait for its round."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError

from ..results.folder import CHECKPOINTS, alone_in
from ..results.recorder import RunRecorder
from ..results.summary import versions
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.rounds import EpochEnd
from .resume import RUN, resume_command
from .state import capture
from .store import Checkpoint, CheckpointStore


class Checkpoints:
    """Writes checkpoints during training.

    A checkpoint is written at the end of every epoch and, between rounds, every
    ``checkpoint-minutes``, when the workers wait: a round under way ends idle then. On Ctrl-C,
    SIGTERM or SIGHUP this round ends first and its state is written; an evaluation is abandoned,
    and the state before it stays. When a round fails, the state before it is written without
    momentum, unless it was written already. An error that ends the run gets a note with the command
    that resumes it. With ``keep-checkpoints = 0`` nothing of this happens.
    """

    def __init__(self, grid: Grid, strategy: BiasedLocalSGD, recorder: RunRecorder) -> None:
        self._grid, self._strategy, self._recorder = grid, strategy, recorder
        self._config, self._folder = recorder.config, recorder.folder.path
        self._store = CheckpointStore(self._folder, self._config.keep_checkpoints)
        self._last: tuple[int, ArrayRecord] | None = None
        self._before_evaluation: Checkpoint | None = None
        self._saved_round = 0
        self._due = time.monotonic() + 60 * self._config.checkpoint_minutes
        self._signal, self._evaluating = 0, False
        self._saying: threading.Thread | None = None

    @contextlib.contextmanager
    def written(self, locked: bool) -> Iterator[None]:
        """Write checkpoints within this context; `locked` if the folder is locked already."""
        keeps = self._config.keep_checkpoints > 0
        with contextlib.ExitStack() as stack:
            if keeps and not locked:
                with contextlib.suppress(OSError):  # the disk is full
                    (self._folder / CHECKPOINTS).mkdir()
                stack.enter_context(alone_in(self._folder / CHECKPOINTS, "another run is using it"))
            if keeps:
                stack.enter_context(self._deferred_signals())
            try:
                with contextlib.closing(self._store):
                    try:
                        yield
                    except AggregationError:
                        # A round in which no worker succeeded left the model unchanged.
                        if self._last is not None and not self._strategy.kept_model.orders:
                            self._last = self._strategy.planner.progress.rounds_total, self._last[1]
                            if self._last[0] != self._saved_round:
                                self._save(with_momentum=False)  # failed workers have none
                        raise
            except BaseException as error:
                if not locked and self._store.saved_round:
                    error.add_note(resume_command(self._config, self._folder))
                elif not locked and not keeps:
                    error.add_note("this run cannot be resumed: keep-checkpoints = 0")
                raise

    def after_round(self, server_round: int, arrays: ArrayRecord, idle: bool) -> None:
        """Write a checkpoint if one is due, and end the run after a signal, once workers wait."""
        self._last = server_round, arrays
        self._before_evaluation = None
        is_due = time.monotonic() >= self._due and not self._strategy.planner.epoch_ended
        if not (self._signal or (is_due and self._config.keep_checkpoints)):
            return
        if not idle:
            self._strategy.pause()
            return
        self._save()
        if self._signal:
            self._end(self._signal)

    def save(self, end: EpochEnd) -> None:
        """Write a checkpoint after the result of a model, and the model if it is the best."""
        if not end.late:
            self._last = end.round, end.arrays
        best = self._recorder.history.best
        if best is not None and best.round == end.round:
            # Before the checkpoint that names it, so that the two agree even after a kill.
            self._store.save_best(end.arrays, end.round, best.value)
        self._save()

    @contextlib.contextmanager
    def evaluating(self, server_round: int, arrays: ArrayRecord) -> Iterator[None]:
        """Write a checkpoint before an evaluation, and let a signal abandon the evaluation.

        The model may be an older one, whose async evaluation failed.
        """
        self._last = self._last or (server_round, arrays)
        self._recorder.history.arrays = self._last[1]
        self._recorder.history.arrays_epoch = self._strategy.planner.progress.epoch
        self._recorder.history.start_clock(time.monotonic())  # of a run resumed with an evaluation
        self._before_evaluation = self._save()
        self._evaluating = True
        try:
            if self._signal:
                self._end(self._signal)
            yield
        finally:
            self._evaluating = False

    def _save(self, with_momentum: bool = True) -> Checkpoint | None:
        if not self._config.keep_checkpoints:
            return None
        assert self._last is not None
        began = time.perf_counter()
        before = self._before_evaluation
        if before and before.values["round"] != self._last[0]:
            before = None
        checkpoint = capture(self._strategy, self._grid, *self._last, with_momentum, before)
        checkpoint.values[RUN] = {
            "config": dataclasses.replace(self._config, resume="").to_run_config(),
            "versions": versions(),
            "recorder": self._recorder.history.state_dict(),
        }
        self._saved_round = self._last[0]
        self._store.save(checkpoint, self._saved_round)
        self._due = time.monotonic() + 60 * self._config.checkpoint_minutes
        self._recorder.history.durations.checkpoint_seconds += time.perf_counter() - began
        return checkpoint

    # --- Ctrl-C, SIGTERM and SIGHUP

    @contextlib.contextmanager
    def _deferred_signals(self) -> Iterator[None]:
        """Let a signal wait for the round, unless another handler, such as Flower's, is set."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for own in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler: Any = signal.getsignal(own)
                ours = str(getattr(handler, "__module__", "")).startswith("flower_blsgd")
                if ours or handler in (signal.default_int_handler, signal.SIG_DFL):
                    before[own] = signal.signal(own, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._saying:  # before the last lines
                self._saying.join(1.0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGHUP:
            return  # a shell repeats that of the kernel
        if self._signal:
            self._recorder.at_once = True
            self._end(number)
        self._signal = number
        self._strategy.pause()
        action = (
            "abandoning the evaluation"
            if self._evaluating
            else "finishing the round, then writing a checkpoint"
        )
        line = f"{action}; press again to end immediately"
        # In a thread: the interrupted code may hold the lock of the screen.
        self._saying = threading.Thread(target=self._recorder.say, args=(line,), daemon=True)
        self._saying.start()
        if self._evaluating:
            self._end(number)

    @staticmethod
    def _end(number: int) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
