"""Finished runs made by hand."""

from collections.abc import Sequence
from typing import Any

from flower_blsgd.algorithm.catalog import ALGORITHMS as CATALOG
from flower_blsgd.experiments.comparison import Run
from flower_blsgd.results.metric import Metric

ALGORITHMS = tuple(CATALOG)


def workers(*local_steps: int) -> list[dict[str, object]]:
    """Return a fast worker, and a slow one where a second number is given."""
    rows = zip(("cpu:0", "cpu:1"), ("fast", "slow"), local_steps, strict=False)
    return [{"device": d, "tier": tier, "local_steps": steps} for d, tier, steps in rows]


def made_run(
    algorithm: str = "biased-local-sgd",
    seed: int = 0,
    accuracies: Sequence[float | None] = (0.5, 0.9),
    seconds_per_epoch: float = 2.0,
    device_seconds_per_epoch: float | None = None,
    **values: Any,
) -> Run:
    """Return a run that was evaluated after every epoch; None is an epoch that was not.

    With another `metric_name` the accuracies are values of that metric.
    """
    device = device_seconds_per_epoch
    metric = Metric.of(values)
    shown = [None if value is None else metric.scale * value for value in accuracies]
    known = [value for value in accuracies if value is not None]
    best = (min if metric.sign < 0 else max)(known, default=None)
    rows = [
        {
            "epoch": float(number),
            "training_seconds": seconds_per_epoch * number,
            "device_seconds": None if device is None else device * number,
            "value": value,
            "samples": 1000.0 * number / len(accuracies),
        }
        for number, value in enumerate(shown, start=1)
    ]
    return {
        "algorithm": algorithm,
        "arm": algorithm,
        "seed": seed,
        "rows": rows,
        "task": "digits",
        **metric.columns(accuracies[-1]),
        **metric.columns(best, "best_"),
        **metric.description,
        "value": shown[-1],
        "best_value": None if best is None else metric.scale * best,
        "loss": 0.25,
        "training_seconds": rows[-1]["training_seconds"],
        "device_seconds": rows[-1]["device_seconds"],
        "clock": "wall",
        "samples": 1000,
        "samples_given_up": 0,
        "rounds": 10,
        "epochs": len(rows),
        "fast_waiting_share": 0.25,
        "slow_waiting_share": 0.125,
        "failures": [],
        "workers": workers(32, 8),
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "settings": {"epochs": len(rows), "batch-size": 8, "model": "", "out": "/tmp/x"},
        **values,
    }


def several(algorithms: Sequence[str], seeds: int = 3, **values: object) -> list[Run]:
    """Return runs whose accuracies fall in the order of the algorithms, and rise with the seed."""
    runs = []
    for rank, algorithm in enumerate(algorithms):
        for seed in range(seeds):
            final = 0.99 - 0.002 * rank + 0.001 * seed
            rises = [final - 0.3, final - 0.05, final]
            runs.append(made_run(algorithm, seed, rises, 1 + 0.2 * rank, **values))  # type: ignore[arg-type]
    return runs
