"""Compare runs of several algorithms: means and spread over seeds, time to a target."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ..errors import UsageError, nearest
from .finished_run import FinishedEpoch, FinishedRun
from .paired_difference import Difference, paired_difference

_TENTH_OF_A_POINT = 1e-3
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TimeToTarget:
    """When runs reached an accuracy: at their first evaluated epoch that has it.

    Attributes
    ----------
    reached, runs : int
        How many did, of how many.
    training_seconds, device_seconds : float, optional
        Mean over those that did and whose seconds are known.
    """

    reached: int
    runs: int
    training_seconds: float | None
    device_seconds: float | None


@dataclass(frozen=True)
class AlgorithmFigures:
    """One algorithm: means over its seeds, as far as they have the figure, else None.

    Attributes
    ----------
    seeds : tuple of int
        In order.
    accuracy, accuracy_deviation : float, optional
        Mean and sample standard deviation of the final accuracy over `n` seeds; no deviation
        of less than two.
    to_target : TimeToTarget, optional
        None if there is no target.
    difference : Difference, optional
        Accuracy minus that of the reference, over the seeds that both have; None for the
        reference itself, and without such seeds.
    """

    algorithm: str
    seeds: tuple[int, ...]
    n: int
    accuracy: float | None
    accuracy_deviation: float | None
    training_seconds: float
    device_seconds: float | None
    samples: float
    rounds: float
    fast_waiting_share: float | None
    slow_waiting_share: float | None
    to_target: TimeToTarget | None
    difference: Difference | None


@dataclass(frozen=True)
class Comparison:
    """Algorithms side by side.

    Attributes
    ----------
    reference : str
        The algorithm that the others are compared with.
    target : float, optional
        The accuracy whose time is asked for; None if no run was evaluated.
    target_given : bool
        Whether the user chose it; else it is the highest that every run reached.
    algorithms : tuple of AlgorithmFigures
        The highest mean accuracy first; of equal ones that which was named first.
    runs : tuple of FinishedRun
        As given.
    failed : tuple of str
        What became of the runs that did not finish; they are in no figure.
    """

    reference: str
    target: float | None
    target_given: bool
    algorithms: tuple[AlgorithmFigures, ...]
    runs: tuple[FinishedRun, ...]
    failed: tuple[str, ...] = ()


def compare(
    runs: Sequence[FinishedRun],
    reference: str,
    target: float | None = None,
    failed: Sequence[str] = (),
) -> Comparison:
    """Compare runs.

    Parameters
    ----------
    runs : sequence of FinishedRun
        All seeds of all algorithms, in the order in which they were named.
    reference : str
        One of their algorithms.
    target : float, optional
        An accuracy in (0, 1]; None for the highest that every run reached.
    failed : sequence of str
        What became of runs that did not finish, a line each.

    Raises
    ------
    UsageError
        If there is no run, two are of one algorithm and seed, none is of the reference, or the
        target is no accuracy.
    """
    _check(runs, reference, target)
    aim = common_target(runs) if target is None else target
    by_algorithm: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_algorithm.setdefault(run.algorithm, []).append(run)
    figures = [_figures(of_one, by_algorithm[reference], aim) for of_one in by_algorithm.values()]
    figures.sort(key=lambda one: -math.inf if one.accuracy is None else one.accuracy, reverse=True)
    return Comparison(
        reference, aim, target is not None, tuple(figures), tuple(runs), tuple(failed)
    )


def common_target(runs: Iterable[FinishedRun]) -> float | None:
    """Return the highest accuracy that every run reached, down to a tenth of a point.

    None if one was never evaluated.

    Examples
    --------
    0.9833 and 0.9789 give 0.978.
    """
    bests = [run.best_accuracy for run in runs]
    known = [best for best in bests if best is not None]
    if not known or len(known) < len(bests):
        return None
    return round(math.floor(min(known) / _TENTH_OF_A_POINT + _ROUNDING) * _TENTH_OF_A_POINT, 3)


def reached_at(run: FinishedRun, target: float) -> FinishedEpoch | None:
    """Return the first evaluated epoch with at least this accuracy; None if there is none.

    Not interpolated: between two evaluations nobody knows.
    """
    for row in run.epochs:
        if row.accuracy is not None and row.accuracy >= target - _ROUNDING:
            return row
    return None


def _figures(
    runs: Sequence[FinishedRun], references: Sequence[FinishedRun], target: float | None
) -> AlgorithmFigures:
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    algorithm = runs[0].algorithm
    difference = None
    if algorithm != references[0].algorithm:
        difference = paired_difference(_differences(runs, references))
    return AlgorithmFigures(
        algorithm=algorithm,
        seeds=tuple(sorted(run.seed for run in runs)),
        n=len(accuracies),
        accuracy=_mean(accuracies),
        accuracy_deviation=stdev(accuracies) if len(accuracies) > 1 else None,
        training_seconds=fmean(run.training_seconds for run in runs),
        device_seconds=_mean_of(runs, lambda run: run.device_seconds),
        samples=fmean(run.samples for run in runs),
        rounds=fmean(run.rounds for run in runs),
        fast_waiting_share=_mean_of(runs, lambda run: run.fast_waiting_share),
        slow_waiting_share=_mean_of(runs, lambda run: run.slow_waiting_share),
        to_target=None if target is None else _time_to(runs, target),
        difference=difference,
    )


def _differences(runs: Sequence[FinishedRun], references: Sequence[FinishedRun]) -> list[float]:
    of_reference = {run.seed: run.accuracy for run in references}
    found = []
    for run in runs:
        other = of_reference.get(run.seed)
        if run.accuracy is not None and other is not None:
            found.append(run.accuracy - other)
    return found


def _time_to(runs: Sequence[FinishedRun], target: float) -> TimeToTarget:
    rows = [row for row in (reached_at(run, target) for run in runs) if row is not None]
    return TimeToTarget(
        reached=len(rows),
        runs=len(runs),
        training_seconds=_mean([row.training_seconds for row in rows]),
        device_seconds=_mean([r.device_seconds for r in rows if r.device_seconds is not None]),
    )


def _mean_of(
    runs: Sequence[FinishedRun], figure: Callable[[FinishedRun], float | None]
) -> float | None:
    return _mean([value for value in map(figure, runs) if value is not None])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _check(runs: Sequence[FinishedRun], reference: str, target: float | None) -> None:
    if not runs:
        raise UsageError("there is no run to compare")
    seen: set[tuple[str, int]] = set()
    for run in runs:
        if (run.algorithm, run.seed) in seen:
            raise UsageError(f"two runs are of {run.algorithm} with seed {run.seed}; leave one out")
        seen.add((run.algorithm, run.seed))
    names = {run.algorithm for run in runs}
    if reference not in names:
        raise UsageError(f"reference = {reference!r}: no run is of it; {nearest(reference, names)}")
    if target is not None and not 0 < target <= 1:
        raise UsageError(f"target = {target} must be an accuracy above 0 and at most 1")
