"""How long the paper's runs would take on its devices, by the cost model: devices not at hand.

Three of its rows differ only in how often models are averaged and in who trains: they give seconds
of a step and of a communication, and the cost model of ``blsgd plan`` those of every algorithm.
"""

from dataclasses import dataclass

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.experiments.plan import plan_runs
from flower_blsgd.grids.worker_spec import WorkerSpec
from flower_blsgd.paper.printed import printed
from flower_blsgd.strategy.cost_model import Prediction

_NUM_SAMPLES = {"cifar10": 50_000, "flowers102": 7_169, "cifar100": 50_000}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a fast worker's step, of a slow one's, and of a round beside computing."""

    fast: float
    slow: float
    communication: float


def refitted_times(dataset: str) -> StepTimes:
    """Return the times that give three of the paper's rows with 2 CPUs and 8 GPUs exactly.

    With the steps s of a slow worker and f of a fast one, and c for each communication, of which
    synchronous SGD has K, balanced local SGD R (of tau steps each, so that R tau = K) and
    synchronous SGD on the fast workers alone K_f::

        T_sync = K (s + c)    T_balanced = K s + R c    T_fast = K_f (f + c)
        c = (T_sync - T_balanced) / (K - R)    s = T_sync / K - c    f = T_fast / K_f - c

    The slow worker is the slower one, and c is the same with 8 workers as with 10. The paper
    prints times of the data sets cifar10, flowers102 and cifar100.
    """
    of = {
        row["algorithm"]: (
            float(row["wall_clock_s"]),
            int(row["epochs"]) * int(row["comm_per_epoch"]),
        )
        for row in printed("comparison_2c8g")
        if row["dataset"] == dataset
    }
    sync, count = of["sync-sgd"]
    balanced, few = of["balanced-local-sgd"]
    fast, fast_count = of["sync-sgd-fast-only"]
    communication = (sync - balanced) / (count - few)
    return StepTimes(fast / fast_count - communication, sync / count - communication, communication)


def refitted_epoch_seconds(dataset: str) -> dict[str, float]:
    """Return the seconds of an epoch on the paper's devices, by algorithm of the catalog.

    A round lasts ``max_i tau_i s_i + c``, with (tau_fast, tau_slow) = (32, 1) where an algorithm
    has unequal steps, and an epoch has as many rounds as the paper's table counts. Times the
    epochs of a printed row this is what its seconds would be.
    """
    times = refitted_times(dataset)
    (row,) = (
        row
        for row in printed("hyperparameters")
        if (row["setting"], row["dataset"]) == ("2c8g", dataset)
    )
    size = int(row["batch_size"])
    config = RunConfig(epoch="table", batch_size=size, local_steps_fast=32, local_steps_slow=1)
    workers = [WorkerSpec("cuda", tier="fast", seconds_per_step=times.fast)] * 8
    workers += [WorkerSpec("cpu", tier="slow", seconds_per_step=times.slow)] * 2
    plan = plan_runs(config, workers, _NUM_SAMPLES[dataset], tuple(ALGORITHMS), times.communication)
    found = plan.expected.items()
    return {name: each.epoch_seconds for name, each in found if isinstance(each, Prediction)}
