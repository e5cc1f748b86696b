"""The table of a benchmark, on a terminal or in a file."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
"""``name``, ``value``, ``unit``, ``ratio``, ``against``, and the spread; or ``reason``."""

_WIDTH_OF_A_FILE = 160


def print_table(rows: Sequence[Row]) -> None:
    """Print a line per row; what was not measured says why."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    console.print(table(rows))


def table(rows: Sequence[Row]) -> Table:
    """Return the table; the column of goals is there if any row has one."""
    goals = any("goal" in r for r in rows)
    made = Table(header_style="bold")
    for title in ("name", "median", "unit", "range", "ratio", *(["goal"] if goals else [])):
        made.add_column(title, justify="right" if title == "median" else "left")
    for r in rows:
        made.add_row(*(Text(cell) for cell in cells(r, goals)))
    return made


def cells(row: Row, goals: bool) -> list[str]:
    """Return the texts of a row: name, median, unit, range, ratio, and its goal."""
    goal = [_goal(row)] if goals else []
    if row["value"] is None:
        return [row["name"], "not run", row["unit"], row["reason"], "", *goal]
    return [row["name"], shown(row["value"]), row["unit"], _range(row), _ratio(row), *goal]


def _range(row: Row) -> str:
    if row["count"] == 1:
        return "n = 1"
    return f"{shown(row['minimum'])} to {shown(row['maximum'])}, n = {row['count']}"


def _ratio(row: Row) -> str:
    if row["ratio"] is None:
        return ""
    lowest, highest = row.get("ratio_minimum"), row.get("ratio_maximum")
    spread = "" if lowest is None else f" ({shown(lowest)} to {shown(highest)})"
    return f"{shown(row['ratio'])}{spread} x {row['against']}"


def _goal(row: Row) -> str:
    if "goal" not in row:
        return ""
    said = {True: "met", False: "missed", None: "not measured"}[row["goal_met"]]
    return f"{row['goal']}: {said}"


def shown(figure: float) -> str:
    """Write a figure with four digits, without an exponent where that is readable.

    >>> shown(0.00376374), shown(26.7568), shown(123456.7), shown(1e-07), shown(200.0)
    ('0.003764', '26.76', '123,457', '1e-07', '200')
    """
    if figure == 0 or not math.isfinite(figure) or not 1e-4 <= abs(figure) < 1e9:
        return f"{figure:.4g}"
    digits = max(0, 3 - math.floor(math.log10(abs(figure))))
    text = f"{figure:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
