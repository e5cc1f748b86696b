"""Write a reproduction: what was measured of its cells beside what the paper printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..results.folder import written_whole
from .compare import Arm
from .comparison import AlgorithmFigures, Comparison, Run, known_mean
from .comparison_report import accuracy_name, csv_of, percent, verdict
from .reproduction import Cell, Reproduction

_ALIKE = 1.1
"""Epochs end with whole rounds: up to a tenth more time, or samples, counts as equal."""

_TABLE = {
    "arm": "arm",
    "n": "n",
    "accuracy_percent": "accuracy (%)",
    "deviation": "±",
    "difference_points": "difference (points)",
    "half_width_points": "±",
    "verdict": "verdict",
    "accuracy_at_equal_time_percent": "at equal time (%)",
    "accuracy_at_equal_samples_percent": "at equal samples (%)",
    "samples": "samples",
    "device_seconds": "simulated (s)",
    "paper_percent": "paper (%)",
    "paper_spread": "±",
    "paper_label": "which is",
    "paper_seconds": "paper: wall clock (s)",
    "paper_seconds_label": "which is",
    "refitted_seconds": "refitted (s)",
}
"""Columns of the table to read, where any row has something there, and their headers."""

_HOW_TO_READ = """
- **accuracy**: of the final models, mean ± sample standard deviation over n seeds.
- **difference**: to the paper's method, seed by seed, ± half of its 95 % interval (Student's t,
  paired). *better*, *worse*: the interval does not contain 0.
- **at equal time**, **samples**: of the last evaluation not after the end of the arm that takes
  the fewest seconds on simulated devices, or samples; a tenth more counts as equal.
- **simulated**: seconds as computed from each device's speed alone.
- **paper**: at its own size; beside another scale compare differences, not accuracies.
- **refitted**: seconds of the paper's runs by the cost model, with times of a step and of a
  communication from three of its rows.
"""


@dataclass
class RepeatedCell:
    """A cell, its settings and arms; what these showed, and why runs are in no figure."""

    cell: Cell
    config: RunConfig
    arms: Mapping[str, Arm]
    comparison: Comparison | None = None
    problems: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)


def write_reproduction(
    title: str, repeated: Reproduction, cells: Sequence[RepeatedCell], folder: Path
) -> None:
    """Write ``reproduction.md`` and ``reproduction.csv``, each whole or not at all."""
    rows, lines = [], [f"# {title}", ""]
    for each in cells:
        name, its = each.cell.name, rows_of(repeated, each)
        rows += its
        lines += [f"## {name}", "", *_markdown(its)]
        if each.comparison:
            measured = accuracy_name(each.comparison.runs[0]).capitalize()
            lines += [verdict(each.comparison), ""]
            lines += [f"{measured}; conditions and pictures: [table]({name}/comparison.md).", ""]
        lines += [f"![{picture}]({name}/{picture})\n" for picture in each.pictures]
        lines += [f"In no figure: {problem}.\n" for problem in each.problems]
    text = "\n".join([*lines, "## How to read", _HOW_TO_READ])
    for ending, content in (("md", text), ("csv", csv_of(rows))):
        with written_whole(folder / f"reproduction.{ending}") as part:
            part.write_text(content, encoding="utf-8", newline="\n")


def rows_of(repeated: Reproduction, its: RepeatedCell) -> list[dict[str, Any]]:
    """Return a row of ``reproduction.csv`` for each arm; None or "" where nothing is known."""
    cell, comparison = its.cell, its.comparison
    found = {one.algorithm: one for one in comparison.algorithms} if comparison else {}
    limits = {}
    for figure in ("device_seconds", "samples"):
        ends = [end for one in found.values() if (end := one.mean(figure)) is not None]
        limits[figure] = min(ends, default=0.0)
    rows = []
    for arm in its.arms:
        one = found.get(arm) or AlgorithmFigures(arm, [], [], None)
        difference = one.difference
        reference = comparison and arm == comparison.reference
        paper = repeated.printed(cell, arm)
        row = {
            "cell": cell.name,
            "arm": arm,
            "mode": its.config.epoch,
            "tau_fast": cell.values["local-steps-fast"],
            "tau_slow": cell.values["local-steps-slow"],
            "n": len(one.accuracies),
            "accuracy_percent": percent(one.accuracy),
            "deviation": percent(one.accuracy_deviation),
            "difference_points": difference and percent(difference.mean),
            "half_width_points": difference and percent(difference.half_width),
            "verdict": "reference" if reference else difference and difference.in_words,
            **{key: one.mean(key) for key in ("training_seconds", "device_seconds", "samples")},
            **{key: paper.get(key) for key in ("paper_percent", "paper_spread", "paper_label")},
        }
        for name, figure in (("time", "device_seconds"), ("samples", "samples")):
            accuracy = _accuracy_by(one.runs, figure, limits[figure])
            row[f"accuracy_at_equal_{name}_percent"] = percent(accuracy)
        rows.append(row | {key: paper.get(key) for key in list(_TABLE)[-3:]})
    return rows


def _accuracy_by(runs: Sequence[Run], figure: str, limit: float) -> float | None:
    """Return the mean accuracy of each run's last evaluation within a limit."""
    last = []
    for run in runs:
        rows = [row for row in run["rows"] if None not in (row["accuracy"], row[figure])]
        last += [row["accuracy"] for row in rows if row[figure] <= _ALIKE * limit][-1:]
    return known_mean(last)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table to read."""
    shown = [key for key in _TABLE if any(row[key] not in (None, "") for row in rows)]
    table = [[_TABLE[key] for key in shown], ["---"] * len(shown)]
    table += [[_text(row[key]) for key in shown] for row in rows]
    return [*(f"| {' | '.join(cells)} |" for cells in table), ""]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
    return "-" if value in (None, "") else str(value)
