r"""What a round costs besides its steps, in CPU time: of the workers, and of the server.

``python -m benchmarks.round_cost``: two workers on one core each train resnet8 on made-up images,
with the same number of steps in many short rounds and in a few long ones. The CPU time of a process
is a number of steps times the time of a step, plus a number of rounds times what a round costs;
two kinds of runs give both. The unit of a row is a step of this model on the fast worker.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from flower_blsgd import Task
from flower_blsgd.config import RunConfig
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.models.resnets import resnet8
from flower_blsgd.parts import make_local_grid
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.run import train_on
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord

from .rows import Measured, conditions, main, row, with_goal

BATCH, SHORT, LONG = 32, (2, 1), (32, 16)
WARM_UP_ROUNDS = 10
TICKS = os.sysconf("SC_CLK_TCK")


def made_up() -> Task:
    """Return images of the size of CIFAR-10."""
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.rand(4096, 3, 32, 32, generator=draw), torch.arange(4096) % 10
    return Task(resnet8, (images, labels), (images[:32], labels[:32]))


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process so far, in steps of 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def so_far(grid: LocalGrid) -> list[float]:
    """Return the CPU seconds of the fast worker, the slow worker and this process, the server."""
    workers = [node._process.pid for node in grid._nodes.values() if node._process]
    return [cpu_seconds(process) for process in [*workers, os.getpid()]]


def spent(steps: Sequence[int], rounds: int, **settings: int | float | str) -> list[float]:
    """Return what the processes of `so_far` spend in so many rounds, after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.from_run_config(
            {
                "task": "benchmarks.round_cost:made_up",
                "algorithm": "weighted-local-sgd",
                "workers": "1x cpu:0 fast; 1x cpu:1 slow",
                "batch-size": BATCH,
                "local-steps-fast": steps[0],
                "local-steps-slow": steps[1],
                "rounds": rounds + WARM_UP_ROUNDS,
                "epochs": 1_000_000,
                "evaluate-every-epochs": 1_000_000,
                "checkpoint-minutes": 1e6,
                "threads": 1,
                "out": f"{folder}/run",
                **settings,
            }
        )
        readings = []

        def read(record: RoundRecord) -> None:
            if record.round in (WARM_UP_ROUNDS, rounds + WARM_UP_ROUNDS):
                readings.append(so_far(grid))

        view = ProgressView(Budget.of_run(config), lines=False, on_round_end=read)
        with make_local_grid(config) as grid:
            train_on(grid, config, view)
        before, after = readings
        return [end - start for start, end in zip(before, after, strict=True)]


def measure(quick: bool) -> Measured:
    """Solve for the time of a step and of a round, once per pair of runs."""
    rounds, pairs = (160, 1) if quick else (800, 5)
    few = rounds * SHORT[0] // LONG[0]
    step_seconds, of_rounds = [], []
    for _ in range(pairs):
        short, long = np.array(spent(SHORT, rounds)), np.array(spent(LONG, few))
        each = (short - long) / (rounds - few)  # of a round: both have the same number of steps
        step_seconds.append(float(long[0] - few * each[0]) / (few * LONG[0]))
        of_rounds.append(each)
    fast, slow, server = (
        [float(each[i]) / step for each, step in zip(of_rounds, step_seconds, strict=True)]
        for i in range(3)
    )
    rows = [
        row(f"a step of batch {BATCH}, fast worker", step_seconds, "s"),
        with_goal(row("a round besides its steps, fast worker", fast, "steps"), at_most=0.07),
        row("a round besides its steps, slow worker", slow, "steps"),
        row("a round, server", server, "steps"),
    ]
    return rows, conditions(steps=[SHORT, LONG], rounds=rounds, pairs=pairs)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.WARNING)
    main(measure, __doc__)
