"""Failures at random, for an hour: no run is lost, nothing is left behind, memory stays flat.

Run it from the clone (``make soak``)::

    python -m tests.faults.soak --out docs/results/soak

Each part writes a CSV file, a line as soon as it is known, and then the table of all parts whose
files are there. Parts: ``runs`` (each with one random failure, in this process), ``long`` (one run
of many rounds), ``kills`` (of the server, resumed), ``stream`` (ServerApp and SuperNode killed,
resumed) and ``links`` (tests of connections that are down).
"""

import argparse
import csv
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.taken_under import conditions
from flower_blsgd.engines.local.fork_server import start_fork_server
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.worker import MODULES

from ..engines.engine import Deployment
from ..grids.processes import Held, left_behind, process_ids, shared_bytes
from .faults import COUNTED, KINDS, Fault, Faults
from .kill_server import QUICK, kill_and_resume, run_to_its_end
from .stream_resume import kill_and_resume as resume
from .training import ROUNDS, train

UNDISTURBED = 20
"""Runs without a failure, with the seeds that the others have in turn."""

WORKERS = 3
DISK_FULL = "disk full"
ALL_SHARED = 12
"""After so many rounds, the first checkpoint among them, no more shared memory is made."""

LONG_EPOCHS = 200
SAMPLE_EVERY = 50
Row = Mapping[str, Any]


class Table:
    """A CSV file that grows by a line at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.csv"
        self.path.unlink(missing_ok=True)

    def add(self, **row: Any) -> None:
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
        print("  ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)


# --- runs with one random failure each ----------------------------------------------------------


def runs(out: Path, count: int, seed: int) -> None:
    """Train with one random failure each, and look for what is left behind after each."""
    table = Table(out, "runs")
    start_fork_server(MODULES)
    kinds = (*KINDS, DISK_FULL)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for number in range(-UNDISTURBED, count):
            fault = None
            if number >= 0:
                (fault,) = Faults.random(seed + number, WORKERS, ROUNDS, kinds).faults
            before, began = Held(), time.monotonic()
            failed, summary = "", {}
            try:
                summary = disturbed(Path(folder) / str(number), fault, number % UNDISTURBED)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            seconds = time.monotonic() - began
            table.add(
                run=number if fault else "undisturbed",
                seed=number % UNDISTURBED,
                kind=fault.kind if fault else "",
                worker=fault.worker if fault else "",
                first_round=fault.first if fault else "",
                last_round=fault.last if fault else "",
                finished=not failed and not summary["interrupted"],
                accuracy=f"{summary.get('accuracy', 0):.4f}",
                failures=len(summary.get("failures", [])),
                in_summary=in_summary(fault, summary),
                left_behind=" ".join(f"{n}:{c}" for n, c in left_behind(before).items()),
                server_mb=round(resident_mb(os.getpid()), 1),
                shared_mb=round(shared_mb(), 1),
                seconds=round(seconds, 1),
                error=failed,
            )


def disturbed(folder: Path, fault: Fault | None, seed: int) -> dict[str, Any]:
    if fault is None or fault.kind != DISK_FULL:
        return train(folder, Faults(fault) if fault else None, seed=seed)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_round(record: RoundRecord, grid: LocalGrid) -> None:
        # The limit is also one of shared memory, of which the first rounds make more; and at the
        # end the model must find a place.
        first = min(max(fault.first, ALL_SHARED), ROUNDS - 4)
        full = first <= record.round <= min(fault.last + 5, ROUNDS - 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    try:
        return train(folder, seed=seed, on_round=on_round, checkpoint_minutes=1e-4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def in_summary(fault: Fault | None, summary: Row) -> str:
    """Return whether the failure stands there with its rounds; empty if it is none."""
    if fault is None or fault.kind not in COUNTED:
        return ""
    found = {
        row["round"] for row in summary.get("failures", []) if f"-{fault.worker}" in row["worker"]
    }
    first_three = range(fault.first, min(fault.last, fault.first + 2, ROUNDS - 1) + 1)
    return str(found >= set(first_three))


# --- one long run -------------------------------------------------------------------------------


def long(out: Path, seed: int, epochs: int = LONG_EPOCHS) -> None:
    """Train for thousands of rounds, with a failure now and then, and watch what is held."""
    table, draws = Table(out, "long"), random.Random(seed)
    kinds = [kind for kind in KINDS if kind not in ("hangs", "stopped", "slow", "paused")]
    rounds = 9 * epochs
    faults = [
        Fault(draws.randrange(WORKERS), at, at, draws.choice(kinds))
        for at in draws.sample(range(10, rounds), rounds // 50)
    ]

    def on_round(record: RoundRecord, grid: LocalGrid) -> None:
        if record.round % SAMPLE_EVERY == 0:
            workers = [resident_mb(pid) for pid in process_ids(grid).values()]
            held = Held()
            table.add(
                round=record.round,
                server_mb=round(resident_mb(os.getpid()), 1),
                largest_worker_mb=round(max(workers, default=0.0), 1),
                shared_mb=round(shared_bytes(grid) / 1e6, 2),
                processes=len(held.processes),
                threads=held.threads,
                descriptors=held.descriptors,
            )

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        train(
            Path(folder) / "run",
            Faults(*faults),
            on_round=on_round,
            epochs=epochs,
            seed=seed,
            checkpoint_minutes=0.1,
        )


def resident_mb(pid: int) -> float:
    """Return the memory of a process that is no other's as well, 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1e3
    return 0.0


