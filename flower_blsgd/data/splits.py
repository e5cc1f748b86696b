"""Conversion of a data set's tables to arrays of samples and labels."""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap
from rich.console import Console
from rich.progress import track

from ..errors import UsageError, first_line
from ..files import written_whole
from .cache import Prepared, prepared
from .source import COLUMNS, DataSource

_LOG = logging.getLogger(__name__)

_CHUNK = 32
"""Rows per unit of work of a thread."""

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
"""Number without leading zeros, which would be a name such as "007"."""

Convert = Callable[[Any], npt.ArrayLike]
"""Converts a sample to an array; raises any error for a bad one."""


def prepared_rows(
    source: DataSource,
    options: Mapping[str, Any],
    converter: Callable[[Any, Path], tuple[Convert, tuple[int, ...], Mapping[str, Any]]],
    dtype: npt.DTypeLike,
    *,
    filler: int = 0,
    again: bool = False,
) -> Prepared:
    """Return the arrays of a data set; see `prepared` and `write_part`.

    ``converter(training rows, folder)`` returns the `Convert` function, the largest shape of one
    input, and facts of `Write`; it may write to the folder.
    """

    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        source.check_libraries()
        tables = source.tables(scratch)
        parts, num_classes = read_parts(source, tables)
        columns = {split: _columns(source, table) for split, table in tables.items()}
        convert, shape, facts = converter(parts["train"], folder)
        skipped = {
            part: write_part(rows, folder, part, convert, shape, dtype, source, columns, filler)
            for part, rows in parts.items()
        }
        return {"num_classes": num_classes, "skipped": skipped, **facts}

    rows = {"skip_bad": source.skip_bad, "max_samples": source.max_samples}
    options = {**options, "classes": source.num_classes, **rows}
    found = prepared(source, options, write, again)
    if source.needs_test and not found.has_test:
        raise _no_split(source, source.test[0], ["train"])
    return found


