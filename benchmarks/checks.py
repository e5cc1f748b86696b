"""What checks and checkpoints cost while CIFAR-10 is trained.

``python -m benchmarks.checks``: biased local SGD of ResNet8 on a fast core and one slowed twice,
with timers around everything that checks a reply, a sample list, an order or momentum, and around
making a checkpoint, on the thread that trains. Shares are of the run's training time; what the
disk does in a thread of its own is not in it, as training does not wait for it.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flower_blsgd.algorithm import epoch_plan
from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import TrainOrder, TrainReport
from flower_blsgd.run import make_local_grid, train_on
from flower_blsgd.strategy import averaging
from flower_blsgd.strategy.replies import ModelShape
from flower_blsgd.worker import local_sgd

from .images import add_data_option, data_text, found_images
from .rows import Measured, conditions, parser, row, with_goal, write

WORKERS = "1x cpu:0 fast; 1x cpu:1 slow slowdown=2"
GOAL_PERCENT = 2.0


def measure(data: Path | None, images: int, epochs: int) -> Measured:
    """Train once, with timers in this process and in both workers."""
    settings: dict[str, Any] = {
        "task": "benchmarks.images:some_images",
        "data": data_text(images, data),
        "model": "resnet8",
        "workers": WORKERS,
        "batch-size": 32,
        "local-steps-slow": 16,
        "epochs": epochs,
    }
    with tempfile.TemporaryDirectory() as folder:
        seconds: dict[str, float] = {}
        for owner, name in _OF_SERVER:
            _time(owner, name, lambda key, spent: seconds.update({key: seconds[key] + spent}))
            seconds[name] = 0.0
        config = RunConfig.from_run_config({**settings, "out": f"{folder}/run"})
        with make_local_grid(config, functools.partial(time_worker, folder)) as grid:
            summary = train_on(grid, config).summary
        training = summary["training_seconds"]
        workers = [
            sum(map(float, file.read_text().split())) for file in Path(folder).glob("worker-*")
        ]
    costs = {
        "checks on the server": sum(seconds.values()),
        "checkpoints": summary["checkpoint_seconds"],
        "checks on the worker with the most": max(workers),
    }
    costs["all of it"] = sum(costs.values())
    rows = [row(name, [100 * cost / training], "% of training") for name, cost in costs.items()]
    rows[-1] = with_goal(rows[-1], at_most=GOAL_PERCENT)
    shown = {key: value for key, value in settings.items() if key != "data"}
    return rows, conditions(
        images=f"{images} of {'CIFAR-10' if data else 'made-up ones'}",
        training_seconds=training,
        rounds=summary["rounds"],
        settings=shown,
        seed=0,
    )


_OF_SERVER: tuple[tuple[Any, str], ...] = (
    (epoch_plan, "checked_lists"),
    (averaging, "checked_weights"),
    (TrainReport, "from_content"),
    (ModelShape, "checked"),
    (ModelShape, "checked_momentum"),
)


def time_worker(folder: str) -> None:
    """Time a worker's checks; each adds a line to a file of its process."""

    def note(name: str, spent: float) -> None:
        with open(f"{folder}/worker-{os.getpid()}", "a") as file:
            print(spent, file=file)

    _time(local_sgd, "momentum_is_finite", note)
    _time(TrainOrder, "from_content", note)


def _time(owner: Any, name: str, note: Callable[[str, float], object]) -> None:
    held = vars(owner)[name]
    inner = held.__func__ if isinstance(held, classmethod) else held

    @functools.wraps(inner)
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*arguments, **named)
        finally:
            note(name, time.perf_counter() - began)

    setattr(owner, name, classmethod(timed) if isinstance(held, classmethod) else timed)


if __name__ == "__main__":
    line = parser(__doc__)
    add_data_option(line)
    chosen = line.parse_args()
    size, number = (2_048, 2) if chosen.quick else (50_000, 3)
    write(*measure(found_images(chosen.data), size, number), chosen.json)
