"""Runs that go on: checkpoints while one trains, how it ends early, and taking it up again."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError

from .checkpoint.state import capture, restore
from .checkpoint.store import FOLDER, Checkpoint, CheckpointStore
from .config import CHANGEABLE, RunConfig
from .errors import UsageError
from .results.folder import RunFolder, alone_in, read_config
from .results.metrics import blsgd_run, versions
from .results.recorder import RunRecorder
from .strategy.biased_local_sgd import BiasedLocalSGD
from .strategy.fit_loop import EpochEnd, EvaluateFn
from .tasks import GIVEN_IN_PYTHON

_RUN = "run"
"""Where a checkpoint has what the recorder needs."""

_FOR_MORE = {"stop-at": "stop-at-accuracy=0", "patience": "patience=0", "second": "seconds=N"}
"""What lets a run continue that is over, by a word of `RunRecorder.why_over`; else more epochs."""


@dataclass
class Past:
    """A run that is to go on, with its settings as they are now and its newest checkpoint."""

    folder: Path
    config: RunConfig
    checkpoint: Checkpoint
    notes: list[str]
    taken_up: bool = False

    def take_up(
        self, strategy: BiasedLocalSGD, report: RunRecorder, model: ArrayRecord
    ) -> tuple[ArrayRecord, int]:
        """Put a new strategy and a new recorder where the run was; return its model and round.

        UsageError if the checkpoint does not fit them, or the run is finished.
        """
        arrays, last_round = restore(strategy, self.checkpoint, model)
        with _readable(self.checkpoint):
            state = self.checkpoint.values[_RUN]
            report.take_up(RunFolder(self.folder), state, last_round, arrays)
            now = versions()
            if other := {k: v for k, v in state["versions"].items() if now.get(k, v) != v}:
                self.notes.append(f"  the checkpoint is of {other!s:.200}: bits may differ")
        if (why := report.why_over) and (self.folder / "summary.json").exists():
            more = next((more for word, more in _FOR_MORE.items() if word in why), "epochs=N")
            command = resume_command(self.config, self.folder, more)
            raise UsageError(f"{_shown(self.folder)} is finished: {why}; for more, {command}")
        self.taken_up = True
        for line in (f"resuming {self.folder} after round {last_round}", *self.notes):
            report.say(line)
        return arrays, last_round


@contextlib.contextmanager
def past_of(given: RunConfig, complete: bool) -> Iterator[Past | None]:
    """Find the run that ``resume`` names, and keep other processes from its folder meanwhile.

    Parameters
    ----------
    given : RunConfig
        The settings now; with an empty ``resume`` there is no such run.
    complete : bool
        Whether they were made from those of the run. Else what may change and has its default is
        taken from the run.

    An error after the run was taken up gets a note with the command that resumes it.

    Raises
    ------
    UsageError
        If there is no such run, it has no checkpoint, it is under way, or a setting differs that
        may not change.
    """
    if not given.resume:
        yield None
        return
    folder = Path(given.resume).resolve()
    of_run = read_config(folder)
    busy = f"{_shown(folder)} is in use by a run that is under way; wait for it, or end it"
    there = (folder / FOLDER).is_dir()
    with alone_in(folder / FOLDER, busy) if there else contextlib.nullcontext():
        checkpoint = CheckpointStore(folder, 0).newest()
        if checkpoint is None:
            out = ["-s", "out="] if of_run.out else []
            raise UsageError(
                f"{_shown(folder)} holds no checkpoint: it ended before the first one, or had "
                "keep-checkpoints = 0; start it anew: "
                f"{blsgd_run('-c', str(folder / 'config.toml'), *out)}"
            )
        with _readable(checkpoint):
            began = RunConfig.from_run_config(checkpoint.values[_RUN]["config"])
        config, notes = _settings(given, of_run, began, complete)
        past = Past(folder, config, checkpoint, notes)
        try:
            yield past
        except BaseException as error:
            if past.taken_up:
                error.add_note(resume_command(config, folder))
            raise


@contextlib.contextmanager
def _readable(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = error if isinstance(error, UsageError) else repr(error)
        raise UsageError(f"{checkpoint.source} holds no figures of a run: {reason}") from None


def _settings(
    given: RunConfig, of_run: RunConfig, began: RunConfig, complete: bool
) -> tuple[RunConfig, list[str]]:
    """Return the settings that a run goes on with, and a line for each that changed."""
    values, default = given.to_run_config(), RunConfig().to_run_config()
    before, theirs = began.to_run_config(), of_run.to_run_config()
    for key in CHANGEABLE if not complete else ():
        if values[key] == default[key]:
            values[key] = theirs[key]
    values["name"], values["out"] = before["name"], values["out"] or before["out"]
    changed = {k: v for k, v in values.items() if v != before[k] and k != "resume"}
    notes = {key: f"{key} = {v!r} instead of {before[key]!r}" for key, v in changed.items()}
    if wrong := [note for key, note in notes.items() if key not in CHANGEABLE]:
        raise UsageError(
            f"{_shown(Path(given.resume))} cannot be resumed with {', '.join(wrong)}; begin a new "
            f"run for that; what may change: {', '.join(CHANGEABLE)}"
        )
    if {"epochs", "seconds"} & changed.keys():
        notes[""] = "decay-epochs in percent and schedules are shares of the new budget"
    return RunConfig.from_run_config(values), [f"  {note}" for note in notes.values()]


def resume_command(config: RunConfig, folder: Path, setting: str = "") -> str:
    """Return what to type for a run to go on, perhaps with another setting."""
    if config.task == GIVEN_IN_PYTHON:
        more = setting and f", {setting.replace('-', '_')}"
        return f"train(task, resume={_shown(folder)!r}{more})"
    return blsgd_run("--resume", _shown(folder), *(["-s", setting] if setting else []))


def _shown(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative


class Checkpoints:
    """Writes what a run can go on from while it trains.

    At the end of every epoch and every ``checkpoint-minutes`` between rounds; when Ctrl-C or
    SIGTERM ends the run, which lets a round finish first, but no evaluation: the state before
    that; and when a round fails: the state before it, without momentum, unless there is one of it.
    An error that ends the run gets a note with the command that resumes it, or that none does.
    With ``keep-checkpoints = 0`` nothing else of this is done.
    """

    def __init__(self, grid: Grid, strategy: BiasedLocalSGD, report: RunRecorder) -> None:
        self._grid, self._strategy, self._report = grid, strategy, report
        self._config, self._folder = report.config, report.folder.path
        self._store = CheckpointStore(self._folder, self._config.keep_checkpoints)
        self._last: tuple[int, ArrayRecord] | None = None
        self._before_evaluation: Checkpoint | None = None
        self._saved_round = 0
        self._due = time.monotonic() + 60 * self._config.checkpoint_minutes
        self._signal, self._evaluating = 0, False

    @contextlib.contextmanager
    def written(self, locked: bool) -> Iterator[None]:
        """Write them while this context is open, in a folder that perhaps is locked already."""
        keeps = self._config.keep_checkpoints > 0
        with contextlib.ExitStack() as stack:
            if keeps and not locked:
                with contextlib.suppress(OSError):  # the disk is full
                    (self._folder / FOLDER).mkdir()
                stack.enter_context(alone_in(self._folder / FOLDER, "another run is in it"))
            if keeps:
                stack.enter_context(self._signals_wait())
            try:
                with contextlib.closing(self._store):
                    try:
                        yield
                    except AggregationError:
                        # A round in which no worker succeeded left the model as it was.
                        if self._last is not None:
                            self._last = self._strategy.planner.rounds_total, self._last[1]
                            if self._last[0] != self._saved_round:
                                self._save(with_momentum=False)  # those that failed have none
                        raise
            except BaseException as error:
                if not locked and self._store.saved_round:
                    error.add_note(resume_command(self._config, self._folder))
                elif not locked and not keeps:
                    error.add_note("this run cannot be resumed: keep-checkpoints = 0")
                raise

    def between_rounds(self, server_round: int, arrays: ArrayRecord) -> None:
        """Write a checkpoint if one is due, and end the run if it was interrupted."""
        self._last, self._before_evaluation = (server_round, arrays), None
        if self._signal:
            self._save()
            self._end(self._signal)
        if time.monotonic() >= self._due and not self._strategy.planner.epoch_ended:
            self._save()

    def end_epoch(self, end: EpochEnd) -> bool:
        """Record an epoch, or its late result, and write a checkpoint; return whether to stop."""
        had_best = self._report.best is not None
        stops = self._report.add_result(end) if end.late else self._report.add_epoch(end)
        if not end.late:
            self._last = end.round, end.arrays
        best = self._report.best
        if best is not None and best.round == end.round:
            # Before the checkpoint that names it: whichever is there after a kill, they agree.
            self._store.save_best(end.arrays, end.round, best.accuracy)
        elif best is None and had_best:
            self._store.discard_best()
        self._save()
        return stops

    def evaluated_by(self, evaluate: EvaluateFn) -> EvaluateFn:
        """Return the function with a checkpoint before it, and with Ctrl-C and SIGTERM ending it.

        Whatever ends it, the checkpoint and the model of before are kept.
        """

        def interruptible(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            # The model may be an older one, whose async evaluation failed.
            self._last = self._last or (server_round, arrays)
            self._report.arrays = self._last[1]
            self._before_evaluation = self._save()
            self._evaluating = True
            try:
                if self._signal:
                    self._end(self._signal)
                return evaluate(server_round, arrays)
            finally:
                self._evaluating = False

        return interruptible

    def _save(self, with_momentum: bool = True) -> Checkpoint | None:
        if not self._config.keep_checkpoints:
            return None
        assert self._last is not None
        began = time.perf_counter()
        before = self._before_evaluation
        if before and before.values["round"] != self._last[0]:
            before = None
        checkpoint = capture(self._strategy, self._grid, *self._last, with_momentum, before)
        checkpoint.values[_RUN] = self._report.state()
        self._saved_round = self._last[0]
        self._store.save(checkpoint, self._saved_round)
        self._due = time.monotonic() + 60 * self._config.checkpoint_minutes
        self._report.checkpoint_seconds += time.perf_counter() - began
        return checkpoint

    # --- Ctrl-C and SIGTERM

    @contextlib.contextmanager
    def _signals_wait(self) -> Iterator[None]:
        """Let a signal wait for the round, where nobody else handles it: Flower does."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for own in (signal.SIGINT, signal.SIGTERM):
                handler: Any = signal.getsignal(own)
                ours = str(getattr(handler, "__module__", "")).startswith("flower_blsgd")
                if ours or handler in (signal.default_int_handler, signal.SIG_DFL):
                    before[own] = signal.signal(own, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            self._report.at_once = True
            self._end(number)
        self._signal = number
        first = "finishing the round, then a checkpoint"
        line = f"{'leaving the evaluation' if self._evaluating else first}; again to end now"
        # In a thread: what we interrupted may hold the screen.
        threading.Thread(target=self._report.say, args=(line,), daemon=True).start()
        if self._evaluating:
            self._end(number)

    @staticmethod
    def _end(number: int) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