def shared_mb() -> float:
    """Return the blocks of shared memory that this process holds."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                total += os.stat(f"/proc/self/fd/{name}").st_size
    return total / 1e6


# --- the server killed, connections down --------------------------------------------------------


def kills(out: Path, count: int, seed: int) -> None:
    """Kill the server at random moments, resume, and compare with the undisturbed run."""
    table = Table(out, "kills")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        wanted = run_to_its_end(whole, *QUICK, "-s", "out=run")
        for number in range(count):
            own, began, error, found = Path(folder) / str(number), time.monotonic(), "", ""
            own.mkdir()
            times = 1 + number % 3
            try:
                found = kill_and_resume(own, random.Random(seed + number), times)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}".replace("\n", " ")[:300]
            table.add(
                run=number,
                kills=times,
                bit_equal=found == wanted,
                seconds=round(time.monotonic() - began, 1),
                error=error,
            )


def stream(out: Path, count: int, seed: int) -> None:
    """Kill the ServerApp and a SuperNode of a stream's run, and resume it."""
    table, draws = Table(out, "stream"), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        deployment = Deployment(Path(folder))
        try:
            deployment.start_superlink(simulation=False)
            for number in range(1, count + 1):
                try:
                    what, finished = resume(deployment, Path(folder) / f"run-{number}", draws), True
                except Exception as failure:
                    what, finished = f"{failure}".replace("\n", " ")[:300], False
                table.add(run=number, finished=finished, what=what)
        finally:
            deployment.stop()


def links(out: Path) -> None:
    """Run the tests that take long: connections that are down for 10 and 40 s."""
    table, began = Table(out, "links"), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "soak", "tests"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    table.add(
        passed=done.returncode == 0,
        what=done.stdout.strip().splitlines()[-1],
        seconds=round(time.monotonic() - began),
    )


# --- the table ----------------------------------------------------------------------------------


def report(out: Path) -> bool:
    """Write the table of all parts that there are; return whether all is as it should be."""
    lines: list[tuple[str, str, bool]] = []
    for name, lines_of in REPORTS.items():
        path = out / f"{name}.csv"
        if path.is_file():
            with path.open(newline="") as file:
                lines += lines_of(list(csv.DictReader(file)))
    rows = [f"| {what} | {found} | {'yes' if good else '**no**'} |" for what, found, good in lines]
    taken = "{date}, commit {commit}".format(**conditions())
    text = ["# Failures at random", "", f"Written by `make soak`: {taken}.", ""]
    text += ["| what | found | as it should be |", "|---|---|---|", *rows, ""]
    (out / "README.md").write_text("\n".join(text))
    print("\n".join(text))
    return all(good for _, _, good in lines)


Lines = Iterable[tuple[str, str, bool]]


