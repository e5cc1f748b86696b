"""Rows of measurements: what a benchmark returns, prints and writes.

A benchmark is a function ``measure(quick) -> (rows, conditions)``; `main` gives it the command
line that all of them have.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flower_blsgd.errors import pip_install

from .table import Row, print_table, shown
from .taken_under import conditions

Measured = tuple[list[Row], dict[str, Any]]
"""The rows, and the conditions that they were taken under."""

__all__ = [
    "Measured",
    "Row",
    "conditions",
    "main",
    "missing",
    "not_run",
    "parser",
    "row",
    "with_goal",
    "write",
]


def row(
    name: str,
    values: Sequence[float],
    unit: str,
    against: Sequence[float] | None = None,
    against_name: str = "",
) -> Row:
    """Return a row: median and range of the values, and the ratio of medians."""
    value = statistics.median(values)
    return {
        "name": name,
        "value": value,
        "minimum": min(values),
        "maximum": max(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "count": len(values),
        "unit": unit,
        "ratio": value / statistics.median(against) if against else None,
        "against": against_name or None,
    }


def not_run(name: str, reason: str, unit: str = "") -> Row:
    """Return the row of a cell that could not be measured, and why."""
    return {
        "name": name,
        "value": None,
        "count": 0,
        "unit": unit,
        "ratio": None,
        "against": None,
        "reason": reason,
    }


def with_goal(
    measured: Row, at_most: float | None = None, at_least: float | None = None, of: str = "value"
) -> Row:
    """Return the row with its goal, and whether it is met (None: not measured).

    Parameters
    ----------
    measured : dict
        The row.
    at_most, at_least : float, optional
        One of both.
    of : {"value", "ratio"} (default: "value")
        What the goal is about.
    """
    limit, sign = (at_most, "<=") if at_least is None else (at_least, ">=")
    assert limit is not None, "a goal needs a limit"
    figure = measured[of]
    met = None if figure is None else (figure <= limit if sign == "<=" else figure >= limit)
    unit = f" {measured['unit']}" if of == "value" else " x"
    return {**measured, "goal": f"{sign} {shown(limit)}{unit.rstrip()}", "goal_met": met}


def missing(package: str, extra: str) -> str | None:
    """Return what to tell where a competitor's package is not installed; None if it is there."""
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: {pip_install(extra)}"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that all benchmarks share; a benchmark may add options."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="write the rows and their conditions here")
    made.add_argument("--quick", action="store_true", help="within a minute on two cores")
    return made


def main(measure: Callable[[bool], Measured], description: str | None) -> None:
    """Measure, print the table, and write JSON where asked."""
    options = parser(description).parse_args()
    write(*measure(options.quick), options.json)


def write(rows: Sequence[Row], taken_under: dict[str, Any], path: Path | None) -> None:
    """Print the table and its conditions, and write JSON where asked."""
    if path:  # first: a terminal that fails must not cost the figures
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"rows": list(rows), "conditions": taken_under}, indent=2)
        path.write_text(text + "\n")
    print_table(rows)
    print("conditions:", ", ".join(f"{key} = {value}" for key, value in taken_under.items()))
