"""Compare finished runs: means and spread over seeds, paired differences, time to a target."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import stats

from .finished_run import FinishedEpoch, FinishedRun

_CONFIDENCE = 0.95
_ROUNDING = 1e-9
"""Accuracies that differ by less are equal but for rounding."""


@dataclass(frozen=True)
class Difference:
    """The mean difference between pairs of runs with equal seeds, and its confidence interval.

    Attributes
    ----------
    mean : float
        Of the accuracies' differences.
    pairs : int
        How many.
    interval : (float, float), optional
        95 % confidence interval of the mean; None where the pairs cannot tell it: there is only
        one, or all differ by the same, which says nothing of how much a further one would.
    """

    mean: float
    pairs: int
    interval: tuple[float, float] | None

    @property
    def shown(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def in_words(self) -> str:
        """What the pairs show."""
        if self.shown:
            return "better" if self.mean > 0 else "worse"
        return "no difference shown" + (" (one pair of runs cannot)" if self.pairs == 1 else "")


@dataclass(frozen=True)
class TimeToTarget:
    """The seconds after which runs reached an accuracy, at their first evaluated epoch with it.

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
    """Means of one algorithm over those of its seeds that have the figure; None if none has.

    Attributes
    ----------
    n : int
        How many seeds were evaluated.
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
    n: int
    accuracy: float | None
    accuracy_deviation: float | None
    training_seconds: float
    device_seconds: float | None
    fast_waiting_share: float | None
    slow_waiting_share: float | None
    to_target: TimeToTarget | None
    difference: Difference | None


@dataclass(frozen=True)
class Comparison:
    """The figures of several algorithms side by side.

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
        Why the other runs did not finish; they are in no figure.
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
        All seeds of all algorithms, in the order in which they were named; at least one, and
        none twice.
    reference : str
        One of their algorithms.
    target : float, optional
        An accuracy in (0, 1]; None for the highest that every run reached.
    failed : sequence of str
        Why other runs did not finish, a line each.
    """
    assert len({(run.algorithm, run.seed) for run in runs}) == len(runs) > 0
    aim = common_target(runs) if target is None else target
    grouped = by_algorithm(runs)
    figures = [_figures(its, grouped[reference], aim) for its in grouped.values()]
    figures.sort(key=lambda one: -math.inf if one.accuracy is None else one.accuracy, reverse=True)
    return Comparison(
        reference, aim, target is not None, tuple(figures), tuple(runs), tuple(failed)
    )


def by_algorithm(runs: Iterable[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return the runs of each algorithm, both in the order given."""
    grouped: dict[str, list[FinishedRun]] = {}
    for run in runs:
        grouped.setdefault(run.algorithm, []).append(run)
    return grouped


def common_target(runs: Iterable[FinishedRun]) -> float | None:
    """Return the highest accuracy that every run reached, down to a tenth of a point.

    None if one was never evaluated.

    Examples
    --------
    0.9833 and 0.9789 give 0.978.
    """
    lowest = 1.0
    for run in runs:
        if run.best_accuracy is None:
            return None
        lowest = min(lowest, run.best_accuracy)
    return math.floor(1000 * lowest + _ROUNDING) / 1000


def reached_at(run: FinishedRun, target: float) -> FinishedEpoch | None:
    """Return the first evaluated epoch with at least this accuracy; None if there is none.

    Not interpolated: between two evaluations nobody knows.
    """
    enough = (r for r in run.epochs if r.accuracy is not None and r.accuracy >= target - _ROUNDING)
    return next(enough, None)


def paired_difference(differences: Sequence[float]) -> Difference | None:
    """Return mean and confidence interval of differences, one per pair; None without a pair.

    The interval is Student's, for the mean of paired differences.

    Examples
    --------
    Mean 2, standard deviation 1, so 2 -+ 4.303 x 1 / sqrt(3):

    >>> found = paired_difference([1.0, 2.0, 3.0])
    >>> [round(bound, 3) for bound in found.interval], found.in_words
    ([-0.484, 4.484], 'no difference shown')
    """
    if not differences:
        return None
    pairs, mean = len(differences), fmean(differences)
    spread = stdev(differences) if pairs > 1 else 0.0
    if spread <= _ROUNDING:
        return Difference(mean, pairs, None)
    error = spread / math.sqrt(pairs)
    low, high = stats.t.interval(_CONFIDENCE, pairs - 1, loc=mean, scale=error)
    return Difference(mean, pairs, (float(low), float(high)))


def _figures(
    runs: Sequence[FinishedRun], references: Sequence[FinishedRun], target: float | None
) -> AlgorithmFigures:
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    difference = None
    if runs[0].algorithm != references[0].algorithm:
        of_reference = {run.seed: run.accuracy for run in references}
        pairs = [(run.accuracy, of_reference.get(run.seed)) for run in runs]
        difference = paired_difference(
            [own - other for own, other in pairs if own is not None and other is not None]
        )
    to_target = None
    if target is not None:
        rows = [row for row in (reached_at(run, target) for run in runs) if row is not None]
        to_target = TimeToTarget(
            reached=len(rows),
            runs=len(runs),
            training_seconds=_mean(row.training_seconds for row in rows),
            device_seconds=_mean(row.device_seconds for row in rows),
        )
    return AlgorithmFigures(
        algorithm=runs[0].algorithm,
        n=len(accuracies),
        accuracy=_mean(accuracies),
        accuracy_deviation=stdev(accuracies) if len(accuracies) > 1 else None,
        training_seconds=fmean(run.training_seconds for run in runs),
        device_seconds=_mean(run.device_seconds for run in runs),
        fast_waiting_share=_mean(run.fast_waiting_share for run in runs),
        slow_waiting_share=_mean(run.slow_waiting_share for run in runs),
        to_target=to_target,
        difference=difference,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
