"""Compare finished runs: means and spread over seeds, paired differences, time to a target."""

import csv
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from ..errors import UsageError

_CONFIDENCE = 0.95
_ROUNDING = 1e-9
"""Accuracies that differ by less are equal up to rounding."""

VARIED = ("algorithm", "seed", "out", "name", "profile")
"""Settings that differ between the runs of one comparison, or do not change what is trained."""

Run = Mapping[str, Any]
"""A finished run: the content of ``summary.json`` (None where not measured), and in addition

``settings``, the content of ``config.toml``; ``rows``, the numbers in ``epochs.csv``; ``folder``,
the results folder; ``arm``, from a folder named ``<arm>-seed<n>``, else the algorithm.
"""

_NUMBERS = ("epoch", "training_seconds", "device_seconds", "accuracy", "samples")
_NEEDED = {
    *("algorithm", "seed", "task", "clock", "accuracy", "best_accuracy", "loss", "epochs"),
    *("rounds", "samples", "samples_given_up", "training_seconds", "device_seconds", "workers"),
    *("fast_waiting_share", "slow_waiting_share", "failures", "versions"),
}


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run within that of a comparison; `read_run` takes the arm from it."""
    return folder / f"{arm}-seed{seed}"


def read_run(folder: Path) -> Run | None:
    """Read a results folder; None if it holds no finished run.

    UsageError if the figures of a finished run cannot be read.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or summary.get("interrupted") is not False:
        return None
    try:
        if missing := _NEEDED - summary.keys():
            raise ValueError(f"summary.json has no {', '.join(sorted(missing))}")
        settings = tomllib.loads((folder / "config.toml").read_text())
        with (folder / "epochs.csv").open(newline="") as lines:
            rows = [
                {name: float(row[name]) if row[name] else None for name in _NUMBERS}
                for row in csv.DictReader(lines)
            ]
    except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise UsageError(f"the run in {folder} cannot be read: {reason}") from None
    named = re.fullmatch(r"(.+)-seed\d+", folder.name)
    arm = named[1] if named else summary["algorithm"]
    return {**summary, "settings": settings, "rows": rows, "arm": arm, "folder": folder}


