"""The paper's tables as it printed them, and which of their figures cannot be measurements.

"Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems". Beside our own numbers
each of its figures stands with its label.
"""

import csv
from collections.abc import Mapping
from importlib.resources import files

MEASURED = "paper, measured"
"""A figure that the paper gives as measured, and that follows from no others of its figures."""

COMPUTED = "paper, computed"
"""A figure that follows from others of the paper's figures, or is a count."""

TABLES = (
    *("bias_1c1g", "bias_2c8g", "comparison_2c8g", "fast_only_vs_mixed"),
    *("sampling_schemes_2c8g", "hyperparameters"),
)


def printed(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of the paper, in its order: texts by column.

    Accuracies and their spreads are in percent, times in seconds.

    Parameters
    ----------
    name : str
        One of `TABLES`.

    Raises
    ------
    ValueError
        If there is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"{name!r} is none of the paper's tables: {', '.join(TABLES)}")
    text = (files(__package__) / "paper_tables" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def label(row: Mapping[str, str], column: str) -> str:
    """Return `MEASURED` or `COMPUTED`: what a figure of the paper is.

    In ``comparison_2c8g`` the seconds of biased local SGD are those of synchronous SGD over 32, the
    tau of its fast workers, and those of 200 and 300 % of the epochs twice and three times as
    many; those of ``dlb`` are 0.8 times those of synchronous SGD on the fast workers alone: its 128
    rounds for 160, or 64 for 80. ``fast_only_vs_mixed`` repeats the former for all workers.

    Parameters
    ----------
    row : mapping of str to str
        A row of `printed`.
    column : str
        Its figure: an accuracy, a spread, ``"wall_clock_s"`` or ``"comm_per_epoch"``.
    """
    what = row.get("algorithm") or row.get("workers")
    seconds = column == "wall_clock_s" and what in ("biased-local-sgd", "dlb", "2cpu+8gpu")
    return COMPUTED if seconds or column == "comm_per_epoch" else MEASURED
