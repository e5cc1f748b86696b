"""A run of this project, for the study.

``python -m benchmarks.study.ours SETTINGS``, as JSON: ``task``, ``run`` (settings), ``folder``,
``core`` (of all its processes, or null). Writes ``result.json`` there.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from .tasks import finished, loaded, saved


def result_of(out: Path, task: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return what a run's folder says of it, and what its models are worth."""
    summary = json.loads((out / "summary.json").read_text())
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    device = summary["clock"] == "device"
    result = {
        "training_seconds": summary["device_seconds" if device else "training_seconds"],
        "measured_seconds": summary["training_seconds"],
        "samples": summary["samples"],
        "rounds": summary["rounds"],
        "accuracy_as_trained": summary["accuracy"],
        "fast_waiting_share": summary["fast_waiting_share"],
        "slow_waiting_share": summary["slow_waiting_share"],
        "local_steps": [worker["local_steps"] for worker in summary["workers"]],
        "weights": [worker["weight"] for worker in summary["workers"]],
        "failures": len(summary["failures"]),
    }
    if "mean_loss_age_rounds" in summary:
        result["mean_loss_age_rounds"] = summary["mean_loss_age_rounds"]
    if len(rounds) > 1:  # without the first
        seconds = sum(one["planning_seconds"] + one["round_seconds"] for one in rounds[1:])
        trained = sum(worker["num_examples"] for one in rounds[1:] for worker in one["workers"])
        result["samples_per_second"] = trained / seconds
    its = loaded(task, seed)
    torch.set_num_threads(1)
    result |= finished(its, saved(its, out / "model.safetensors"))
    return result


def main(text: str) -> None:
    """Train, and write the result."""
    given = json.loads(text)
    if given["core"] is not None:
        os.sched_setaffinity(0, {given["core"]})
    from flower_blsgd import train

    folder = Path(given["folder"])
    run = {key.replace("-", "_"): value for key, value in given["run"].items()}
    train(**run, out=str(folder / "run"), quiet=True)
    result = result_of(folder / "run", given["task"], run["seed"])
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