def _report_runs(rows: list[dict[str, str]]) -> Lines:
    plain = [float(row["accuracy"]) for row in rows if row["run"] == "undisturbed"]
    others = [row for row in rows if row["run"] != "undisturbed"]
    if not others:
        return
    finished = sum(row["finished"] == "True" for row in others)
    yield (
        "runs with one random failure that finished",
        f"{finished} of {len(others)}",
        (finished == len(others)),
    )
    accuracies = [float(row["accuracy"]) for row in others]
    difference = 100 * (mean(accuracies) - mean(plain))
    yield (
        f"their mean accuracy, against {len(plain)} undisturbed runs",
        f"{mean(accuracies):.2%} against {mean(plain):.2%} ({difference:+.2f} points)",
        difference >= -0.3,
    )
    lowest = 100 * (min(accuracies) - mean(plain))
    yield "the lowest of them", f"{min(accuracies):.2%} ({lowest:+.2f} points)", lowest >= -3
    told = [row["in_summary"] for row in others if row["in_summary"]]
    good = sum(answer == "True" for answer in told)
    yield "failures that the summary names", f"{good} of {len(told)}", good == len(told)
    leaks = [row["left_behind"] for row in rows if row["left_behind"]]
    what = "processes, threads, descriptors, blocks of shared memory left behind"
    yield what, f"{len(leaks)} of {len(rows)} runs {' '.join(leaks[:3])}".strip(), not leaks
    kinds = {row["kind"] for row in others}
    yield "kinds of failures", f"{len(kinds)}: {', '.join(sorted(kinds))}", True
    third = max(1, len(rows) // 3)
    yield _flat("memory of the server's process, MB", [float(r["server_mb"]) for r in rows], third)


def _report_long(rows: list[dict[str, str]]) -> Lines:
    third = max(1, len(rows) // 3)
    for name, unit in (
        *(("server_mb", "memory of the server, MB"), ("shared_mb", "shared memory, MB")),
        *(("largest_worker_mb", "memory of the largest worker, MB"), ("threads", "threads")),
        *(("descriptors", "descriptors"), ("processes", "processes")),
    ):
        of_run = f"{unit}, in one run of {rows[-1]['round']} rounds"
        yield _flat(of_run, [float(row[name]) for row in rows], third)


def _flat(what: str, values: list[float], part: int) -> tuple[str, str, bool]:
    """Compare the last part with the middle one: at first everything grows to its size."""
    middle, last = mean(values[part : 2 * part] or values), mean(values[-part:])
    return what, f"{middle:.1f}, later {last:.1f}", last <= 1.05 * middle + 1


def _report_kills(rows: list[dict[str, str]]) -> Lines:
    equal = sum(row["bit_equal"] == "True" for row in rows)
    kills = sum(int(row["kills"]) for row in rows)
    what = f"runs whose server was killed ({kills} times in all) that ended bit for bit the same"
    yield what, f"{equal} of {len(rows)}", equal == len(rows)


def _report_stream(rows: list[dict[str, str]]) -> Lines:
    good = sum(row["finished"] == "True" for row in rows)
    what = "stream runs whose ServerApp and SuperNode were killed that were resumed and finished"
    yield what, f"{good} of {len(rows)}", good == len(rows)


def _report_links(rows: list[dict[str, str]]) -> Lines:
    for row in rows:
        yield "connections that are down for 10 and 40 s", row["what"], row["passed"] == "True"


REPORTS: dict[str, Callable[[list[dict[str, str]]], Lines]] = {
    "runs": _report_runs,
    "long": _report_long,
    "kills": _report_kills,
    "stream": _report_stream,
    "links": _report_links,
}


def main() -> int:
    """Run the parts; return 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(REPORTS), help="some of them, with commas")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=LONG_EPOCHS, help="of the long run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results/soak"))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    do = {
        "runs": lambda: runs(options.out, options.runs, options.seed),
        "long": lambda: long(options.out, options.seed, options.epochs),
        "kills": lambda: kills(options.out, options.kills, options.seed),
        "stream": lambda: stream(options.out, options.streams, options.seed),
        "links": lambda: links(options.out),
    }
    for part in options.parts.split(","):
        do[part]()
        report(options.out)
    return 0 if report(options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
