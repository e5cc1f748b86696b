"""The Chrome trace of an epoch that was made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.protocol import Operators, WorkerTrace
from flower_blsgd.protocol.tracing import COLLECT, GET_READY, LOAD_MODEL, SLOWDOWN, STEPS
from flower_blsgd.results import chrome_trace
from flower_blsgd.results.chrome_trace import TracedEpoch, chrome_events, write_chrome_trace
from flower_blsgd.results.trace_rows import OnServerClock, Span, TracedRound, worker_rows

from .records import record, row

T0 = 1_790_000_000_000_000_000
"""Unix time of the epoch's start."""


def at(microseconds: float) -> int:
    return T0 + round(microseconds * 1000)


def trace(began: float, steps: float, ended: float, **values: Any) -> WorkerTrace:
    """Return a worker that computes from `steps` on; all in microseconds since the start."""
    stages = [
        (GET_READY, at(began + 1)),
        (LOAD_MODEL, at(steps)),
        (STEPS, at(ended - 1)),
        (COLLECT, at(ended)),
    ]
    return WorkerTrace(at(began), stages, **values)


OPERATORS = Operators(
    ["operators", "device 0, stream 7"],
    ["aten::mm", "gemm"],
    [(0, 0, at(31), 9_000), (1, 1, at(33), 4_500)],
)


def epoch() -> TracedEpoch:
    """Two rounds: from 0 to 100 and from 100 to 200 microseconds.

    The slow worker (index 0, so that order is seen) computes from 30 to 79, the fast one from 25 to
    49. In the second round the fast one has no trace, and the slow one fails.
    """
    slow = row(
        0, fast=False, local_steps=2, completed_steps=2, num_examples=8, weight=0.25, loss=0.5
    )
    fast = row(1, completed_steps=4, num_examples=64, weight=0.75, loss=1.5)
    first = TracedRound(
        record(slow, fast, round=3, epoch=2, train_loss=1.25),
        at(10),
        at(90),
        {
            0: trace(20, 30, 80, step_ends_ns=[at(50), at(79)]),
            1: trace(22, 25, 50),
        },
        {0: OPERATORS},
    )
    failed = row(0, fast=False, failure="its fan stands still")
    silent = row(1, completed_steps=4, num_examples=64, start_seconds=20e-6, compute_seconds=30e-6)
    second = TracedRound(
        record(failed, silent, round=4, epoch=2, train_loss=float("nan")), at(110), at(190)
    )
    server = [
        Span("plan", at(0), at(8)),
        Span("round 3", at(0), at(100), {"round": 3}),
        Span("round 4", at(100), at(200), {"round": 4}),
        Span("evaluate", at(200), at(230)),
        Span("evaluate", at(0), at(40), {"after round": 2}, lane=1),
    ]
    return TracedEpoch(2, [first, second], server)


def spans(process: str, lane: str = "rounds") -> list[tuple[str, float, float]]:
    """Return (name, start, end) in microseconds of what a row shows."""
    events = list(chrome_events(epoch()))
    (pid,) = {e["pid"] for e in events if e.get("args") == {"name": process}}
    (tid,) = {e["tid"] for e in events if e["pid"] == pid and e.get("args") == {"name": lane}}
    return [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e["tid"] == tid
    ]


def test_worker_row_waits_gets_ready_steps_and_waits_again() -> None:
    assert spans("slow-0 (cpu:0)") == [
        ("wait for the next order", 0, 20),
        ("round 3", 20, 80),
        (GET_READY, 20, 21),
        (LOAD_MODEL, 21, 30),
        (STEPS, 30, 79),
        ("step 1", 30, 50),
        ("step 2", 50, 79),
        (COLLECT, 79, 80),
        ("wait for the next order", 80, 200),
    ]


def test_worker_without_a_trace_shows_what_the_server_knows() -> None:
    assert spans("fast-1 (cpu:1)")[-3:] == [
        ("wait for the next order", 50, 130),
        (STEPS, 130, 160),
        ("wait for the next order", 160, 200),
    ]


def test_worker_that_adds_up_models_shows_that() -> None:
    summing = row(2, fast=False, local_steps=0, start_seconds=50e-6, summing_seconds=20e-6)
    (found,) = worker_rows([TracedRound(record(summing), at(10), at(90))], at(0), at(100))
    assert [(s.name, s.start_ns, s.end_ns) for s in found.spans] == [
        ("wait for the next order", at(0), at(60)),
        ("add up models", at(60), at(80)),
        ("wait for the next order", at(80), at(100)),
    ]


def test_worker_that_never_answered_has_a_row_with_its_failure_only() -> None:
    lost = row(0, failure="it did not answer in time")
    (found,) = worker_rows([TracedRound(record(lost), at(10), at(90))], at(0), at(100))
    assert found.spans == []
    assert found.failures == [(at(90), "it did not answer in time")]


def test_processes_are_the_server_and_then_the_fast_workers_first() -> None:
    events = list(chrome_events(epoch()))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == [
        "server",
        "fast-1 (cpu:1)",
        "slow-0 (cpu:0)",
    ]
    threads = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert len(set(threads)) == len(threads)
    shown = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"}
    assert shown == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}


def test_operators_are_beneath_their_worker_on_the_same_axis() -> None:
    assert spans("slow-0 (cpu:0)", "operators") == [("aten::mm", 31, 40)]
    assert spans("slow-0 (cpu:0)", "device 0, stream 7") == [("gemm", 33, 37.5)]


