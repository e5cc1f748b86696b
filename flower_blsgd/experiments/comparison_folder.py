"""The files that a comparison leaves: a table for reading, one for counting on, a picture."""

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UsageError
from .comparison import Comparison, compare
from .comparison_table import csv_text, markdown
from .finished_run import FinishedRun


def write_comparison(
    runs: Sequence[FinishedRun],
    folder: Path,
    reference: str,
    target: float | None = None,
    failed: Sequence[str] = (),
) -> Comparison:
    """Compare runs, and write ``comparison.md``, ``comparison.csv`` and ``comparison.png``.

    Each file is written whole or not at all; one of an earlier comparison is replaced.

    Parameters
    ----------
    runs : sequence of FinishedRun
        All seeds of all algorithms, in the order in which they were named.
    folder : Path
        Made if it is not there.
    reference : str
        The algorithm that the others are compared with.
    target : float, optional
        An accuracy in (0, 1]; None for the highest that every run reached.
    failed : sequence of str
        What became of runs that did not finish, a line each; the table names them.

    Raises
    ------
    UsageError
        If the runs cannot be compared, or the folder cannot be written to.
    """
    from .comparison_picture import draw_comparison  # matplotlib takes its time

    comparison = compare(runs, reference, target, failed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(folder / "comparison.csv", lambda p: _text(p, csv_text(comparison)))
        _write_whole(folder / "comparison.png", lambda p: draw_comparison(comparison, p))
        _write_whole(folder / "comparison.md", lambda p: _text(p, markdown(comparison)))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error.strerror}") from None
    return comparison


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    part = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
