"""Gather what the server and the workers did in one epoch, and write it when the epoch ends."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from ..protocol import Operators, WorkerTrace
from ..round_log import RoundRecord
from ..training_loop import EpochEnd, EvaluateFn
from .chrome_trace import TracedEpoch, write_chrome_trace
from .trace_rows import Span, TracedRound

_LOG = logging.getLogger(__name__)

FILE = "trace.json"
_HOW_TO_OPEN = "open it in ui.perfetto.dev or chrome://tracing"
_LOOK_SECONDS = 0.002


@dataclass
class _Window:
    """When a round's parts began on the server, in nanoseconds of Unix time."""

    began_ns: int
    sent_ns: int
    on_their_way_ns: int = 0
    waiting_ns: int = 0
    averaged_ns: int = 0


class EpochTrace:
    """What happened in one epoch, and the file that tells it.

    The functions that a run hands to `fit` are given back so that they are timed; where nothing is
    to be traced they are given back as they are.

    Parameters
    ----------
    epoch : int (default: 0)
        Which, counted from 1; 0 for none.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self._over = False
        self._windows: dict[int, _Window] = {}
        self._records: dict[int, RoundRecord] = {}
        self._rounds: list[TracedRound] = []
        self._spans: list[Span] = []
        self._late: list[_LateEvaluation] = []
        self._lanes: dict[int, int] = {}

    @property
    def began(self) -> bool:
        """Whether a round of the epoch has begun."""
        return bool(self._windows)

    def is_in(self, server_round: int) -> bool:
        """Whether this round is one of the epoch."""
        return server_round in self._windows

    def begin_round(
        self, server_round: int, began_ns: int, planning_ns: int, planned_ns: int
    ) -> None:
        """Take the beginning of a round whose orders are about to be sent.

        Parameters
        ----------
        server_round : int
            Which.
        began_ns, planning_ns, planned_ns : int
            Unix time in nanoseconds: the beginning, and that and the end of the planning.
        """
        sent_ns = time.time_ns()
        planned_ns = min(max(planned_ns, began_ns), sent_ns)
        planning_ns = min(max(planning_ns, began_ns), planned_ns)
        self._lanes.setdefault(threading.get_ident(), 0)
        self._windows[server_round] = _Window(began_ns, sent_ns)
        self._add("see who is there", began_ns, planning_ns)
        self._add("plan", planning_ns, planned_ns)
        self._add("pack the orders", planned_ns, sent_ns)

    def end_round(
        self,
        server_round: int,
        received_ns: int,
        reading_ns: int,
        traces: Mapping[int, WorkerTrace],
        operators: Mapping[int, Operators],
    ) -> None:
        """Take the end of a round, after its record.

        Parameters
        ----------
        server_round : int
            Which.
        received_ns, reading_ns : int
            Unix time in nanoseconds: the last reply, and when the traces began to be read.
        traces, operators : mapping
            As for `TracedRound`.
        """
        window, record = self._windows[server_round], self._records.get(server_round)
        if record is None:  # nobody listens to rounds
            return
        if window.on_their_way_ns:
            self._add("send the orders", window.sent_ns, window.on_their_way_ns)
        self._add("wait for the replies", window.waiting_ns or window.sent_ns, received_ns)
        self._add("check and average", received_ns, window.averaged_ns)
        self._add("read the traces", reading_ns, time.time_ns())
        told = {
            "round": server_round,
            "learning rate": record.learning_rate,
            "bytes moved": record.bytes_moved,
        }
        if math.isfinite(record.train_loss):  # JSON has no other numbers
            told["train loss"] = record.train_loss
        end_ns = time.time_ns()
        self._spans.append(Span(f"round {server_round}", window.began_ns, end_ns, told))
        self._rounds.append(TracedRound(record, window.sent_ns, received_ns, traces, operators))

    def on_round(self, take: Callable[[RoundRecord], None]) -> Callable[[RoundRecord], None]:
        """Return what takes a round, timed."""
        if not self.epoch:
            return take

        def timed(record: RoundRecord) -> None:
            window = self._windows.get(record.round)
            if window is not None:
                window.averaged_ns = time.time_ns()
                self._records[record.round] = record
            with self._timed("write the round down"):
                take(record)

        return timed

    def on_sent(self, go_on: Callable[[], None]) -> Callable[[], None]:
        """Return what is called when a round's orders are on their way, timed."""
        if not self.epoch:
            return go_on

        def timed() -> None:
            began_ns = time.time_ns()
            with self._timed("write what was put off"):
                go_on()
            if self._windows:
                window = list(self._windows.values())[-1]
                window.on_their_way_ns, window.waiting_ns = began_ns, time.time_ns()

        return timed

    def evaluating(self, evaluate: EvaluateFn) -> EvaluateFn:
        """Return what evaluates, timed, also where that goes on beside the training."""
        if not self.epoch:
            return evaluate

        def timed(server_round: int, arrays: ArrayRecord) -> MetricRecord | Any | None:
            began_ns = time.time_ns()
            with self._timed("evaluate"):
                metrics = evaluate(server_round, arrays)
            if not self._over and metrics is not None and not isinstance(metrics, MetricRecord):
                if not self.began:
                    self._give_up_late()  # only the last may go on in the epoch
                self._late.append(_LateEvaluation(metrics, server_round, began_ns))
            return metrics

        return timed

    def on_epoch(
        self, take: Callable[[EpochEnd], None], path: Path, say: Callable[[str], None]
    ) -> Callable[[EpochEnd], None]:
        """Return what takes the end of an epoch, timed, and then writes the trace.

        Parameters
        ----------
        take : callable
            What is wrapped.
        path : Path
            The folder.
        say : callable
            Where to tell of the file.
        """
        if not self.epoch:
            return take

        def timed(end: EpochEnd) -> None:
            with self._timed("write the epoch down"):
                take(end)
            if end.epoch == self.epoch:
                self._write(path, say)

        return timed

    @contextlib.contextmanager
    def writing(self, path: Path, say: Callable[[str], None]) -> Iterator[None]:
        """Write what there is if the run ends within the epoch, and say so if it ends before."""
        try:
            yield
        finally:
            if self.epoch and not self._over:
                self._write(path, say)

    def _write(self, path: Path, say: Callable[[str], None]) -> None:
        self._over = True
        if not self._rounds:
            self._give_up_late()
            say(f"no trace: the run ended before a round of epoch {self.epoch} was over")
            return
        began_ns = min(window.began_ns for window in self._windows.values())
        late = _spans_of(self._late, began_ns, max(self._lanes.values()) + 1)
        self._give_up_late()
        file = path / FILE
        try:
            write_chrome_trace(file, TracedEpoch(self.epoch, self._rounds, self._spans + late))
        except OSError as error:
            _LOG.warning("the trace of epoch %d could not be written: %s", self.epoch, error)
        else:
            say(f"trace of epoch {self.epoch}: {file} ({_HOW_TO_OPEN})")
        for kept in (self._windows, self._records, self._rounds, self._spans):
            kept.clear()

    def _give_up_late(self) -> None:
        for each in self._late:
            each.give_up()
        self._late.clear()

    def _add(self, name: str, start_ns: int, end_ns: int) -> None:
        self._spans.append(Span(name, start_ns, max(start_ns, end_ns)))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Record what the calling thread does, from the beginning of the epoch to its end."""
        start_ns = time.time_ns()
        try:
            yield
        finally:
            if self._windows and not self._over:
                lane = self._lanes.setdefault(threading.get_ident(), len(self._lanes))
                self._spans.append(Span(name, start_ns, time.time_ns(), lane=lane))


class _LateEvaluation:
    """One that goes on beside the training: a thread looks for its end.

    It does not wait for the result: who does that is taken to wait in earnest.
    """

    def __init__(self, metrics: Any, server_round: int, began_ns: int) -> None:
        self.began_ns, self.round = began_ns, server_round
        self.ended_ns: int | None = None
        self._metrics = metrics
        self._given_up = threading.Event()
        threading.Thread(target=self._look, name="blsgd-trace", daemon=True).start()

    def give_up(self) -> None:
        """Look no more."""
        self._given_up.set()

    def _look(self) -> None:
        while not self._metrics.done():
            if self._given_up.wait(_LOOK_SECONDS):
                return
        self.ended_ns = time.time_ns()


def _spans_of(late: Iterable[_LateEvaluation], began_ns: int, lane: int) -> list[Span]:
    """Return what of these evaluations falls into the epoch, one after another."""
    spans = []
    free_ns = began_ns
    for each in late:
        ended_ns = each.ended_ns
        name = "evaluate" if ended_ns else "evaluate (not over yet)"
        ended_ns = ended_ns or time.time_ns()
        start_ns, free_ns = max(each.began_ns, free_ns), max(ended_ns, free_ns)
        if ended_ns > start_ns:
            about = {"after round": each.round}
            spans.append(Span(name, start_ns, ended_ns, about, lane))
    return spans
