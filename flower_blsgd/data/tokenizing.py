"""Cut the texts of a split into tokens, in an array on disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .new_arrays import new_array, old_array
from .text_columns import TextSplit

NO_TOKEN = -1
"""Stands in the places behind the end of a text."""

CHUNK = 4096
"""Rows that are cut, and recorded as done, at a time."""


@dataclass(frozen=True)
class Tokenized:
    """What became of a split: texts it has now, left out, and cut; tokens of a median text."""

    count: int
    skipped: int
    cut: int
    median_tokens: float


@dataclass(frozen=True)
class RawTokens:
    """The arrays that a split is tokenized into, before bad rows are taken out.

    Parameters
    ----------
    tokens : numpy.memmap
        int32 of shape (rows, max_tokens).
    lengths : numpy.memmap
        int32 of shape (rows,): tokens before a text was cut, 0 of a row that is left out.
    """

    tokens: "np.memmap[Any, np.dtype[Any]]"
    lengths: "np.memmap[Any, np.dtype[Any]]"

    @classmethod
    def new(cls, folder: Path, name: str, rows: int, width: int) -> "RawTokens":
        """Make the arrays of a split.

        Raises
        ------
        OSError
            If there is no room for them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tokens, lengths = cls._paths(folder, name)
        return cls(
            new_array(tokens, (rows, width), np.int32), new_array(lengths, (rows,), np.int32)
        )

    @classmethod
    def left(cls, folder: Path, name: str, rows: int, width: int) -> "RawTokens | None":
        """Return the arrays that an interrupted call has left, if they are whole."""
        tokens, lengths = cls._paths(folder, name)
        left = old_array(tokens, (rows, width), np.int32), old_array(lengths, (rows,), np.int32)
        return None if left[0] is None or left[1] is None else cls(left[0], left[1])

    @staticmethod
    def _paths(folder: Path, name: str) -> tuple[Path, Path]:
        return folder / f"raw_{name}_tokens.npy", folder / f"raw_{name}_lengths.npy"


def tokenize(
    split: TextSplit,
    raw: RawTokens,
    tokenizer: Any,
    skip_bad: bool,
    done: int,
    on_rows: Callable[[int, int], None],
) -> None:
    """Fill the arrays of a split, from row `done` on.

    Parameters
    ----------
    split : TextSplit
        The texts.
    raw : RawTokens
        Its width is where texts are cut; marks that the tokenizer puts at the end stay.
    tokenizer : tokenizers.Tokenizer
        Its own rules of cutting and padding are overridden.
    skip_bad : bool
        Leave bad rows out.
    done : int
        Rows that an interrupted call has done.
    on_rows : callable
        Called with the rows of a chunk and the rows done so far, when they are on the disk.

    Raises
    ------
    UsageError
        If a row has no text, no label or no token.
    """
    width = raw.tokens.shape[1]
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=width)
    marks = tokenizer.num_special_tokens_to_add(is_pair=False)
    for first in range(done, len(split), CHUNK):
        last = min(first + CHUNK, len(split))
        texts, wrong = split.read(first, last)
        tokens = np.full((last - first, width), NO_TOKEN, np.int32)
        lengths = np.zeros(last - first, np.int32)
        for place, encoded in enumerate(tokenizer.encode_batch(texts)):
            if first + place in wrong:
                continue
            tokens[place, : len(encoded.ids)] = encoded.ids
            rest = sum(len(piece.ids) - marks for piece in encoded.overflowing)
            lengths[place] = len(encoded.ids) + rest
            if lengths[place] == marks:
                wrong[first + place] = "has no token that could be read"
                lengths[place] = 0
        if wrong and not skip_bad:
            row = min(wrong)
            raise UsageError(
                f"data: row {row} of {split.name} {wrong[row]}; skip-bad = true leaves such rows "
                "out"
            )
        raw.tokens[first:last], raw.lengths[first:last] = tokens, lengths
        raw.tokens.flush()
        raw.lengths.flush()
        on_rows(last - first, last)


def keep_good(split: TextSplit, raw: RawTokens, folder: Path) -> Tokenized:
    """Write ``<split>_{tokens,lengths,labels}.npy``: good rows, as wide as the longest text is.

    Tokens are int32 of shape (rows, longest), lengths int32 and labels int64 of shape (rows,).

    Raises
    ------
    UsageError
        If no row is good.
    OSError
        If there is no room for them.
    """
    places = np.flatnonzero(raw.lengths)
    if len(places) == 0:
        raise UsageError(f"data: none of the {len(split)} rows of {split.name} can be used")
    lengths: npt.NDArray[np.int32] = raw.lengths[places]
    width = raw.tokens.shape[1]
    longest = min(int(lengths.max()), width)
    tokens = new_array(folder / f"{split.name}_tokens.npy", (len(places), longest), np.int32)
    for first in range(0, len(places), CHUNK):
        tokens[first : first + CHUNK] = raw.tokens[places[first : first + CHUNK], :longest]
    tokens.flush()
    for kind, values in (("lengths", lengths), ("labels", split.labels[places])):
        array = new_array(folder / f"{split.name}_{kind}.npy", values.shape, values.dtype)
        array[:] = values
        array.flush()
    cut = int((lengths > width).sum())
    return Tokenized(len(places), len(split) - len(places), cut, float(np.median(lengths)))
