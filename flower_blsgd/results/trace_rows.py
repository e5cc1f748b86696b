"""What each worker did in one epoch, as rows of spans on the server's clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol import Operators, WorkerTrace
from ..protocol.tracing import SLOWDOWN, STEPS
from ..round_log import RoundRecord, WorkerRound

WAIT = "wait for the next order"


@dataclass(frozen=True)
class Span:
    """Something that took a while.

    Parameters
    ----------
    name : str
        What.
    start_ns, end_ns : int
        Unix time in nanoseconds.
    args : mapping
        What else is known of it.
    lane : int (default: 0)
        The thread of its process, counted from 0.
    """

    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    lane: int = 0


@dataclass(frozen=True)
class TracedRound:
    """One round, as the server and its workers saw it.

    Parameters
    ----------
    record : RoundRecord
        Who did what.
    sent_ns, received_ns : int
        Unix time in nanoseconds: before the first order left, and after the last reply came.
    traces : mapping of int to WorkerTrace
        By worker index; of those that sent one.
    operators : mapping of int to Operators
        Likewise.
    """

    record: RoundRecord
    sent_ns: int
    received_ns: int
    traces: Mapping[int, WorkerTrace] = field(default_factory=dict)
    operators: Mapping[int, Operators] = field(default_factory=dict)


@dataclass(frozen=True)
class OnServerClock:
    """Moves the times of one worker's round onto the server's clock.

    All are shifted by as little as brings them between order and reply, where they must have been:
    not at all on this machine. What is still outside is moved to the nearer end.

    Parameters
    ----------
    low_ns, high_ns : int
        Unix time of the first order and of the last reply.
    shift_ns : int
        What is added.
    """

    low_ns: int
    high_ns: int
    shift_ns: int = 0

    @classmethod
    def of(cls, traced: TracedRound, trace: WorkerTrace) -> "OnServerClock":
        """Return the clock of a worker in a round."""
        low, high = traced.sent_ns, traced.received_ns
        early, late = low - trace.began_ns, high - trace.ended_ns
        shift = early if early > 0 else min(0, max(early, late))
        return cls(low, high, shift)

    def __call__(self, time_ns: int) -> int:
        """Return a time on the server's clock."""
        return min(max(time_ns + self.shift_ns, self.low_ns), self.high_ns)


@dataclass(frozen=True)
class WorkerRow:
    """One worker in one epoch.

    Parameters
    ----------
    worker : int
        Its index.
    label : str
        Such as ``fast-0 (cpu:0)``.
    fast : bool
        Its tier.
    spans : sequence of Span
        One after another, or one within another.
    computing : sequence of (int, int)
        When it did steps, in nanoseconds of Unix time; a deliberate slowdown counts.
    failures : sequence of (int, str)
        When it was seen that it counts 0, and why.
    operators : sequence of (Operators, OnServerClock)
        Of the rounds that have them.
    """

    worker: int
    label: str
    fast: bool
    spans: Sequence[Span]
    computing: Sequence[tuple[int, int]]
    failures: Sequence[tuple[int, str]]
    operators: Sequence[tuple[Operators, OnServerClock]]


def worker_rows(rounds: Sequence[TracedRound], began_ns: int, ended_ns: int) -> list[WorkerRow]:
    """Return a row per worker, fast ones first.

    Parameters
    ----------
    rounds : sequence of TracedRound
        Of the epoch, in order.
    began_ns, ended_ns : int
        Unix time of the epoch's start and of its last global model.
    """
    of_worker: dict[int, list[tuple[TracedRound, WorkerRound]]] = {}
    for traced in rounds:
        for row in traced.record.workers:
            of_worker.setdefault(row.worker, []).append((traced, row))
    rows = [_row(parts, began_ns, ended_ns) for parts in of_worker.values()]
    return sorted(rows, key=lambda row: (not row.fast, row.worker))


def _row(
    parts: Sequence[tuple[TracedRound, WorkerRound]], began_ns: int, ended_ns: int
) -> WorkerRow:
    spans: list[Span] = []
    computing: list[tuple[int, int]] = []
    failures: list[tuple[int, str]] = []
    operators: list[tuple[Operators, OnServerClock]] = []
    free_ns = began_ns
    for traced, row in parts:
        trace = traced.traces.get(row.worker)
        done = _told_by_server(traced, row) if trace is None else _round(traced, row, trace)
        if row.failure:
            failures.append((traced.received_ns, row.failure))
        if done:
            spans += [*_waiting(free_ns, done[0].start_ns), *done]
            free_ns = done[0].end_ns
        steps = [span for span in done if span.name in (STEPS, SLOWDOWN)]
        if steps:
            computing.append((steps[0].start_ns, steps[-1].end_ns))
        if trace is not None and row.worker in traced.operators:
            operators.append((traced.operators[row.worker], OnServerClock.of(traced, trace)))
    if spans:
        spans += _waiting(free_ns, ended_ns)
    last = parts[-1][1]
    return WorkerRow(last.worker, last.label, last.fast, spans, computing, failures, operators)


def _waiting(start_ns: int, end_ns: int) -> list[Span]:
    return [Span(WAIT, start_ns, end_ns)] if end_ns > start_ns else []


def _round(traced: TracedRound, row: WorkerRound, trace: WorkerTrace) -> list[Span]:
    clock = OnServerClock.of(traced, trace)
    args = _args(traced, row)
    if clock.shift_ns:
        args["its clock was moved by (ms)"] = clock.shift_ns / 1e6
    if trace.note:
        args["note"] = trace.note
    start = clock(trace.began_ns)
    spans = [Span(f"round {traced.record.round}", start, clock(trace.ended_ns), args)]
    for stage, stage_end in trace.stages:
        end = clock(stage_end)
        if end > start:
            spans.append(Span(stage, start, end, args if stage == STEPS else {}))
        if stage == STEPS:
            spans += _steps(start, end, [clock(step_end) for step_end in trace.step_ends_ns])
        start = end
    return spans


def _steps(start_ns: int, end_ns: int, ends_ns: Sequence[int]) -> list[Span]:
    spans = []
    for number, step_end in enumerate(ends_ns, start=1):
        end = min(max(step_end, start_ns), end_ns)
        spans.append(Span(f"step {number}", start_ns, end))
        start_ns = end
    return spans


def _told_by_server(traced: TracedRound, row: WorkerRound) -> list[Span]:
    """Return what is known of a worker that sent no trace."""
    start = traced.sent_ns + round(row.start_seconds * 1e9)
    if row.summing_seconds > 0:
        return [Span("add up models", start, start + round(row.summing_seconds * 1e9))]
    if row.compute_seconds > 0:
        end = start + round(row.compute_seconds * 1e9)
        return [Span(STEPS, start, min(end, traced.received_ns), _args(traced, row))]
    return []


def _args(traced: TracedRound, row: WorkerRound) -> dict[str, Any]:
    args: dict[str, Any] = {
        "round": traced.record.round,
        "steps": row.completed_steps,
        "samples": row.num_examples,
        "weight": row.weight,
        "learning rate": traced.record.learning_rate,
    }
    if row.completed_steps:
        args["batch size"] = row.num_examples // row.completed_steps
    if math.isfinite(row.loss):
        args["mean loss"] = row.loss
    return args
