"""One epoch as a Chrome trace: all workers and the server on one time axis.

The format is that of chrome://tracing and of Perfetto: a process per worker, times in microseconds.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol import Operators
from .trace_rows import OnServerClock, Span, TracedRound, WorkerRow, worker_rows

Event = dict[str, Any]

_SERVER = 1
_FIRST_WORKER = 2
_LANES = 1000
"""Thread ids are unique in a file, as they are on a machine: process times this, plus lane."""


@dataclass(frozen=True)
class TracedEpoch:
    """What happened in one epoch.

    Parameters
    ----------
    epoch : int
        Counted from 1.
    rounds : sequence of TracedRound
        In order, at least one.
    server : sequence of Span
        What the server did: lane 0 is the thread that trains, others work in the background.
    """

    epoch: int
    rounds: Sequence[TracedRound]
    server: Sequence[Span]


def write_chrome_trace(path: Path, traced: TracedEpoch) -> None:
    """Write the trace, whole or not at all.

    Parameters
    ----------
    path : Path
        A JSON file: ``{"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}``.
    traced : TracedEpoch
        What happened.
    """
    part = path.with_name(f"{path.name}.part")
    other = {"epoch": traced.epoch, "unix nanoseconds at 0": _zero(traced)}
    try:
        with part.open("w") as file:
            file.write('{"displayTimeUnit": "ms",\n"otherData": ')
            file.write(json.dumps(other) + ',\n"traceEvents": [')
            for number, event in enumerate(chrome_events(traced)):
                file.write(",\n" if number else "\n")
                file.write(json.dumps(event, allow_nan=False))
            file.write("\n]}\n")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def chrome_events(traced: TracedEpoch) -> Iterator[Event]:
    """Yield all events; time 0 is the start of the epoch."""
    zero = _zero(traced)
    ended = max(span.end_ns for span in traced.server if span.args.get("round"))
    yield from _server_events(traced, zero)
    rows = worker_rows(traced.rounds, zero, ended)
    for place, row in enumerate(rows):
        yield from _worker_events(row, _FIRST_WORKER + place, zero)
    yield from _counters(traced, rows, zero)


def _zero(traced: TracedEpoch) -> int:
    return min(span.start_ns for span in traced.server)


def _server_events(traced: TracedEpoch, zero: int) -> Iterator[Event]:
    yield from _process(_SERVER, "server")
    lanes = sorted({span.lane for span in traced.server})
    yield from _threads(_SERVER, {n: "in the background" if n else "rounds" for n in lanes})
    for span in traced.server:
        yield _complete(span, _SERVER, zero)


def _worker_events(row: WorkerRow, process: int, zero: int) -> Iterator[Event]:
    yield from _process(process, row.label)
    lanes = {"rounds": 0}
    for operators, _ in row.operators:
        for name in operators.lanes:
            lanes.setdefault(name, len(lanes))
    yield from _threads(process, {place: name for name, place in lanes.items()})
    for span in row.spans:
        yield _complete(span, process, zero)
    for time_ns, reason in row.failures:
        yield {
            "ph": "i",
            "s": "p",
            "name": f"counts 0: {reason}",
            "pid": process,
            "tid": process * _LANES,
            "ts": _microseconds(time_ns - zero),
        }
    for operators, clock in row.operators:
        for span in _operator_spans(operators, clock, lanes):
            yield _complete(span, process, zero)


def _operator_spans(
    operators: Operators, clock: OnServerClock, lanes: Mapping[str, int]
) -> Iterator[Span]:
    for lane, name, start, duration in operators.events:
        place = lanes[operators.lanes[lane]]
        yield Span(operators.names[name], clock(start), clock(start + duration), lane=place)
    if operators.left_out and operators.events:
        end = clock(max(start + duration for _, _, start, duration in operators.events))
        yield Span(f"{operators.left_out:,} more operators are left out", end, end, lane=1)


def _counters(traced: TracedEpoch, rows: Iterable[WorkerRow], zero: int) -> Iterator[Event]:
    """Yield who computes, which shows who waits, and the loss."""
    changes = [
        (time_ns, "fast" if row.fast else "slow", change)
        for row in rows
        for start, end in row.computing
        for time_ns, change in ((start, 1), (end, -1))
    ]
    tiers = sorted({tier for _, tier, _ in changes})
    computing = dict.fromkeys(tiers, 0)
    for time_ns, tier, change in sorted(changes):
        computing[tier] += change
        yield _counter("workers computing", time_ns - zero, dict(computing))
    for each in traced.rounds:
        if math.isfinite(each.record.train_loss):
            loss = {"mean": each.record.train_loss}
            yield _counter("train loss", each.received_ns - zero, loss)


def _counter(name: str, since_zero_ns: int, values: Mapping[str, float]) -> Event:
    time = _microseconds(since_zero_ns)
    return {"ph": "C", "name": name, "pid": _SERVER, "ts": time, "args": dict(values)}


def _complete(span: Span, process: int, zero: int) -> Event:
    event = {
        "ph": "X",
        "name": span.name,
        "pid": process,
        "tid": process * _LANES + span.lane,
        "ts": _microseconds(span.start_ns - zero),
        "dur": _microseconds(span.end_ns - span.start_ns),
    }
    return {**event, "args": dict(span.args)} if span.args else event


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _process(process: int, name: str) -> Iterator[Event]:
    about = {"ph": "M", "pid": process}
    yield {**about, "name": "process_name", "args": {"name": name}}
    yield {**about, "name": "process_sort_index", "args": {"sort_index": process}}


def _threads(process: int, names: Mapping[int, str]) -> Iterator[Event]:
    for lane, name in names.items():
        about = {"ph": "M", "pid": process, "tid": process * _LANES + lane}
        yield {**about, "name": "thread_name", "args": {"name": name}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": lane}}
