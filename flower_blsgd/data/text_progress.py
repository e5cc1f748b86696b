"""How far the cutting of texts is, on disk beside what it has written."""

import hashlib
from pathlib import Path
from typing import Any

from .preparation import read_progress, record_progress, scratch_folder
from .text_columns import TextSplit
from .tokenizing import RawTokens


def split_key(state: str, split: TextSplit) -> str:
    """Return what a split's tokens belong to.

    Parameters
    ----------
    state : str
        Of the source, see `DataSource.state`.
    split : TextSplit
        Its labels count, of all rows.
    """
    return hashlib.sha256(state.encode() + b"\n" + split.labels.tobytes()).hexdigest()


def begun_split(
    part: Path, split: TextSplit, key: str, width: int, skip_bad: bool
) -> tuple[RawTokens, int]:
    """Return the arrays of a split, and how many rows are done; if that is in doubt, none.

    Parameters
    ----------
    part : Path
        The folder that is being written.
    split : TextSplit
        The texts.
    key : str
        See `split_key`.
    width : int
        Where texts are cut.
    skip_bad : bool
        Whether a row that is done may be left out.

    Raises
    ------
    OSError
        If there is no room for new arrays.
    """
    scratch = scratch_folder(part)
    done = _done(read_progress(part).get(split.name), key, len(split))
    raw = RawTokens.left(scratch, split.name, len(split), width) if done else None
    if raw is None or not (skip_bad or raw.lengths[:done].all()):
        return RawTokens.new(scratch, split.name, len(split), width), 0
    return raw, done


def record_done(part: Path, name: str, key: str, done: int) -> None:
    """Record how far a split is; its arrays must be flushed before.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    record_progress(part, {**read_progress(part), name: {"key": key, "done": done}})


def _done(told: Any, key: str, rows: int) -> int:
    if not isinstance(told, dict) or told.get("key") != key:
        return 0
    done = told.get("done")
    return done if type(done) is int and 0 < done <= rows else 0
