"""Tiny ImageNet as its archive unpacks: ``tiny-imagenet-200``.

Source: http://cs231n.stanford.edu/tiny-imagenet-200.zip
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .image_split import ImageSplit
from .published_folder import published_folder, read_lines, unusable
from .source import DataSource

FOLDER = "tiny-imagenet-200"
"""What the archive makes."""

_CLASSES = "wnids.txt"
_ANNOTATIONS = "val_annotations.txt"
_ENDING = ".JPEG"
_VALID_PLACES = ("images/{file}", "{name}/{file}", "{name}/images/{file}")
"""Where the images to validate on are: as published, or sorted into classes as many scripts do."""


def tiny_imagenet_splits(source: DataSource) -> Mapping[str, ImageSplit] | None:
    """Return the splits ``train`` and ``valid`` of a folder; None if it has other files.

    Labels count the WordNet ids in the order of the alphabet, as the hub's copy does, and
    images of a split are in the order of their names.

    Raises
    ------
    UsageError
        If files are missing or contradict each other.
    """
    folder = published_folder(source, FOLDER, _CLASSES)
    if folder is None:
        return None
    names = tuple(sorted(set(read_lines(source, folder / _CLASSES))))
    labels = {name: label for label, name in enumerate(names)}
    train = [
        (path, label)
        for name, label in labels.items()
        for path in _files(source, folder / "train" / name / "images")
    ]
    valid = _annotated(source, folder / "val", labels)
    return {
        "train": _split("train", train, names),
        "valid": _split("valid", valid, names),
    }


def _annotated(
    source: DataSource, folder: Path, labels: Mapping[str, int]
) -> list[tuple[str, int]]:
    told = folder / _ANNOTATIONS
    files = {}
    for number, line in enumerate(read_lines(source, told), start=1):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in labels:
            raise unusable(source, told, f"names no class of {_CLASSES} in line {number}")
        files[words[0]] = words[1]
    if not files:
        raise unusable(source, told, "is empty")
    first, name = next(iter(files.items()))
    places = [p for p in _VALID_PLACES if (folder / p.format(file=first, name=name)).is_file()]
    if not places:
        raise unusable(source, folder / "images" / first, f"of {_ANNOTATIONS} is missing")
    return [
        (str(folder / places[0].format(file=file, name=name)), labels[name])
        for file, name in sorted(files.items())
    ]


def _files(source: DataSource, folder: Path) -> list[str]:
    try:
        files = sorted(
            entry.path
            for entry in os.scandir(folder)
            if entry.name.endswith(_ENDING) and not entry.name.startswith(".")
        )
    except OSError as error:
        raise unusable(source, folder, f"cannot be read ({error.strerror})") from None
    if not files:
        raise unusable(source, folder, f"holds no *{_ENDING}")
    return files


def _split(name: str, pairs: Sequence[tuple[str, int]], class_names: tuple[str, ...]) -> ImageSplit:
    def stored(first: int, last: int) -> Sequence[Any]:
        return [{"bytes": None, "path": path} for path, _ in pairs[first:last]]

    labels = np.array([label for _, label in pairs], np.int64)
    return ImageSplit(name, labels, class_names, stored)
