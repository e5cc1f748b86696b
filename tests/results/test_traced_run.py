"""`blsgd run --profile` with real processes: does the trace tell the truth?"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flower_blsgd.protocol.tracing import COLLECT, GET_READY, LOAD_MODEL, SLOWDOWN, STEPS
from flower_blsgd.results.trace_rows import WAIT
from flower_blsgd.runtime.machine import usable_cores

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

FIRST, LAST = usable_cores()[0], usable_cores()[-1]
SETTINGS = (
    "epochs=2 local-steps-fast=16 local-steps-slow=4 batch-size=16 threads=1 seed=3 "
    f"workers='1x cpu:{LAST} slow slowdown=3 name=tortoise; 1x cpu:{FIRST} fast'"
)
"""(16 + 4) x 16 = 320 of 1,437 samples a round: 4 rounds in the second epoch."""

NEARLY = 2_000.0
"""Microseconds: two clocks of one machine, and what is between two looks at them."""

Span = dict[str, Any]


def blsgd(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "flower_blsgd", "run", "-c", SETTINGS, *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


class Trace:
    """What a viewer would show of the file."""

    def __init__(self, path: Path) -> None:
        told = json.loads(path.read_text())
        self.zero_ns = told["otherData"]["unix nanoseconds at 0"]
        self.events = told["traceEvents"]
        self.spans = [event for event in self.events if event["ph"] == "X"]
        self.processes = {
            e["args"]["name"]: e["pid"] for e in self.events if e["name"] == "process_name"
        }
        self.threads = {
            (e["pid"], e["args"]["name"]): e["tid"]
            for e in self.events
            if e["name"] == "thread_name"
        }

    def row(self, process: str, thread: str = "rounds") -> list[Span]:
        pid = self.processes[process]
        tid = self.threads[pid, thread]
        return [span for span in self.spans if (span["pid"], span["tid"]) == (pid, tid)]


def end(span: Span) -> float:
    return float(span["ts"] + span["dur"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("traced")
    told = blsgd(folder, "-s", "out=run", "--profile")
    return folder / "run", told


@pytest.fixture(scope="module")
def trace(run: tuple[Path, str]) -> Trace:
    return Trace(run[0] / "trace.json")


@pytest.fixture(scope="module")
def rounds(run: tuple[Path, str]) -> list[dict[str, Any]]:
    """Return the records of the second epoch's rounds."""
    lines = (run[0] / "rounds.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["epoch"] == 2]


def workers_of(trace: Trace) -> list[str]:
    return [name for name in trace.processes if name != "server"]


def test_run_says_where_the_trace_is_and_how_to_open_it(run: tuple[Path, str]) -> None:
    folder, told = run
    (line,) = [line for line in told.splitlines() if line.startswith("trace of")]
    assert line.startswith(f"trace of epoch 2: {folder / 'trace.json'} (open it in ")


def test_there_is_a_row_for_the_server_and_each_worker_the_fast_one_first(trace: Trace) -> None:
    names = sorted(trace.processes, key=trace.processes.__getitem__)
    assert names == ["server", f"fast-0 (cpu:{FIRST})", f"tortoise (cpu:{LAST})"]


def test_all_spans_lie_within_the_epoch(trace: Trace) -> None:
    server = [span for span in trace.spans if span["pid"] == trace.processes["server"]]
    began, ended = min(s["ts"] for s in server), max(map(end, server))
    assert began == 0
    for span in trace.spans:
        assert -0.001 <= span["ts"] <= end(span) <= ended + 0.001, span


def test_spans_of_a_row_nest_and_do_not_overlap(trace: Trace) -> None:
    for (pid, _), tid in trace.threads.items():
        row = [s for s in trace.spans if (s["pid"], s["tid"]) == (pid, tid)]
        open_ends: list[float] = []
        for span in sorted(row, key=lambda s: (s["ts"], -s["dur"])):
            while open_ends and open_ends[-1] <= span["ts"] + 0.002:
                open_ends.pop()
            assert not open_ends or end(span) <= open_ends[-1] + 0.002, span
            open_ends.append(end(span))


def test_every_round_has_its_stages_and_steps(trace: Trace, rounds: list[Any]) -> None:
    assert len(rounds) == 4
    for name in workers_of(trace):
        row = trace.row(name)
        slow = "tortoise" in name
        names = [span["name"] for span in row]
        assert [n for n in names if n.startswith("round")] == [
            f"round {r['round']}" for r in rounds
        ]
        for stage in (GET_READY, LOAD_MODEL, STEPS, WAIT):
            assert names.count(stage) >= 4, stage
        assert COLLECT in names
        assert names.count(SLOWDOWN) == (4 if slow else 0)
        steps = 4 if slow else 16
        assert [n for n in names if n.startswith("step ")] == [
            f"step {number}" for _ in rounds for number in range(1, steps + 1)
        ]


def test_it_agrees_with_the_runs_own_records(trace: Trace, rounds: list[Any]) -> None:
    """Those that the run's timeline is drawn from."""
    for name in workers_of(trace):
        row = trace.row(name)
        for record in rounds:
            (own,) = [r for r in record["workers"] if r["label"] == name]
            (whole,) = [s for s in row if s["name"] == f"round {record['round']}"]
            assert whole["args"]["steps"] == own["completed_steps"]
            assert whole["args"]["samples"] == own["num_examples"]
            assert whole["args"]["mean loss"] == own["loss"]
            within = [s for s in row if whole["ts"] <= s["ts"] and end(s) <= end(whole) + 0.001]
            computing = [s for s in within if s["name"] in (STEPS, SLOWDOWN)]
            assert sum(s["dur"] for s in computing) == pytest.approx(
                own["compute_seconds"] * 1e6, abs=NEARLY
            )
            (server,) = [s for s in trace.row("server") if s["name"] == f"round {record['round']}"]
            assert server["ts"] <= whole["ts"] <= end(whole) <= end(server)


def test_who_waits_longer_in_the_records_waits_longer_in_the_trace(
    trace: Trace, rounds: list[Any]
) -> None:
    for record in rounds:
        computed = {}
        for own in record["workers"]:
            row = trace.row(own["label"])
            (whole,) = [s for s in row if s["name"] == f"round {record['round']}"]
            steps = [
                s
                for s in row
                if s["name"] in (STEPS, SLOWDOWN) and whole["ts"] <= s["ts"] <= end(whole)
            ]
            computed[own["label"]] = max(map(end, steps))
        last = max(computed.values())
        for own in record["workers"]:
            waited = last - computed[own["label"]]
            assert waited == pytest.approx(own["waiting_seconds"] * 1e6, abs=NEARLY)


def test_operators_are_there_for_the_first_round_only_within_its_steps(
    trace: Trace, rounds: list[Any]
) -> None:
    for name in workers_of(trace):
        row, operators = trace.row(name), trace.row(name, "operators")
        (first,) = [s for s in row if s["name"] == f"round {rounds[0]['round']}"]
        (second,) = [s for s in row if s["name"] == f"round {rounds[1]['round']}"]
        assert len(operators) > 100
        assert all(first["ts"] <= s["ts"] and end(s) <= end(first) for s in operators)
        assert end(first) <= second["ts"]
        updates = [s for s in operators if s["name"].startswith("Optimizer.step")]
        ends = [end(s) for s in row if s["name"].startswith("step ")][: len(updates)]
        assert len(updates) == (4 if "tortoise" in name else 16)
        off = [abs(end(update) - step) for update, step in zip(updates, ends, strict=True)]
        assert statistics.median(off) < NEARLY


def test_server_row_tells_what_the_workers_wait_for(trace: Trace) -> None:
    names = [span["name"] for span in trace.row("server")]
    for expected in ("plan", "pack the orders", "wait for the replies", "check and average"):
        assert names.count(expected) == 4, expected
    assert any(span["name"].startswith("evaluate") for span in trace.spans)


def test_counter_begins_and_ends_with_nobody_computing(trace: Trace) -> None:
    counted = [e["args"] for e in trace.events if e["name"] == "workers computing"]
    assert counted[-1] == {"fast": 0, "slow": 0}
    assert {(c["fast"], c["slow"]) for c in counted} <= {(0, 0), (1, 0), (0, 1), (1, 1)}


def test_model_is_that_of_a_run_without_a_trace_to_the_bit(run: tuple[Path, str]) -> None:
    traced, _ = run
    told = blsgd(traced.parent, "-s", "out=plain")
    assert "trace of" not in told
    assert not (traced.parent / "plain" / "trace.json").exists()
    ours = load_file(traced / "model.safetensors")
    theirs = load_file(traced.parent / "plain" / "model.safetensors")
    assert {n: t.tobytes() for n, t in ours.items()} == {n: t.tobytes() for n, t in theirs.items()}
