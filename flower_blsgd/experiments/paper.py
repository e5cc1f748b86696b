"""The paper's tables as it printed them, and which of their figures cannot be measurements.

Beside our own numbers each of its figures stands with its label.
"""

import csv
from collections.abc import Mapping
from importlib.resources import files

MEASURED = "paper, measured"
"""A figure that the paper gives as measured, and that follows from no others of its figures."""

COMPUTED = "paper, computed"
"""A figure that follows from others of the paper's figures, or is a count."""


def printed(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in ``paper_tables``, in the paper's order: texts by column.

    Accuracies and their spreads are in percent, times in seconds.
    """
    text = (files(__package__) / "paper_tables" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def label(row: Mapping[str, str], column: str) -> str:
    """Return `MEASURED` or `COMPUTED`: what a figure is, by its row of `printed` and its column.

    In ``comparison_2c8g`` the seconds of biased local SGD are those of synchronous SGD over 32, the
    tau of its fast workers, and those of 200 and 300 % of the epochs twice and three times as
    many; those of ``dlb`` are 0.8 times those of synchronous SGD on the fast workers alone: its 128
    rounds for 160, or 64 for 80. ``fast_only_vs_mixed`` repeats the former for all workers.
    """
    what = row.get("algorithm") or row.get("workers")
    seconds = column == "wall_clock_s" and what in ("biased-local-sgd", "dlb", "2cpu+8gpu")
    return COMPUTED if seconds or column == "comm_per_epoch" else MEASURED