def read_parts(source: DataSource, tables: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the rows of each part of a data set, and the number of classes of all splits.

    A part is a ``datasets.Dataset`` with the columns ``sample`` and ``label``; images are encoded.
    Without a test split, if that is allowed, there is only the part ``train``. UsageError if the
    splits or their classes cannot be used.
    """
    from datasets import Image, concatenate_datasets

    names = {"train": source.train, "test": source.test}
    if source.test == ("test",) and "test" not in tables:
        names["test"] = ("validation",) if "validation" in tables else source.test
    if not source.needs_test and not set(names["test"]) & set(tables):
        del names["test"]
    splits = {}
    for split in dict.fromkeys(split for part in names.values() for split in part):
        if split not in tables:
            raise _no_split(source, split, tables)
        table = tables[split]
        known = _columns(source, table)
        if not all(known) or not len(table):
            raise UsageError(
                f"{source.setting}: {split} has {len(table)} rows of the columns "
                f"{', '.join(table.column_names)}; expected {source.layout}"
            )
        renamed = dict(zip(known, ("sample", "label"), strict=True))
        splits[split] = table.select_columns(known).rename_columns(renamed)
        if source.noun == "texts":
            splits[split] = as_texts(source, split, splits[split], "sample", known[0])
        if isinstance(splits[split].features["sample"], Image):
            # Otherwise one damaged image makes its whole chunk unreadable.
            splits[split] = splits[split].cast_column("sample", Image(decode=False))
    splits = _number_classes(
        source, splits, {split: _columns(source, tables[split])[1] for split in splits}
    )
    num_classes = _count_classes(source, splits)
    joined = {}
    for part, chosen in names.items():
        try:
            rows = concatenate_datasets([_with_origin(splits[split], split) for split in chosen])
        except ValueError as error:
            raise UsageError(
                f"{source.setting}: {' and '.join(chosen)} cannot be joined ({first_line(error)}); "
                "save them with columns of the same types"
            ) from None
        count = min(source.max_samples or len(rows), len(rows))
        labels = _labels_of(rows)
        in_blocks = (np.diff(labels) != 0).sum() < len(np.unique(labels))  # as of image folders
        step = len(rows) if in_blocks else count
        joined[part] = rows.select(np.arange(count) * step // count)
    return joined, num_classes


def _columns(source: DataSource, table: Any) -> list[str]:
    """Return the names of the columns of samples and of labels; empty if missing."""
    return [
        next((name for name in names if name in table.column_names), "")
        for names in COLUMNS[source.noun]
    ]


def _no_split(source: DataSource, split: str, found: Iterable[str]) -> UsageError:
    return UsageError(
        f"{source.setting}: no {split} split, found {', '.join(found)}; expected {source.layout}"
    )


def _with_origin(table: Any, split: str) -> Any:
    """Return a split with its name and the number of each row, for messages."""
    count = len(table)
    return table.add_column("split", np.full(count, split)).add_column("row", np.arange(count))


def as_texts(source: DataSource, split: str, table: Any, column: str, name: str) -> Any:
    """Return a split whose column consists of strings and None; numbers are written out.

    UsageError if there are other values; `name` is that of the column in messages.
    """
    if "string" in str(getattr(table.features[column], "dtype", "")):
        return table
    values = table[column][:]
    for row, value in enumerate(values):
        if not isinstance(value, str | int | float | None):
            raise _bad_value(source, split, row, name, value, "is no text")
    texts = [value if isinstance(value, str | None) else json.dumps(value) for value in values]
    return table.remove_columns(column).add_column(column, texts)


def _bad_value(
    source: DataSource, split: str, row: int, column: str, value: Any, why: str
) -> UsageError:
    where = source.where(split, row)
    return UsageError(f"{source.setting}: {where}: {column} = {value!r} {why}; correct it")


def _labels_as_read(source: DataSource, name: str, split: Any, column: str) -> list[Any]:
    """Return the labels of a split, None for a missing one; UsageError if they differ in type."""
    labels = [
        None if label in (None, "") or (isinstance(label, float) and math.isnan(label)) else label
        for label in split["label"][:]
    ]
    kind = next((type(label) for label in labels if label is not None), str)
    for row, label in enumerate(labels):
        if label is not None and (type(label) is not kind or kind in (list, dict)):
            why = "has another type than the labels before, or no simple one"
            raise _bad_value(source, name, row, column, label, why)
    return labels


def _number_classes(
    source: DataSource, splits: Mapping[str, Any], columns: Mapping[str, str]
) -> dict[str, Any]:
    """Return the splits with labels that are numbers from 0, or -1 if they are missing.

    Labels of named classes, and those that count from 0 without gaps, stay as they are. Other
    integers are numbered in ascending order, and strings in alphabetical order. -1 is a class if
    there are training samples of it, and else a missing label.
    """
    if any(hasattr(split.features["label"], "names") for split in splits.values()):
        return dict(splits)
    labels = {
        name: _labels_as_read(source, name, split, columns[name]) for name, split in splits.items()
    }
    numeric = all(map(_NUMBER.fullmatch, map(str, set().union(*labels.values()) - {None})))
    for name, column in labels.items():
        for row, label in enumerate(column):
            if label is not None and numeric and not float(label).is_integer():
                raise _bad_value(source, name, row, columns[name], label, "is not an integer")
            if label is not None:
                column[row] = int(float(label)) if numeric else str(label)
    classes = sorted({label for name in source.train for label in labels[name]} - {None})
    used = set().union(*labels.values()) - {None} - ({-1} - set(classes) if numeric else set())
    if numeric and used in (set(range(len(used))), used & set(range(source.num_classes or 0))):
        numbers = {label: label for label in used}
    else:
        numbers = {label: number for number, label in enumerate(classes)}
        for name, column in labels.items():
            if more := sorted((used & set(column)) - set(classes)):
                raise UsageError(
                    f"{source.setting}: {name} has classes that {' and '.join(source.train)} does "
                    f"not have: {', '.join(map(str, more[:5]))}; use the same classes in both"
                )
        if numeric:
            shown = ", ".join(map(str, classes[:5])) + ", ..." * (len(classes) > 5)
            _LOG.warning("%s: labels %s are numbered from 0", source.setting, shown)
    return {
        name: split.remove_columns("label").add_column(
            "label", np.array([numbers.get(label, -1) for label in labels[name]], np.int64)
        )
        for name, split in splits.items()
    }


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
            f"{source.setting}: labels must be integers that number the classes from 0 "
            f"({first_line(error)})"
        ) from None
    names = next(iter(named), ())
    count = len(names) or highest + 1
    if highest >= count or not (count == expected if expected else count >= 2):
        wanted = f"the {expected} of {source.name}" if expected else "at least 2"
        raise UsageError(
            f"{source.setting}: wrong number of classes: found {count} and labels up to {highest}, "
            f"expected {wanted}, counted from 0; correct the labels, or name a folder with "
            f"{source.layout}"
        )
    return count


def write_part(
    rows: Any,
    folder: Path,
    part: str,
    convert: Convert,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    source: DataSource,
    columns: Mapping[str, Sequence[str]],
    filler: int = 0,
) -> int:
    """Write ``<part>_inputs.npy`` and ``<part>_labels.npy``; return the number of skipped rows.

    Labels are int64 of shape (rows,). `convert` converts a sample to an array of at most `shape`
    and is called by many threads. Shorter arrays are padded with `filler`. If all arrays are
    shorter in the first dimension, the result is too. A row is bad if `convert` raises an error, or
    if it has no sample or no label. It is named by its file and by the `columns` of its split.

    UsageError if a row is bad; if the source skips bad rows, only if all are.
    """
    path = folder / f"{part}_inputs.npy"
    labels = _labels_of(rows)
    inputs: np.memmap[Any, np.dtype[Any]] = open_memmap(
        path, mode="w+", dtype=dtype, shape=(len(rows), *shape)
    )
    # On a full disk, a memory map would kill the process.
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    lengths = np.zeros(len(rows), np.int64)

    def convert_chunk(first: int) -> list[tuple[int, bool, str]]:
        """Fill some rows; return the bad ones, whether the label is bad, and the reason."""
        bad = []
        for row, sample in enumerate(rows[first : first + _CHUNK]["sample"], first):
            of_label = sample is not None and bool(labels[row] < 0)
            try:
                if sample is None or of_label:
                    raise ValueError("it is missing")
                array = np.asarray(convert(sample))
                inputs[row, : len(array)] = array
                inputs[row, len(array) :] = filler
                lengths[row] = len(array)
            except Exception as error:  # libraries raise any kind for damaged samples
                bad.append((row, of_label, first_line(error)))
        return bad

    pool, console = ThreadPoolExecutor(), Console(stderr=True)
    chunks = range(0, len(rows), _CHUNK)
    results: Iterable[list[tuple[int, bool, str]]] = pool.map(convert_chunk, chunks)
    if console.is_terminal:
        results = track(results, part, len(chunks), console=console, transient=True)
    try:
        for bad in results:
            if bad and not source.skip_bad:
                row, of_label, reason = bad[0]
                split, number = rows.select_columns(["split", "row"])[row].values()
                raise UsageError(
                    f"{source.setting}: {source.where(split, number)}: {columns[split][of_label]} "
                    f"cannot be used ({reason}); skip-bad = true skips such rows"
                )
    finally:
        pool.shutdown(cancel_futures=True)
    good = lengths > 0
    skipped = len(rows) - int(good.sum())
    if skipped == len(rows):
        raise UsageError(f"{source.setting}: none of the {skipped} rows of {part} can be used")
    if skipped:
        _LOG.warning("skipped %d of %d rows of %s that cannot be used", skipped, len(rows), part)
    if skipped or lengths.max() < shape[0]:
        with written_whole(path) as kept:  # the original is still mapped
            _save_rows(kept, inputs[:, : lengths.max()], np.flatnonzero(good))
    np.save(folder / f"{part}_labels.npy", labels[good])
    return skipped


def _save_rows(
    path: Path, array: npt.NDArray[Any], rows: npt.NDArray[np.int64], most: int = 1024
) -> None:
    """Save some rows of an array as `np.save` does, without all of them in memory."""
    with path.open("wb") as file:
        shape = (len(rows), *array.shape[1:])
        header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, len(rows), most):
            file.write(array[rows[first : first + most]].tobytes())


def _labels_of(split: Any) -> npt.NDArray[np.int64]:
    """Return the labels of a split, -1 for a missing label."""
    column = split.select_columns(["label"]).with_format("arrow")[:].column("label")
    labels: npt.NDArray[np.int64] = column.cast("int64").fill_null(-1).to_numpy()
    return labels
