"""Compare finished runs: means and spread over seeds, paired differences, time to a target."""

import csv
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from scipy import stats

from ..errors import UsageError
from ..results.metric import ACCURACY, Metric, value_in
from ..results.tables import counted
from ..strategy.budget import Budget

_CONFIDENCE = 0.95
_ROUNDING = 1e-9
"""Share of a value, or of its last decimal place, that is rounding."""

SETTINGS = "comparison.toml"
"""File with the common settings of the runs of a comparison, which only its folder has."""

VARIED = ("algorithm", "seed", "out", "name")
"""Settings that differ between the runs of one comparison, or do not change what is trained."""

Run = Mapping[str, Any]
"""A finished run: the content of ``summary.json`` (None where not measured), and in addition

``settings``, the content of ``config.toml``; ``rows``, the numbers in ``epochs.csv``; ``folder``,
the results folder; ``arm``, from a folder named ``<arm>-seed<n>``, else the algorithm; ``value``
and ``best_value``, the final and the best figure of the metric. These two and the ``value`` of a
row are in percent if the metric is the accuracy.
"""

_NUMBERS = ("epoch", "training_seconds", "device_seconds", "samples")
_NEEDED = {
    *("algorithm", "seed", "task", "clock", "accuracy", "best_accuracy", "loss", "epochs"),
    *("metric", "best_metric", "metric_name", "metric_mode", "versions", "failures", "workers"),
    *("rounds", "samples", "samples_given_up", "training_seconds", "device_seconds"),
    *("fast_waiting_share", "slow_waiting_share"),
}


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run within that of a comparison; `read_run` takes the arm from it."""
    return folder / f"{arm}-seed{seed}"


def read_run(folder: Path) -> Run | None:
    """Read a results folder; None if it holds no finished run.

    UsageError if the figures of a finished run cannot be read.
    """
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or summary.get("interrupted") is not False:
        return None
    try:
        if missing := _NEEDED - summary.keys():
            raise ValueError(f"summary.json has no {', '.join(sorted(missing))}")
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8-sig"))
        scale = Metric.of(summary).scale
        with (folder / "epochs.csv").open(newline="") as lines:
            rows = [
                {**{k: number(row[k]) for k in _NUMBERS}, "value": number(value_in(row), scale)}
                for row in csv.DictReader(lines)
            ]
        final, best = (number(value_in(summary, prefix), scale) for prefix in ("", "best_"))
    except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise UsageError(f"the run in {folder} cannot be read: {reason}") from None
    named = re.fullmatch(r"(.+)-seed\d+", folder.name)
    arm = named[1] if named else summary["algorithm"]
    own = {"settings": settings, "rows": rows, "arm": arm, "folder": folder}
    return {**summary, **own, "value": final, "best_value": best}


def number(value: Any, scale: float = 1) -> float | None:
    """Return a number of a file times the scale; None if it was not measured."""
    return None if value in (None, "") else scale * float(value)


def metric_of(run: Run) -> Metric:
    """Return the metric that a run was measured by."""
    return Metric.of(run, run["settings"].get("validation-share", 0))


@dataclass(frozen=True)
class Difference:
    """Mean difference between pairs of runs with equal seeds, and its confidence interval.

    The mean of accuracies is in points. `half_width` is half of the 95 % confidence interval of the
    mean. None with one pair, or if all pairs differ by the same: then the spread of further pairs
    is unknown. `metric` decides which sign is better.
    """

    mean: float
    pairs: int
    half_width: float | None
    metric: Metric = ACCURACY

    @property
    def shown(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    @property
    def in_words(self) -> str:
        """``"better"``, ``"worse"`` or ``"no difference shown"``."""
        if self.shown:
            return "better" if self.metric.sign * self.mean > 0 else "worse"
        return "no difference shown" + (" (needs two seeds)" if self.pairs == 1 else "")

    @property
    def text(self) -> str:
        """``"+0.28 ± 0.58"``."""
        return self.metric.text(self.mean, self.half_width, "+")


@dataclass(frozen=True)
class AlgorithmFigures:
    """The runs of one algorithm, or of another arm, and their figures.

    There is one run for each seed. `reached` has, for each run that reached the target, the first
    evaluated epoch that did. `difference` is the value minus that of the reference, over the seeds
    that both have; None for the reference itself, and without common seeds.
    """

    algorithm: str
    runs: list[Run]
    reached: list[Mapping[str, Any]]
    difference: Difference | None

    @property
    def values(self) -> list[float]:
        """Final values of the runs that were evaluated; accuracies in percent."""
        return [run["value"] for run in self.runs if run["value"] is not None]

    @property
    def value(self) -> float | None:
        """Mean of the final values; None if no run was evaluated."""
        return known_mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation of the final values; None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    def text(self, metric: Metric) -> str:
        """Return ``"98.33 ± 0.28"``, an accuracy in percent."""
        return "not measured" if self.value is None else metric.text(self.value, self.deviation)

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure of ``summary.json`` over the runs that have it."""
        return known_mean(run[figure] for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """Figures of several algorithms.

    `target` is the value whose time is compared, an accuracy in percent: with `target_given` that
    of the user, else the best that every run reached, or None if a run was never evaluated.
    `algorithms` are sorted by mean value, the best first. `failed` has one line for each run
    without figures: why it failed or cannot be used.
    """

    reference: str
    target: float | None
    target_given: bool
    algorithms: tuple[AlgorithmFigures, ...]
    failed: tuple[str, ...] = ()
    metric: Metric = ACCURACY

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

    Runs with another metric than the reference are left out, and named in `Comparison.failed`,
    after `failed`; so are runs without a final value, whose best one and times count. `runs` has at
    least one run, and no arm and seed twice; ties keep this order. `target` is an accuracy in (0,
    1], or a value of another metric. The default is the best that every run reached, rounded to the
    worse side, to one decimal place less than is shown: accuracies of 98.33 and 97.89 % give 97.8
    %.
    """
    metric = metric_of(next((run for run in runs if run["arm"] == reference), runs[0]))
    others = [run for run in runs if replace(metric_of(run), split=metric.split) != metric]
    why = "{arm}, seed {seed}: its metric is {metric_name} ({metric_mode}), not that of {reference}"
    failed = (*failed, *(why.format(**run, reference=reference) for run in others))
    runs = [run for run in runs if run not in others]
    diverged = [r for r in runs if r["value"] is None and r["best_value"] is not None]
    why = "{arm}, seed {seed}: its final {metric_name} is missing or not a number"
    failed = (*failed, *(why.format(**run) for run in diverged))
    sizes = [abs(run["value"]) for run in runs if run["value"]]
    if sizes and not metric.is_accuracy:
        metric = replace(metric, decimals=3 - math.floor(math.log10(median(sizes))))
    sign, bests = metric.sign, [run["best_value"] for run in runs]
    aim = 100 * target if target is not None and metric.is_accuracy else target
    if aim is None and None not in bests:
        scale = 10.0 ** (metric.decimals - 1)
        aim = sign * math.floor(min(sign * best for best in bests) * scale + _ROUNDING) / scale
    of_reference = {run["seed"]: run["value"] for run in runs if run["arm"] == reference}
    algorithms = []
    for name in dict.fromkeys(run["arm"] for run in runs):
        of_name = [run for run in runs if run["arm"] == name]
        its = sorted(of_name, key=lambda run: int(run["seed"]))
        reached = [] if aim is None else [row for run in its if (row := reached_at(run, aim))]
        pairs = [(run["value"], of_reference.get(run["seed"])) for run in its]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        found = paired_difference(differences if name != reference else [], metric)
        algorithms.append(AlgorithmFigures(name, its, reached, found))
    algorithms.sort(key=lambda one: math.inf if one.value is None else -sign * one.value)
    return Comparison(reference, aim, target is not None, tuple(algorithms), failed, metric)


def headline(runs: Sequence[Run]) -> str:
    """Return task, budget and seeds: ``"digits, 15 epochs, 3 seeds"``."""
    settings, seeds = runs[0]["settings"], {run["seed"] for run in runs}
    epochs = [run["settings"].get("epochs", 0) for run in runs]
    if seconds := settings.get("seconds"):
        simulated = runs[0]["clock"] == "device"
        budget = f"{seconds:g} s {'on simulated devices' if simulated else 'of training'}"
    elif settings.get("rounds") or settings.get("samples"):
        budget = str(Budget(max(epochs), 0, settings.get("rounds", 0), settings.get("samples", 0)))
    else:
        least = f"{min(epochs)} to " if min(epochs) < max(epochs) else ""
        budget = least + counted(max(epochs), "epoch")
    number = f"seed {seeds.pop()}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return f"{runs[0]['task']}, {budget}, {number}"


def reached_at(run: Run, target: float) -> Mapping[str, Any] | None:
    """Return the first evaluated epoch that is at least as good as the target; None without one.

    Nothing is interpolated between evaluations. An accuracy is in percent.
    """
    sign, slack = metric_of(run).sign, _ROUNDING * abs(target)
    evaluated = (row for row in run["rows"] if row["value"] is not None)
    return next((row for row in evaluated if sign * (row["value"] - target) >= -slack), None)


def paired_difference(differences: Sequence[float], metric: Metric = ACCURACY) -> Difference | None:
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
    if spread <= _ROUNDING / 10.0**metric.decimals:
        return Difference(mean, pairs, None, metric)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, pairs - 1))
    return Difference(mean, pairs, quantile * spread / math.sqrt(pairs), metric)


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without one."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