@dataclass(frozen=True)
class Difference:
    """Mean difference between pairs of runs with equal seeds, and its confidence interval.

    Attributes
    ----------
    mean : float
        Mean of the differences in accuracy.
    pairs : int
        Number of pairs.
    half_width : float, optional
        Half of the 95 % confidence interval of the mean. None with one pair, or if all pairs
        differ by the same: then the spread of further pairs is unknown.
    """

    mean: float
    pairs: int
    half_width: float | None

    @property
    def shown(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    @property
    def in_words(self) -> str:
        """``"better"``, ``"worse"`` or ``"no difference shown"``."""
        if self.shown:
            return "better" if self.mean > 0 else "worse"
        return "no difference shown" + (" (needs two seeds)" if self.pairs == 1 else "")

    def text(self, sign: int = 1) -> str:
        """Return ``"+0.28 ± 0.58"``, in points; with `sign` -1 the opposite difference."""
        half = "" if self.half_width is None else f" ± {100 * self.half_width:.2f}"
        return f"{sign * 100 * self.mean:+z.2f}{half}"


@dataclass(frozen=True)
class AlgorithmFigures:
    """The runs of one algorithm, or of another arm, and their figures.

    Attributes
    ----------
    algorithm : str
        Name of the algorithm or the arm.
    runs : list of Run
        One run for each seed.
    reached : list of mappings
        For each run that reached the target accuracy, the first evaluated epoch that did.
    difference : Difference, optional
        Accuracy minus that of the reference, over the seeds that both have; None for the
        reference itself, and without common seeds.
    """

    algorithm: str
    runs: list[Run]
    reached: list[Mapping[str, Any]]
    difference: Difference | None

    @property
    def accuracies(self) -> list[float]:
        """Final accuracies of the runs that were evaluated, in [0, 1]."""
        return [run["accuracy"] for run in self.runs if run["accuracy"] is not None]

    @property
    def accuracy(self) -> float | None:
        """Mean of the final accuracies; None if no run was evaluated."""
        return known_mean(self.accuracies)

    @property
    def accuracy_deviation(self) -> float | None:
        """Sample standard deviation of the final accuracies; None for fewer than two."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure of ``summary.json`` over the runs that have it."""
        return known_mean(run[figure] for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """Figures of several algorithms.

    Attributes
    ----------
    reference : str
        Algorithm that the others are compared with.
    target : float, optional
        Accuracy whose time is compared; None if a run was never evaluated.
    target_given : bool
        Whether the user chose the target; else it is the highest that every run reached.
    algorithms : tuple of AlgorithmFigures
        By mean accuracy, the highest first; ties in the given order.
    failed : tuple of str
        One line for each run without figures: why it failed or cannot be used.
    """

    reference: str
    target: float | None
    target_given: bool
    algorithms: tuple[AlgorithmFigures, ...]
    failed: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """The runs of all algorithms, in their order, by seed."""
        return [run for one in self.algorithms for run in one.runs]


def compare_runs(
    runs: Sequence[Run],
    reference: str,
    target: float | None = None,
    failed: Iterable[str] = (),
) -> Comparison:
    """Compare finished runs of several algorithms, or other arms.

    Parameters
    ----------
    runs : sequence of Run
        At least one, each arm and seed once; ties in accuracy keep this order.
    reference : str
        Arm that the others are compared with.
    target : float, optional
        Accuracy in (0, 1]. The default is the highest that every run reached, rounded down to a
        tenth of a point: 0.9833 and 0.9789 give 0.978.
    failed : iterable of str
        Why other runs have no figures, one line each.
    """
    aim, best = target, [run["best_accuracy"] for run in runs]
    if aim is None and None not in best:
        aim = math.floor(1000 * min(best) + _ROUNDING) / 1000
    of_reference = {run["seed"]: run["accuracy"] for run in runs if run["arm"] == reference}
    algorithms = []
    for name in dict.fromkeys(run["arm"] for run in runs):
        of_name = [run for run in runs if run["arm"] == name]
        its = sorted(of_name, key=lambda run: int(run["seed"]))
        reached = [] if aim is None else [row for run in its if (row := reached_at(run, aim))]
        pairs = [(run["accuracy"], of_reference.get(run["seed"])) for run in its]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        found = paired_difference(differences if name != reference else [])
        algorithms.append(AlgorithmFigures(name, its, reached, found))
    algorithms.sort(key=lambda one: -1.0 if one.accuracy is None else one.accuracy, reverse=True)
    return Comparison(reference, aim, target is not None, tuple(algorithms), tuple(failed))


def reached_at(run: Run, target: float) -> Mapping[str, Any] | None:
    """Return the first evaluated epoch with at least this accuracy; None without one.

    Nothing is interpolated between evaluations.
    """
    evaluated = (row for row in run["rows"] if row["accuracy"] is not None)
    return next((row for row in evaluated if row["accuracy"] >= target - _ROUNDING), None)


def paired_difference(differences: Sequence[float]) -> Difference | None:
    """Return mean and Student's confidence interval of paired differences; None without a pair.

    Examples
    --------
    Mean 2, standard deviation 1, so 2 -+ 4.303 x 1 / sqrt(3):

    >>> found = paired_difference([1.0, 2.0, 3.0])
    >>> round(found.half_width, 3), found.in_words
    (2.484, 'no difference shown')
    """
    if not differences:
        return None
    pairs, mean = len(differences), fmean(differences)
    spread = stdev(differences) if pairs > 1 else 0.0
    if spread <= _ROUNDING:
        return Difference(mean, pairs, None)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, pairs - 1))
    return Difference(mean, pairs, quantile * spread / math.sqrt(pairs))


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without one."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
