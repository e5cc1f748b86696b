"""Tables for Markdown, HTML and terminals, rows as CSV, and figures as text."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill
from typing import Any

from rich import box
from rich import table as rich_table

UNKNOWN = "-"
"""Cell of a figure that was not measured."""

_NAME_WIDTH = 20


@dataclass(frozen=True)
class Table:
    """A table whose first column holds names; the other columns hold figures.

    A newline breaks a header in a terminal and is a space elsewhere. Each row has as many cells as
    there are headers; a table of texts in HTML has no headers.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Return the table as lines of Markdown, figures aligned to the right."""
        header = [text.replace("\n", " ") for text in self.header]
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *self.rows]
        return [f"| {' | '.join(cells)} |" for cells in lines]

    def html(self) -> str:
        """Return the table as HTML; all texts are escaped."""
        head = "".join(f"<th>{escape(text.replace('_', ' '))}</th>" for text in self.header)
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        opening = f'<div class="wide"><table class="{"numbers" if self.header else "texts"}">'
        return f"{opening}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def terminal(self) -> rich_table.Table:
        """Return the table for a terminal of 100 columns."""
        table = rich_table.Table(box=box.SIMPLE_HEAD, padding=0)
        first, *others = self.header
        table.add_column(first, no_wrap=True)
        for text in others:  # long figures may take two lines
            wraps = text.endswith(("steps", "difference"))
            table.add_column(
                text, justify="right", no_wrap=not wraps, min_width=6 if wraps else None
            )
        for name, *cells in self.rows:
            table.add_row(fill(name, _NAME_WIDTH), *cells)
        return table


def csv_of(rows: Sequence[Mapping[str, Any]], header: bool = True, digits: int = 0) -> str:
    """Return rows as CSV; None becomes an empty cell.

    All rows have the columns of the first one. `digits` are the significant digits of floats; 0
    for all of them.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    if header and rows:
        writer.writeheader()
    for row in rows:
        writer.writerow(
            {
                name: f"{value:.{digits}g}" if digits and isinstance(value, float) else value
                for name, value in row.items()
            }
        )
    return text.getvalue()


def counted(number: int, noun: str) -> str:
    """Return ``"1 epoch"`` or ``"2 epochs"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def seconds_text(seconds: float | None) -> str:
    """Return seconds with about three significant digits."""
    if seconds is None:
        return UNKNOWN
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:,.{digits}f}"


def brief(number: float, digits: int = 3) -> str:
    """Return a number with about so many significant digits, without an exponent if it is large.

    >>> brief(0.01234), brief(99.96), brief(1258.4), brief(250.0, 2)
    ('0.0123', '100', '1,258', '250')
    """
    return f"{number:.{digits}g}" if number < 10**digits - 0.5 else f"{number:,.0f}"


def share_text(share: float | None) -> str:
    """Return a share as a whole percentage, such as ``"25%"``."""
    return UNKNOWN if share is None else f"{share:.0%}"
