"""The tables that the paper printed."""

import csv
from collections.abc import Mapping
from importlib.resources import files

MEASURED = "paper, measured"
"""Label of a figure that the paper gives as measured and that follows from no other figure."""

COMPUTED = "paper, computed"
"""Label of a figure that follows from other figures of the paper, or is a count."""


def printed(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in ``tables``, in the paper's order: texts by column.

    Accuracies and their spreads are in percent, times in seconds.
    """
    text = (files(__package__) / "tables" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def label(row: Mapping[str, str], column: str) -> str:
    """Return whether a figure is `MEASURED` or `COMPUTED`, by its row of `printed` and its column.

    In ``comparison_2c8g`` two kinds of seconds are computed. Those of biased local SGD are the
    seconds of synchronous SGD divided by 32, the tau of its fast workers; for 200 and 300 % of the
    epochs they are twice and three times as many. Those of ``dlb`` are 0.8 times the seconds of
    synchronous SGD on the fast workers alone: its 128 rounds for 160, or 64 for 80.
    ``fast_only_vs_mixed`` repeats the seconds of biased local SGD for all workers.
    """
    what = row.get("algorithm") or row.get("workers")
    seconds = column == "wall_clock_s" and what in ("biased-local-sgd", "dlb", "2cpu+8gpu")
    return COMPUTED if seconds or column == "comm_per_epoch" else MEASURED
