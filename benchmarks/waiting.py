"""The local steps that a run chooses, how long its fast worker waits, and its throughput.

``python -m benchmarks.waiting``: the default algorithm on real CIFAR-10 with ResNet8 and batches of
32, on one core and one that is slowed, started again and again with the same settings. The ceiling
of the throughput is a bare PyTorch loop on the first core just before and just after each run,
times 1 + 1 / gap. With ``--rows FILE`` each run is appended to a file, and the table is of all runs
in it, so that they can be spread over several calls.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .images import add_data_option, required_images
from .rows import Row, conditions, parser, row, with_goal, write
from .study.runs import Probe
from .study.tasks import Places

GAPS = 2, 4, 16
SETTINGS = {"task": "cifar10", "model": "resnet8", "batch-size": 32, "evaluate-every-epochs": 1000}
PROBE_SECONDS = 3.0


def run(gap: int, seconds: float, data: str, probe: Probe) -> dict[str, Any]:
    """Start the command once; return what became of it, and what the bare loop did beside it."""
    before = probe.samples_per_second()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        workers = f"1x cpu:0 fast; 1x cpu:1 slow slowdown={gap}"
        settings = {**SETTINGS, "data": data, "workers": workers, "seconds": seconds, "out": out}
        words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
        command = [sys.executable, "-m", "flower_blsgd", "run", ".", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        summary = json.loads((out / "summary.json").read_text())
    return {
        "gap": gap,
        "steps": [worker["local_steps"] for worker in summary["workers"]],
        "fast_waiting_share": summary["fast_waiting_share"],
        "slow_waiting_share": summary["slow_waiting_share"],
        "samples_per_second": summary["samples"] / summary["wall_seconds"],
        "bare_samples_per_second": [before, probe.samples_per_second()],
        "epoch_over_plan": summary["measured"]["epoch_seconds"]
        / summary["predicted"]["epoch_seconds"],
        "setup_seconds": summary["setup_seconds"],
        "load_average": os.getloadavg()[0],
    }


def rows_of(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of the table."""
    rows = []
    for gap in sorted({one["gap"] for one in runs}):
        own = [one for one in runs if one["gap"] == gap]
        chosen = [tuple(one["steps"]) for one in own]
        most = max(set(chosen), key=chosen.count)
        named = f"gap {gap}, {most[0]} and {most[1]} steps"
        waits = [100 * one["fast_waiting_share"] for one in own]
        ceilings = [fmean(one["bare_samples_per_second"]) * (1 + 1 / gap) for one in own]
        shares = [
            one["samples_per_second"] / ceiling for one, ceiling in zip(own, ceilings, strict=True)
        ]
        rows += [
            with_goal(row(named, [chosen.count(most) / len(own)], "of the starts"), at_least=0.9),
            with_goal(row(f"gap {gap}: fast worker waits", waits, "%"), at_most=3),
            row(f"gap {gap}: waits at most 5 %", [fmean(w <= 5 for w in waits)], "of the starts"),
            with_goal(row(f"gap {gap}: throughput", shares, "of the ceiling"), at_least=0.96),
            row(f"gap {gap}: epoch", [one["epoch_over_plan"] for one in own], "of the plan"),
            row(f"gap {gap}: set-up", [one["setup_seconds"] for one in own], "s"),
        ]
    return rows


def main() -> None:
    """Start the runs, and write the table."""
    line = parser(__doc__)
    add_data_option(line)
    line.add_argument("--gaps", type=int, nargs="+", default=GAPS)
    line.add_argument("--starts", type=int, default=10, help="of each gap")
    line.add_argument("--seconds", type=float, default=12.0, help="of training in each run")
    line.add_argument("--rows", type=Path, help="append each run to this file, and read it")
    given = line.parse_args()
    data, starts = required_images(given.data), 1 if given.quick else given.starts
    runs, file = [], given.rows
    if file and file.exists():
        runs = [json.loads(text) for text in file.read_text().splitlines()]
    if starts:
        probe = Probe(Places(data), PROBE_SECONDS)
        for _ in range(starts):
            for gap in given.gaps:
                runs.append(run(gap, given.seconds, data, probe))
                print(runs[-1], flush=True)
                if file:
                    with file.open("a") as lines:
                        lines.write(json.dumps(runs[-1]) + "\n")
        probe.close()
    chosen = {f"steps_at_gap_{gap}": [r["steps"] for r in runs if r["gap"] == gap] for gap in GAPS}
    taken = conditions(settings=SETTINGS, seconds=given.seconds, seed=0, **chosen)
    write(rows_of(runs), taken, given.json)


if __name__ == "__main__":
    main()
