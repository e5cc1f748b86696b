"""Read image data sets in the form in which their authors publish them.

Each function returns the splits of a folder, or None if the folder holds something else, and
raises UsageError if files are missing, damaged or contradict each other.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .source import DataSource
from .splits import Split, join_splits

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_PIXELS = 3 * 32 * 32


def cifar10_splits(source: DataSource) -> Mapping[str, Split] | None:
    """Return ``train`` and ``test`` of CIFAR-10's binary version.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """
    folder = _published_folder(source, "cifar-10-batches-bin", "data_batch_1.bin")
    if folder is None:
        return None
    with _refusing_damage(source):
        meta = folder / "batches.meta.txt"
        names = tuple(_lines(meta)) if meta.is_file() else ()
        train = [
            _cifar_split("train", folder / f"data_batch_{number}.bin", 1, 10, names)
            for number in range(1, 6)
        ]
        test = _cifar_split("test", folder / "test_batch.bin", 1, 10, names)
        return {"train": join_splits(train), "test": test}


def cifar100_splits(source: DataSource) -> Mapping[str, Split] | None:
    """Return ``train`` and ``test`` of CIFAR-100's binary version, with the fine labels.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """
    folder = _published_folder(source, "cifar-100-binary", "train.bin")
    if folder is None:
        return None
    with _refusing_damage(source):
        return {
            name: _cifar_split(name, folder / f"{name}.bin", 2, 100) for name in ("train", "test")
        }


def flowers_splits(source: DataSource) -> Mapping[str, Split] | None:
    """Return ``train``, ``validation`` and ``test`` of Oxford Flowers-102, as torchvision keeps it.

    Images are in the order of the published lists; labels 1 to 102 become 0 to 101.
    Source: https://www.robots.ox.ac.uk/~vgg/data/flowers/102/
    """
    folder = _published_folder(source, "flowers-102", "setid.mat")
    if folder is None:
        return None
    splits = {}
    with _refusing_damage(source):
        labels = _matlab_numbers(folder / "imagelabels.mat", "labels")
        for name, variable in (("train", "trnid"), ("validation", "valid"), ("test", "tstid")):
            numbers = _matlab_numbers(folder / "setid.mat", variable)
            paths = [folder / "jpg" / f"image_{number:05}.jpg" for number in numbers]
            splits[name] = _files_split(name, paths, labels[numbers - 1] - 1, ())
    return splits


def tiny_imagenet_splits(source: DataSource) -> Mapping[str, Split] | None:
    """Return ``train`` and ``valid`` of Tiny ImageNet, as its archive unpacks.

    Labels count the WordNet ids in alphabetical order, as the copy on the Hugging Face hub does;
    images of a class and of the validation split are in the order of their names.
    Source: http://cs231n.stanford.edu/tiny-imagenet-200.zip
    """
    folder = _published_folder(source, "tiny-imagenet-200", "wnids.txt")
    if folder is None:
        return None
    with _refusing_damage(source):
        names = tuple(sorted(set(_lines(folder / "wnids.txt"))))
        train = [
            (path, label)
            for label, name in enumerate(names)
            for path in _jpegs(folder / "train" / name / "images")
        ]
        annotations = folder / "val" / "val_annotations.txt"
        classes = dict(line.split("\t")[:2] for line in sorted(_lines(annotations)))
        if not classes or not set(classes.values()) <= set(names):
            raise ValueError(f"{annotations} must name a class of wnids.txt for each image")
        valid = [
            (folder / "val" / "images" / file, names.index(name)) for file, name in classes.items()
        ]
    return {
        split: _files_split(
            split, [path for path, _ in pairs], np.array([label for _, label in pairs]), names
        )
        for split, pairs in (("train", train), ("valid", valid))
    }


def _cifar_split(
    name: str, path: Path, num_labels: int, num_classes: int, class_names: tuple[str, ...] = ()
) -> Split:
    """Read rows of labels, of which the last counts, and pixels, without a header."""
    row_bytes = num_labels + _CIFAR_PIXELS
    size = path.stat().st_size
    if size == 0 or size % row_bytes:
        raise ValueError(f"{path} has {size} bytes, which are not rows of {row_bytes}")
    rows: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r").reshape(-1, row_bytes)
    labels = rows[:, num_labels - 1].astype(np.int64)
    if labels.max() >= num_classes:
        row = int(labels.argmax())
        raise ValueError(
            f"{path} has the label {labels[row]} in row {row}, of up to {num_classes - 1}"
        )

    def stored(first: int, last: int) -> Sequence[npt.NDArray[np.uint8]]:
        return list(rows[first:last, num_labels:].reshape(-1, *_CIFAR_SHAPE))

    return Split(name, labels, class_names, stored)


def _files_split(
    name: str, paths: Sequence[Path], labels: npt.NDArray[np.int64], class_names: tuple[str, ...]
) -> Split:
    """Return a split of images in files of their own."""

    def stored(first: int, last: int) -> Sequence[Mapping[str, str | None]]:
        return [{"bytes": None, "path": str(path)} for path in paths[first:last]]

    return Split(name, labels.astype(np.int64), class_names, stored)


def _matlab_numbers(path: Path, variable: str) -> npt.NDArray[np.int64]:
    """Return the numbers of a variable of a MATLAB file, which count from 1."""
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=[variable])[variable]
        numbers: npt.NDArray[np.int64] = np.asarray(found).reshape(-1).astype(np.int64)
    except Exception as error:  # scipy does not document what it raises of a damaged file
        raise ValueError(f"{variable} of {path} cannot be read ({error})") from None
    if not len(numbers) or numbers.min() < 1:
        raise ValueError(f"{path} has no numbers from 1 on in {variable}")
    return numbers


def _jpegs(folder: Path) -> list[Path]:
    jpegs = sorted(path for path in folder.glob("*.JPEG") if not path.name.startswith("."))
    if not jpegs:
        raise ValueError(f"{folder} holds no *.JPEG")
    return jpegs


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not empty."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def _published_folder(source: DataSource, name: str, mark: str) -> Path | None:
    """Return the folder with the file `mark`: the one that was given, or the one `name` in it."""
    if source.folder is None:
        return None
    folders = (source.folder, source.folder / name)
    return next((folder for folder in folders if (folder / mark).is_file()), None)


@contextlib.contextmanager
def _refusing_damage(source: DataSource) -> Iterator[None]:
    """Raise what is wrong with the files of an archive as one line for the user."""
    try:
        yield
    except (OSError, ValueError, IndexError) as error:  # the latter: images without labels
        raise UsageError(
            f"{source.setting}: {error}; unpack the archive again, or name another folder"
        ) from None
