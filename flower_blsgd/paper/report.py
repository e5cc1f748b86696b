"""Write a reproduction: what was measured in its cells next to what the paper printed."""

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..errors import UsageError
from ..experiments.compare import Arm
from ..experiments.comparison import AlgorithmFigures, Comparison, Run, known_mean
from ..experiments.comparison_report import verdict
from ..experiments.html_report import (
    Page,
    drawing,
    picture,
    read_comparison,
    section,
    sections_of,
)
from ..files import write_text
from ..results.tables import UNKNOWN, Table, csv_of
from .figures import FIGURES
from .reproductions import Cell, Reproduction

FILE = "reproduction.csv"

_ALIKE = 1.1
"""Epochs end with full rounds: up to a tenth more time, or samples, counts as equal."""

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
    "origin": "paper_label",
    "paper: wall clock (s)": "paper_seconds",
    "its origin": "paper_seconds_label",
}
"""Columns of the table to read, and the columns of ``reproduction.csv`` that each shows.

Columns without a value in any row are left out.
"""

_HOW_TO_READ = """
- **at equal time**, **at equal samples**: accuracy of the last evaluation before the arm with the
  fewest seconds on simulated devices, or samples, ends; a tenth more counts as equal.
- **paper**: at full scale. At another scale compare differences, not accuracies.
- The other columns are explained below the table of each comparison.
"""


@dataclass
class RepeatedCell:
    """A cell, the settings and arms of its runs, and their figures.

    `failed` has a line for each run without figures, or one if the cell was left out.
    """

    cell: Cell
    config: RunConfig
    arms: Mapping[str, Arm]
    comparison: Comparison | None = None
    failed: Sequence[str] = ()


def write_reproduction(
    title: str, repeated: Reproduction, cells: Sequence[RepeatedCell], folder: Path
) -> None:
    """Write ``reproduction.md`` and ``reproduction.csv``, each whole or not at all."""
    rows, lines = [], [f"# {title}", ""]
    for each in cells:
        name, of_cell = each.cell.name, rows_of(repeated, each)
        rows += of_cell
        lines += [f"## {name}", "", *table_of(of_cell).markdown(), ""]
        if each.comparison:
            measured = f"{each.comparison.metric.split.capitalize()} accuracy"
            lines += [verdict(each.comparison), ""]
            lines += [f"{measured}; conditions and pictures: [table]({name}/comparison.md).", ""]
        pictures = [f"{name}/{figure}.png" for figure in FIGURES]
        lines += [f"![{path}]({path})\n" for path in pictures if (folder / path).is_file()]
        lines += [f"Not included: {problem}.\n" for problem in each.failed]
    text = "\n".join([*lines, "## How to read", _HOW_TO_READ])
    write_text(folder / "reproduction.md", text)
    write_text(folder / FILE, csv_of(rows, digits=6))


def rows_of(repeated: Reproduction, each: RepeatedCell) -> list[dict[str, Any]]:
    """Return a row of ``reproduction.csv`` for each arm; None or "" where a value is unknown."""
    cell, comparison = each.cell, each.comparison
    found = {one.algorithm: one for one in comparison.algorithms} if comparison else {}
    limits = {}
    for figure in ("device_seconds", "samples"):
        ends = [end for one in found.values() if (end := one.mean(figure)) is not None]
        limits[figure] = min(ends, default=0.0)
    rows = []
    for arm in each.arms:
        one = found.get(arm) or AlgorithmFigures(arm, [], [], None)
        difference = one.difference
        is_reference = comparison and arm == comparison.reference
        paper = repeated.printed(cell, arm)
        rows.append(
            {
                "cell": cell.name,
                "arm": arm,
                "mode": each.config.epoch,
                "tau_fast": cell.values["local-steps-fast"],
                "tau_slow": cell.values["local-steps-slow"],
                "n": len(one.values),
                "accuracy_percent": one.value,
                "deviation": one.deviation,
                "difference_points": difference and difference.mean,
                "half_width_points": difference and difference.half_width,
                "verdict": "reference" if is_reference else difference and difference.in_words,
                **{key: one.mean(key) for key in ("training_seconds", "device_seconds", "samples")},
                **{key: paper.get(key) for key in ("paper_percent", "paper_spread", "paper_label")},
                **{
                    f"accuracy_at_equal_{name}_percent": _accuracy_by(
                        one.runs, figure, limits[figure]
                    )
                    for name, figure in (("time", "device_seconds"), ("samples", "samples"))
                },
                **{key: paper.get(key) for key in ("paper_seconds", "paper_seconds_label")},
            }
        )
    return rows


def _accuracy_by(runs: Sequence[Run], figure: str, limit: float) -> float | None:
    """Return the mean accuracy in percent of each run's last evaluation within a limit."""
    last = []
    for run in runs:
        rows = [row for row in run["rows"] if None not in (row["value"], row[figure])]
        last += [row["value"] for row in rows if row[figure] <= _ALIKE * limit][-1:]
    return known_mean(last)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table to read of rows of ``reproduction.csv``."""
    columns = [[head, *(_text(row, names) for row in rows)] for head, names in _TABLE.items()]
    header, *lines = zip(*(c for c in columns if {*c[1:]} != {UNKNOWN}), strict=True)
    return Table(header, lines)


def _text(row: Mapping[str, Any], names: str) -> str:
    """Return the known values of some columns as one text."""
    texts = []
    for value in (row[name] for name in names.split(" ± ")):
        if isinstance(value, float):
            texts.append(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:z.2f}")
        elif value not in (None, ""):
            texts.append(str(value))
    return " ± ".join(texts) or UNKNOWN


# --- the HTML page


def page_of_reproduction(folder: Path) -> Page:
    """Return the page of a reproduction."""
    rows = _read_rows(folder)
    cells = {row["cell"]: [one for one in rows if one["cell"] == row["cell"]] for row in rows}
    verdicts = Counter(row["verdict"] for row in rows if row["accuracy_percent"])
    reference = next((row["arm"] for row in rows if row["verdict"] == "reference"), "no reference")
    rivals = verdicts.total() - verdicts["reference"]
    title = (
        f"{folder.name}: {reference} is shown better than {verdicts['worse']} of {rivals} rivals, "
        f"worse than {verdicts['better']}"
    )
    lead = "Each rival counts once per cell. For the others the interval shows no difference."
    warnings, sections = [], []
    for cell, of_cell in cells.items():
        below = folder / Path(cell).name
        pictures = [picture(below / f"{name}.png") for name in FIGURES]
        heading = f"{cell}, {of_cell[0]['mode']} mode"
        sections.append(section(heading, table_of(of_cell).html(), *pictures))
        try:
            comparison = read_comparison(below)
        except UsageError as error:
            warnings.append(f"{cell}: {error}")
            continue
        warnings += [f"{cell}: not included: {line}" for line in comparison.failed]
        sections += sections_of(comparison, drawing(comparison))
    return Page(title, lead, warnings, sections)


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``reproduction.csv``, with numbers as float except for the seeds."""
    with (folder / FILE).open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    number = re.compile(r"-?\d[\d.]*(e[+-]\d+)?").fullmatch
    return [{k: float(v) if number(v) and k != "n" else v for k, v in r.items()} for r in rows]
