"""Runs of the apps that compute nothing, on any engine: what is left is the engine."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .cells import LONGEST_RUN_SECONDS, Cell

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
_LOCAL = ("-m", "flower_blsgd", "run")
_FLOWER = ("scripts/flower_engine.py",)
_TIME_TO_CLEAN_UP_SECONDS = 60
LONGEST_REASON = 200
"""Characters: the cause stands first, the ways out behind it."""

Parts = dict[str, list[float]]
"""Seconds of every measured round: ``engine`` (push to last reply) and ``round`` (all of it)."""


class NotRunError(Exception):
    """The run failed or took too long; the message is the reason."""


def rounds_of(engine: str, cell: Cell, rounds: int, warm_up: int) -> Parts:
    """Return the seconds of every round but the first ones.

    Parameters
    ----------
    engine : str
        A key of `cells.ENGINES` that runs an app.
    cell : Cell
        How many workers and parameters.
    rounds, warm_up : int
        How many are measured, and how many before them are not.

    Raises
    ------
    NotRunError
        If the run failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        config = {
            "rounds": rounds + warm_up,
            "parameters": cell.parameters,
            "tensors": cell.tensors,
            "min-nodes": cell.workers,
            "out": f"'{out}'",
            **({"transport": f"'{engine}'"} if engine in ("stream", "messages") else {}),
        }
        text = " ".join(f"{key}={value}" for key, value in config.items())
        command = [sys.executable, *command_of(engine, cell), "-c", text]
        run(command, LONGEST_RUN_SECONDS)
        parts: Parts = json.loads(out.read_text())
        return {part: seconds[warm_up:] for part, seconds in parts.items()}


def command_of(engine: str, cell: Cell) -> list[str]:
    """Return what runs a no-op app on an engine, after the name of the interpreter."""
    app = str(FOLDER / ("noop_biased_app" if engine == "biased" else "noop_app"))
    if engine in ("local", "biased"):
        return [*_LOCAL, app, "--workers", f"{cell.workers - 1}x cpu fast; 1x cpu slow"]
    if engine in ("ray", "ray-stock"):
        stock = ["--stock"] if engine == "ray-stock" else []
        nodes = ["--num-supernodes", str(cell.workers)]
        return [*_FLOWER, "simulation", "--app", app, *nodes, *stock]
    nodes = [word for i in range(cell.workers) for word in ("--node", f"partition-id={i}")]
    return [*_FLOWER, "deployment", "--app", app, *nodes]


def run(command: list[str], longest_seconds: float) -> str:
    """Run a command quietly and return its output.

    It is asked to end after so many seconds, and cleans up itself.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=longest_seconds)
    except subprocess.TimeoutExpired:
        raise NotRunError(f"took longer than {longest_seconds:.0f} s") from None
    finally:
        end(process)
    if process.returncode:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        reason = lines[-1].replace(str(ROOT), ".") if lines else "no output"
        raise NotRunError(f"failed with code {process.returncode}: {reason[:LONGEST_REASON]}")
    return output


def end(process: subprocess.Popen[str]) -> None:
    """End a process that still runs: politely, since it has processes of its own to end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=_TIME_TO_CLEAN_UP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
