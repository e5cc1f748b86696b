"""Write a reproduction: what was measured of its cells beside what the paper printed."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..results.folder import written_whole
from .compare import Arm
from .comparison import AlgorithmFigures, Comparison, Run, known_mean
from .comparison_report import accuracy_name, csv_of, percent, verdict
from .figures import FIGURES
from .reproduction import Cell, Reproduction

FILE = "reproduction.csv"

_ALIKE = 1.1
"""Epochs end with whole rounds: up to a tenth more time, or samples, counts as equal."""

_TABLE = {
    "arm": "arm",
    "n": "n",
    "accuracy (%)": "accuracy_percent ± deviation",
    "difference (points)": "difference_points ± half_width_points",
    "verdict": "verdict",
    "at equal time (%)": "accuracy_at_equal_time_percent",
    "at equal samples (%)": "accuracy_at_equal_samples_percent",
    "samples": "samples",
    "simulated (s)": "device_seconds",
    "paper (%)": "paper_percent ± paper_spread",
    "which is": "paper_label",
    "paper: wall clock (s)": "paper_seconds",
    "which are": "paper_seconds_label",
}
"""Columns of the table to read, where any row has something there, of ``reproduction.csv``."""

_HOW_TO_READ = """
- **at equal time**, **samples**: of the last evaluation not after the end of the arm that takes
  the fewest seconds on simulated devices, or samples; a tenth more counts as equal.
- **paper**: at its own size; beside another scale compare differences, not accuracies.
- The rest is said below the table of each comparison.
"""


@dataclass
class RepeatedCell:
    """A cell, its settings and arms; what these showed, and why runs are in no figure."""

    cell: Cell
    config: RunConfig
    arms: Mapping[str, Arm]
    comparison: Comparison | None = None
    problems: list[str] = field(default_factory=list)


def write_reproduction(
    title: str, repeated: Reproduction, cells: Sequence[RepeatedCell], folder: Path
) -> None:
    """Write ``reproduction.md`` and ``reproduction.csv``, each whole or not at all."""
    rows, lines = [], [f"# {title}", ""]
    for each in cells:
        name, its = each.cell.name, rows_of(repeated, each)
        rows += its
        table = table_of(its)
        table.insert(1, ["---"] * len(table[0]))
        lines += [f"## {name}", "", *(f"| {' | '.join(cells)} |" for cells in table), ""]
        if each.comparison:
            measured = accuracy_name(each.comparison.runs[0]).capitalize()
            lines += [verdict(each.comparison), ""]
            lines += [f"{measured}; conditions and pictures: [table]({name}/comparison.md).", ""]
        pictures = [f"{name}/{figure}.png" for figure in FIGURES]
        lines += [f"![{path}]({path})\n" for path in pictures if (folder / path).is_file()]
        lines += [f"In no figure: {problem}.\n" for problem in each.problems]
    text = "\n".join([*lines, "## How to read", _HOW_TO_READ])
    for name, content in (("reproduction.md", text), (FILE, csv_of(rows))):
        with written_whole(folder / name) as part:
            part.write_text(content, encoding="utf-8", newline="\n")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``reproduction.csv``, its numbers as such, but for counts of seeds."""
    with (folder / FILE).open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    number = re.compile(r"-?\d[\d.]*(e[+-]\d+)?").fullmatch
    return [{k: float(v) if number(v) and k != "n" else v for k, v in r.items()} for r in rows]


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
        seconds = ("paper_seconds", "paper_seconds_label")
        rows.append(row | {key: paper.get(key) for key in seconds})
    return rows


def _accuracy_by(runs: Sequence[Run], figure: str, limit: float) -> float | None:
    """Return the mean accuracy of each run's last evaluation within a limit."""
    last = []
    for run in runs:
        rows = [row for row in run["rows"] if None not in (row["accuracy"], row[figure])]
        last += [row["accuracy"] for row in rows if row[figure] <= _ALIKE * limit][-1:]
    return known_mean(last)


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the table to read, its header first."""
    columns = [[head, *(_text(row, names) for row in rows)] for head, names in _TABLE.items()]
    return [list(row) for row in zip(*(c for c in columns if {*c[1:]} != {"-"}), strict=True)]


def _text(row: Mapping[str, Any], names: str) -> str:
    """Return columns, those that are filled in, as one text; numbers as they are read."""
    texts = []
    for value in (row[name] for name in names.split(" ± ")):
        if isinstance(value, float):
            texts.append(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:z.2f}")
        elif value not in (None, ""):
            texts.append(str(value))
    return " ± ".join(texts) or "-"
