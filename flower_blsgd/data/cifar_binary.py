"""The binary versions of CIFAR-10 and CIFAR-100: rows of labels and pixels, without a header.

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .image_split import ImageSplit, JoinedSplit
from .published_folder import published_folder, read_lines, unusable
from .source import DataSource

_log = logging.getLogger(__name__)

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarFiles:
    """Which files make up a data set.

    Parameters
    ----------
    title : str
        For messages.
    folder, python_folder : str
        What the folders are called when the archives are unpacked.
    python_marks : tuple of str
        Files that tell the Python version, without an ending.
    train, test : tuple of str
        The files of a split, in order.
    names : str
        The file with the names of the classes.
    num_labels : int
        Bytes before the pixels of a row; the last of them is the label.
    num_classes : int
        Labels are less than that.
    """

    title: str
    folder: str
    python_folder: str
    python_marks: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    num_labels: int
    num_classes: int


CIFAR10_FILES = CifarFiles(
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    python_marks=("data_batch_1",),
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test=("test_batch.bin",),
    names="batches.meta.txt",
    num_labels=1,
    num_classes=10,
)

CIFAR100_FILES = CifarFiles(
    title="CIFAR-100",
    folder="cifar-100-binary",
    python_folder="cifar-100-python",
    python_marks=("train", "meta"),
    train=("train.bin",),
    test=("test.bin",),
    names="fine_label_names.txt",
    num_labels=2,
    num_classes=100,
)


def cifar_splits(files: CifarFiles, source: DataSource) -> Mapping[str, ImageSplit] | None:
    """Return the splits ``train`` and ``test`` of a folder; None if it has other files.

    Raises
    ------
    UsageError
        If it is the Python version, which is pickles, or a file is missing or damaged.
    """
    folder = published_folder(source, files.folder, files.train[0])
    if folder is None:
        _refuse_pickles(files, source)
        return None
    names: tuple[str, ...] = ()
    if (folder / files.names).is_file():
        names = tuple(read_lines(source, folder / files.names))
    return {
        name: _split(files, source, name, [folder / file for file in which], names)
        for name, which in (("train", files.train), ("test", files.test))
    }


def _refuse_pickles(files: CifarFiles, source: DataSource) -> None:
    folders = [published_folder(source, files.python_folder, mark) for mark in files.python_marks]
    if all(folders):
        raise UsageError(
            f"{source.said}: {folders[0]} holds pickles ({files.title}'s Python version), which "
            f"can run code and are not read; expected {source.layout}"
        )


def _split(
    files: CifarFiles,
    source: DataSource,
    name: str,
    paths: Sequence[Path],
    class_names: tuple[str, ...],
) -> ImageSplit:
    parts = [_part(files, source, name, path) for path in paths]
    lengths = {path.name: len(part) for path, part in zip(paths, parts, strict=True)}
    if len(set(lengths.values())) > 1:
        _log.warning(
            "%s: files of %s have different numbers of images, one may be cut off: %s",
            source.said,
            name,
            ", ".join(f"{path} {length:,}" for path, length in lengths.items()),
        )
    joined = JoinedSplit(name, parts)
    return ImageSplit(name, joined.labels, class_names, joined.stored)


def _part(files: CifarFiles, source: DataSource, name: str, path: Path) -> ImageSplit:
    row_bytes = files.num_labels + _PIXELS
    try:
        size = path.stat().st_size
        if size == 0 or size % row_bytes:
            raise unusable(source, path, f"has {size} bytes, which are not rows of {row_bytes}")
        rows: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r").reshape(-1, row_bytes)
    except OSError as error:
        raise unusable(source, path, f"cannot be read ({error.strerror})") from None
    labels = rows[:, files.num_labels - 1].astype(np.int64)
    if labels.max() >= files.num_classes:
        row = int(labels.argmax())
        raise unusable(
            source,
            path,
            f"has the label {labels[row]} in row {row}; {files.title} has up to "
            f"{files.num_classes - 1}",
        )

    def stored(first: int, last: int) -> Sequence[npt.NDArray[np.uint8]]:
        return list(rows[first:last, files.num_labels :].reshape(-1, *_SHAPE))

    return ImageSplit(name, labels, (), stored)
