"""From the tables of a data set to arrays of samples and labels, prepared once."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap
from rich.console import Console
from rich.progress import track

from ..errors import UsageError, first_line
from .cache import Prepared, prepared
from .source import DataSource

_LOG = logging.getLogger(__name__)

_CHUNK = 32
"""Rows that a thread converts at a time."""

Convert = Callable[[Any], npt.ArrayLike]
"""Makes an array of a sample; raises anything if that is bad."""


def prepared_rows(
    source: DataSource,
    options: Mapping[str, Any],
    converter: Callable[[Any, Path], tuple[Convert, Mapping[str, Any]]],
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    *,
    filler: int = 0,
    skip_bad: bool = False,
    max_samples: int = 0,
    again: bool = False,
) -> Prepared:
    """Return a data set as arrays, preparing them if that was not done yet.

    Parameters
    ----------
    source : DataSource
        Which, and from where.
    options : mapping
        What the outcome depends on besides the other arguments, as JSON writes it.
    converter : callable
        ``(training rows, folder) -> (convert, facts)``: what makes an array of one sample, and
        the facts of `Write` that it knows. May write into the folder.
    shape, dtype, filler
        Of one row of inputs; see `write_part`.
    skip_bad : bool (default: False)
        Leave samples out that cannot be read.
    max_samples : int (default: 0)
        Only the first so many rows for training and for testing; 0: all.
    again : bool (default: False)
        Prepare them even if that was done.

    Raises
    ------
    UsageError
        If there are no such data, or the cache cannot be written.
    """

    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        source.check_libraries()
        parts, num_classes = read_parts(source, source.tables(scratch), max_samples)
        convert, facts = converter(parts["train"], folder)
        skipped = {
            part: write_part(rows, folder, part, convert, shape, dtype, skip_bad, filler)
            for part, rows in parts.items()
        }
        return {"num_classes": num_classes, "skipped": skipped, **facts}

    shared = {"classes": source.num_classes, "skip_bad": skip_bad, "max_samples": max_samples}
    return prepared(source, {**options, **shared}, write, again)


def read_parts(
    source: DataSource, tables: Mapping[str, Any], max_samples: int = 0
) -> tuple[dict[str, Any], int]:
    """Return the rows of each part of a data set, and how many classes all its splits have.

    A part is a ``datasets.Dataset`` of two columns, ``sample`` and ``label``; images are encoded.
    The tables are those of `DataSource.tables`; `max_samples` is as of `prepared_rows`.

    Raises
    ------
    UsageError
        If a split or column is missing or empty, splits name different classes, labels are no
        whole numbers or lie beyond the names, the number of classes is wrong, or splits to be
        joined have columns of different types.
    """
    from datasets import Image, concatenate_datasets

    splits = {}
    for split in (*source.train, *source.test):
        if split not in tables:
            raise UsageError(
                f"{source.setting}: no {split} split, found {', '.join(tables)}; expected "
                f"{source.layout}"
            )
        table = tables[split]
        known = [[name for name in names if name in table.column_names] for names in source.columns]
        if not all(known) or not len(table):
            raise UsageError(
                f"{source.setting}: {split} has {len(table)} rows of the columns "
                f"{', '.join(table.column_names)}; expected {source.layout}"
            )
        renamed = {names[0]: name for names, name in zip(known, ("sample", "label"), strict=True)}
        splits[split] = table.select_columns(list(renamed)).rename_columns(renamed)
        if isinstance(splits[split].features["sample"], Image):
            # One damaged image would fail all that are read with it.
            splits[split] = splits[split].cast_column("sample", Image(decode=False))
    num_classes = _count_classes(source, splits)
    joined = {}
    for part, names in (("train", source.train), ("test", source.test)):
        try:
            rows = concatenate_datasets([splits[split] for split in names])
        except ValueError as error:
            raise UsageError(
                f"{source.setting}: {' and '.join(names)} cannot be joined ({first_line(error)}); "
                "save them with columns of the same types"
            ) from None
        joined[part] = rows.select(range(min(max_samples or len(rows), len(rows))))
    return joined, num_classes


def _count_classes(source: DataSource, splits: Mapping[str, Any]) -> int:
    from pyarrow import ArrowException

    expected = source.num_classes
    named = {
        tuple(names)
        for split in splits.values()
        if (names := getattr(split.features["label"], "names", None))
    }
    if len(named) > 1:
        raise UsageError(
            f"{source.setting}: {' and '.join(splits)} have different classes; they need the "
            "same, in the same order"
        )
    try:
        highest = max(int(_labels_of(split).max()) for split in splits.values())
    except ArrowException as error:
        raise UsageError(
            f"{source.setting}: labels must be whole numbers that count the classes from 0 "
            f"({first_line(error)})"
        ) from None
    names = next(iter(named), ())
    count = len(names) or highest + 1
    # Labels that count with gaps, up to any number, make more classes than there are samples.
    most = max(len(names), sum(map(len, splits.values())))
    least, most = (expected, expected) if expected else (2, most)
    if highest >= count or not least <= count <= most:
        wanted = f"the {expected} of {source.name}" if expected else f"{least} to {most}"
        raise UsageError(
            f"{source.setting}: wrong number of classes: found {count} and labels up to {highest}, "
            f"expected {wanted}, counted from 0 without gaps; correct the labels, or name a folder "
            f"with {source.layout}"
        )
    return count


def write_part(
    rows: Any,
    folder: Path,
    part: str,
    convert: Convert,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    skip_bad: bool,
    filler: int = 0,
) -> int:
    """Write ``<part>_inputs.npy`` and ``<part>_labels.npy``; return how many rows are left out.

    Labels are int64 of shape (rows,). `convert` makes an array of at most `shape` of one sample,
    and is called by many threads; a row for which it raises anything is bad, as is one without a
    sample or a label. `filler` stands behind the end of a shorter array. If all arrays are shorter
    in the first dimension, so are the rows.

    Raises
    ------
    UsageError
        If a row is bad, and with `skip_bad`, which leaves bad rows out, if all are.
    OSError
        If the folder cannot be written, or there is no room for the array, which is reserved.
    """
    path, labels = folder / f"{part}_inputs.npy", _labels_of(rows)
    inputs: np.memmap[Any, np.dtype[Any]] = open_memmap(
        path, mode="w+", dtype=dtype, shape=(len(rows), *shape)
    )
    if hasattr(os, "posix_fallocate"):  # not on macOS; a map that outgrows its disk would kill us
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    lengths = np.zeros(len(rows), np.int64)

    def convert_chunk(first: int) -> list[tuple[int, str]]:
        """Fill some rows, and return which of them are bad, and why."""
        bad = []
        for row, sample in enumerate(rows[first : first + _CHUNK]["sample"], first):
            try:
                if sample is None or labels[row] < 0:
                    raise ValueError("it has no sample or no label")
                array = np.asarray(convert(sample))
                inputs[row, : len(array)] = array
                inputs[row, len(array) :] = filler
                lengths[row] = len(array)
            except Exception as error:  # libraries raise anything of damaged samples
                bad.append((row, first_line(error)))
        return bad

    pool, console = ThreadPoolExecutor(), Console(stderr=True)
    chunks = range(0, len(rows), _CHUNK)
    results: Iterable[list[tuple[int, str]]] = pool.map(convert_chunk, chunks)
    if console.is_terminal:
        results = track(results, part, len(chunks), console=console, transient=True)
    try:
        for bad in results:
            if bad and not skip_bad:
                row, reason = bad[0]
                raise UsageError(
                    f"data: row {row} of {part} cannot be used ({reason}); skip-bad = true leaves "
                    "such rows out"
                )
    finally:
        pool.shutdown(cancel_futures=True)
    good = lengths > 0
    skipped = len(rows) - int(good.sum())
    if skipped == len(rows):
        raise UsageError(f"data: none of the {skipped} rows of {part} can be used")
    if skipped:
        _LOG.warning("left out %d of %d rows of %s that cannot be used", skipped, len(rows), part)
    if skipped or lengths.max() < shape[0]:
        kept = path.with_suffix(".kept.npy")  # beside the file that is mapped still
        np.save(kept, inputs[good, : lengths.max()])
        kept.replace(path)
    np.save(folder / f"{part}_labels.npy", labels[good])
    return skipped


def _labels_of(split: Any) -> npt.NDArray[np.int64]:
    """Return the labels of a split, negative where there is none.

    A csv file with an empty cell has decimals in the whole column: they are taken if whole.
    """
    column = split.select_columns(["label"]).with_format("arrow")[:].column("label")
    labels: npt.NDArray[np.int64] = column.cast("int64").fill_null(-1).to_numpy()
    return labels
