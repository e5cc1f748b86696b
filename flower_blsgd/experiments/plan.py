"""What to expect of every algorithm on given workers, before any training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..algorithm.catalog import ALGORITHMS
from ..config import RunConfig
from ..errors import UsageError
from ..roster import Worker
from ..run import make_strategy, team_of
from ..runtime.devices import WorkerSpec
from ..worker.profile import profile_of
from .cost_model import Prediction, Speed, ceiling
from .run_prediction import predict_run


@dataclass(frozen=True)
class PlanRow:
    """One algorithm.

    Parameters
    ----------
    algorithm : str
        Its name.
    workers : tuple of Worker
        Those that train.
    prediction : Prediction, optional
        None if it is refused.
    refusal : str
        Why, in one line.
    """

    algorithm: str
    workers: tuple[Worker, ...] = ()
    prediction: Prediction | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Plan:
    """What to expect.

    Parameters
    ----------
    workers : tuple of Worker
        All workers, with tier and speed ratio.
    rows : tuple of PlanRow
        In the order asked for.
    ceiling : float, optional
        How much more all workers can do than the fast ones alone, at best.
    num_samples : int
        N.
    """

    workers: tuple[Worker, ...]
    rows: tuple[PlanRow, ...]
    ceiling: float | None
    num_samples: int


def plan_runs(
    config: RunConfig,
    workers: Sequence[WorkerSpec],
    num_samples: int,
    algorithms: Sequence[str] = tuple(ALGORITHMS),
    overhead_seconds: float = 0.0,
) -> Plan:
    """Plan runs of several algorithms.

    Parameters
    ----------
    config : RunConfig
        The settings; each algorithm in turn takes the place of its own.
    workers : sequence of WorkerSpec
        All with seconds per step.
    num_samples : int
        N.
    algorithms : sequence of str
        Names of the catalog.
    overhead_seconds : float (default: 0)
        Of one round.

    Raises
    ------
    UsageError
        If the speed of a worker is not known.
    """
    silent = [w.device_with_cores for w in workers if w.seconds_per_step is None]
    if silent:
        raise UsageError(
            f"the speed of {silent[0]} is not known; measure with blsgd calibrate, or write "
            "seconds-per-step= behind every worker"
        )
    profiles = [profile_of(worker, place) for place, worker in enumerate(workers)]
    team = tuple(team_of(profiles, config).workers)
    rows = tuple(
        _row(replace(config, algorithm=name), team, num_samples, overhead_seconds)
        for name in algorithms
    )
    speeds = [Speed(w.profile.seconds_per_step, w.fast) for w in team]
    return Plan(team, rows, ceiling(speeds), num_samples)


def _row(
    config: RunConfig, team: Sequence[Worker], num_samples: int, overhead_seconds: float
) -> PlanRow:
    try:
        strategy = make_strategy(config, num_samples, len(team))
        prediction = predict_run(strategy, team, overhead_seconds)
    except UsageError as error:
        return PlanRow(config.algorithm, refusal=str(error))
    return PlanRow(config.algorithm, tuple(strategy.planner.training(team)), prediction)