def test_server_row_has_its_own_spans_and_those_in_the_background() -> None:
    assert ("round 4", 100, 200) in spans("server")
    assert spans("server", "in the background") == [("evaluate", 0, 40)]


def test_rounds_say_what_was_done() -> None:
    (args,) = [
        e["args"]
        for e in chrome_events(epoch())
        if e["ph"] == "X" and e["name"] == "round 3" and e["pid"] == 3
    ]
    assert args == {
        "round": 3,
        "steps": 2,
        "samples": 8,
        "batch size": 4,
        "weight": 0.25,
        "learning rate": 0.1,
        "mean loss": 0.5,
    }


def test_failure_is_marked_where_it_was_seen() -> None:
    (mark,) = [event for event in chrome_events(epoch()) if event["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("counts 0: its fan stands still", 190)


def test_counters_show_who_computes_and_the_loss() -> None:
    counters = [event for event in chrome_events(epoch()) if event["ph"] == "C"]
    computing = [(e["ts"], e["args"]) for e in counters if e["name"] == "workers computing"]
    assert computing == [
        (25, {"fast": 1, "slow": 0}),
        (30, {"fast": 1, "slow": 1}),
        (49, {"fast": 0, "slow": 1}),
        (79, {"fast": 0, "slow": 0}),
        (130, {"fast": 1, "slow": 0}),
        (160, {"fast": 0, "slow": 0}),
    ]
    assert [e["args"] for e in counters if e["name"] == "train loss"] == [{"mean": 1.25}]


def test_deliberate_slowdown_counts_as_computing() -> None:
    stages = [(LOAD_MODEL, at(30)), (STEPS, at(40)), (SLOWDOWN, at(70)), (COLLECT, at(72))]
    slowed = WorkerTrace(at(20), stages)
    (found,) = worker_rows(
        [TracedRound(record(row(0)), at(10), at(90), {0: slowed})], at(0), at(100)
    )
    assert found.computing == [(at(30), at(70))]


def test_more_operators_than_were_sent_are_told() -> None:
    many = Operators(["operators"], ["aten::mm"], [(0, 0, at(31), 1_000)], left_out=1_234)
    traced = TracedRound(record(row(0)), at(10), at(90), {0: trace(20, 30, 80)}, {0: many})
    server = [Span("round 1", at(0), at(100), {"round": 1})]
    names = [event["name"] for event in chrome_events(TracedEpoch(1, [traced], server))]
    assert "1,234 more operators are left out" in names


# --- clocks of other hosts


@pytest.mark.parametrize(
    ("began", "ended", "shift"),
    [
        (20, 80, 0),
        (10, 90, 0),
        (5, 60, 5),  # 5 behind
        (40, 95, -5),  # 5 ahead
        (-3_000_000, -2_999_960, 3_000_010),  # an hour behind: to the order's start
        (3_000_000, 3_000_040, -2_999_950),  # ahead: to the last reply
        (0, 120, 10),  # longer than the round: from its start, and cut
        (60, 180, -50),
    ],
)
def test_clock_of_another_host_is_moved_as_little_as_can_be(
    began: float, ended: float, shift: float
) -> None:
    sent = WorkerTrace(at(began), [(STEPS, at(ended))])
    clock = OnServerClock.of(TracedRound(record(), at(10), at(90)), sent)
    assert clock.shift_ns == round(shift * 1000)
    assert at(10) <= clock(at(began)) <= clock(at(ended)) <= at(90)
    if ended - began <= 80:
        assert clock(at(ended)) - clock(at(began)) == at(ended) - at(began)


def test_worker_whose_clock_is_off_still_has_all_its_spans_within_the_round() -> None:
    ahead = trace(3_600e6 + 20, 3_600e6 + 30, 3_600e6 + 80, step_ends_ns=[at(3_600e6 + 50)])
    operators = Operators(["operators"], ["aten::mm"], [(0, 0, at(3_600e6 + 31), 9_000)])
    traced = TracedRound(record(row(0)), at(10), at(90), {0: ahead}, {0: operators})
    (found,) = worker_rows([traced], at(0), at(100))
    assert [(s.start_ns, s.end_ns) for s in found.spans if s.name == STEPS] == [(at(40), at(89))]
    assert [s.end_ns for s in found.spans if s.name == "step 1"] == [at(60)]
    (told,) = [s.args for s in found.spans if s.name == "round 1"]
    assert told["its clock was moved by (ms)"] == pytest.approx(-3_600_000 + 0.01)
    server = [Span("round 1", at(0), at(100), {"round": 1})]
    events = list(chrome_events(TracedEpoch(1, [traced], server)))
    assert [e["ts"] for e in events if e["name"] == "aten::mm"] == [41]


# --- the file


def test_file_is_json_that_the_viewers_read(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", epoch())
    told = json.loads((tmp_path / "trace.json").read_text())
    assert told["displayTimeUnit"] == "ms"
    assert told["otherData"] == {"epoch": 2, "unix nanoseconds at 0": T0}
    assert told["traceEvents"] == list(chrome_events(epoch()))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(*_: object) -> Any:
        yield {"ph": "M"}
        raise OSError("the disk is full")

    monkeypatch.setattr(chrome_trace, "chrome_events", some)
    with pytest.raises(OSError, match="full"):
        write_chrome_trace(tmp_path / "trace.json", epoch())
    assert list(tmp_path.iterdir()) == []
