"""Seconds per round of the same app on every engine, in one run of this script.

The work of a round is the same everywhere (32 and 8 steps on digits), so the difference is what
the engine adds. The first round of each engine is left out: processes warm up in it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .rows import Row, conditions, main, not_run, row

WORKERS = "1x cpu:0 fast; 1x cpu:1 slow"
NODES = ("device='cpu:0' tier='fast'", "device='cpu:1' tier='slow'")


def measure(quick: bool) -> tuple[list[Row], dict[str, object]]:
    """Run the engines one after another."""
    nodes = [part for node in NODES for part in ("--node", node)]
    engine = ["scripts/flower_engine.py"]
    epochs = 3 if quick else 10
    local = round_seconds(["-m", "flower_blsgd", "run", "."], epochs)
    simulation = round_seconds([*engine, "simulation"], epochs)
    deployment = [*engine, "deployment", *nodes]
    stream = round_seconds(deployment, epochs)
    rows = [
        row("local grid", local, "s per round"),
        row("Flower simulation (Ray)", simulation, "s per round", local, "local grid"),
        row("SuperLink and 2 SuperNodes, stream", stream, "s per round", local, "local grid"),
    ]
    name, unit = "SuperLink and 2 SuperNodes, messages", "s per round"
    if quick:
        rows.append(not_run(name, "left out by --quick: about 10 s a round", unit))
    else:
        messages = round_seconds(deployment, epochs=3, transport="messages")
        rows.append(row(name, messages, unit, local, "local grid"))
    return rows, conditions(
        task="digits", parameters=151_306, workers=WORKERS, local_steps="32 and 8", batch_size=16
    )


def round_seconds(command: list[str], epochs: int, transport: str = "auto") -> list[float]:
    """Return the seconds of every round but the first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = (
            f"epochs={epochs} threads=1 workers='{WORKERS}' transport='{transport}' out='{out}' "
            "local-steps-slow=8"
        )
        subprocess.run(
            [sys.executable, *command, "-c", settings],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        lines = (out / "rounds.jsonl").read_text().splitlines()
        return [json.loads(line)["round_seconds"] for line in lines[1:]]


if __name__ == "__main__":
    main(measure, __doc__)
