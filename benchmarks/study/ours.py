"""A run of this project, for the study.

``python -m benchmarks.study.ours SETTINGS``, as JSON: ``task``, ``run`` (run config), ``folder``,
where it writes ``result.json``. With ``nodes`` (node configs) and ``far`` (what a command begins
with to run at the far end of a slow link), it runs on a SuperLink with two SuperNodes.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .link import ADDRESSES
from .tasks import finished, loaded, saved


def result_of(out: Path, task: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return what a run's folder says of it, and what its model is worth.

    The seconds of training are those from the first plan to the last average, with all that happens
    between rounds.
    """
    summary = json.loads((out / "summary.json").read_text())
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    result = {
        "training_seconds": summary["wall_seconds"],
        "seconds_of_rounds": summary["training_seconds"],
        "samples": summary["samples"],
        "rounds": summary["rounds"],
        "fast_waiting_share": summary["fast_waiting_share"],
        "local_steps": [worker["local_steps"] for worker in summary["workers"]],
        "failures": len(summary["failures"]),
    }
    if rounds:
        last = rounds[-1]["workers"]
        result["batches"] = [one["num_examples"] / max(1, one["local_steps"]) for one in last]
    if len(rounds) > 1:  # without the first
        first = rounds[0]
        seconds = result["training_seconds"] - first["planning_seconds"] - first["round_seconds"]
        trained = sum(worker["num_examples"] for one in rounds[1:] for worker in one["workers"])
        result["samples_per_second"] = trained / seconds
    its = loaded(task, seed)
    torch.set_num_threads(2)  # nothing else computes now
    return result | finished(its, saved(its, out / "model.safetensors", seed))


def train_here(run: Mapping[str, Any]) -> None:
    """Train on the local grid."""
    from flower_blsgd.config import RunConfig
    from flower_blsgd.parts import make_local_grid
    from flower_blsgd.run import train_on

    config = RunConfig.from_run_config(run)
    with make_local_grid(config) as grid:
        train_on(grid, config)


def train_at_both_ends(run: Mapping[str, Any], nodes: list[str], far: list[str]) -> None:
    """Train on a SuperLink with two SuperNodes, the slow one beyond the link."""
    from scripts.flower_engine import Engine

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engine is stopped all the same
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in run.items())
    with tempfile.TemporaryDirectory(prefix="flwr-home-") as home:
        engine = Engine(Path(home))
        file, before = Path(home, "config.toml"), engine.address
        engine.address = before.replace("127.0.0.1", ADDRESSES[0])  # which the far end reaches
        file.write_text(file.read_text().replace(before, engine.address))
        try:
            engine.start_superlink(simulation=False)
            for node, prefix in zip(nodes, ([], far), strict=True):
                engine.start_supernode(node, prefix)
            words = ("run", ".", "engine", "--stream", "-c", config)
            done = engine.flwr(*words, stdout=subprocess.PIPE)
            listing = engine.flwr("ls", "engine", "--format", "json", stdout=subprocess.PIPE)
        finally:
            engine.stop()
    print(done.stdout)
    if done.returncode or "finished:completed" not in listing.stdout:
        raise SystemExit("the run failed")
    if "not on the stream" in done.stdout:
        raise SystemExit("a node was not on the stream")


def main(text: str) -> None:
    """Train, and write the result."""
    given = json.loads(text)
    folder = Path(given["folder"])
    run = {**given["run"], "out": str(folder / "run")}
    if "nodes" in given:
        train_at_both_ends(run, given["nodes"], given["far"])
    else:
        train_here(run)
    result = result_of(folder / "run", given["task"], run["seed"])
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
