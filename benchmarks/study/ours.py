"""A run of this project, for the study.

``python -m benchmarks.study.ours SETTINGS``, as JSON: ``task``, ``run`` (run config), ``folder``.
Writes ``result.json`` there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from .tasks import finished, loaded, saved


def result_of(out: Path, task: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return what a run's folder says of it, and what its models are worth."""
    summary = json.loads((out / "summary.json").read_text())
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    result = {
        "training_seconds": summary["training_seconds"],
        "samples": summary["samples"],
        "rounds": summary["rounds"],
        "accuracy_as_trained": summary["accuracy"],
        "fast_waiting_share": summary["fast_waiting_share"],
        "slow_waiting_share": summary["slow_waiting_share"],
        "local_steps": [worker["local_steps"] for worker in summary["workers"]],
        "weights": [worker["weight"] for worker in summary["workers"]],
        "evaluation_seconds": summary["evaluation_seconds"],
        "failures": len(summary["failures"]),
    }
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
    from flower_blsgd.config import RunConfig
    from flower_blsgd.parts import make_local_grid
    from flower_blsgd.run import train_on

    folder = Path(given["folder"])
    config = RunConfig.from_run_config({**given["run"], "out": str(folder / "run")})
    with make_local_grid(config) as grid:
        train_on(grid, config)
    result = result_of(folder / "run", given["task"], config.seed)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
