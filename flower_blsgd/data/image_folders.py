"""Folders of images: their splits, and a folder for each class."""

import itertools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError

_LOG = logging.getLogger(__name__)

VALIDATION = dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""Names of the validation split."""

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **VALIDATION,
}
"""Splits by the words in the names of their folders."""


def split_of(name: str) -> str:
    """Return the split in the words of a path, such as ``"train"`` for "Training set", or ""."""
    words = {SPLITS[word] for word in re.split(r"[-._ 0-9/]+", name.lower()) if word in SPLITS}
    return words.pop() if len(words) == 1 else ""


def image_tables(
    datasets: Any,
    folder: Path,
    setting: str,
    train: Sequence[str],
    paths: Sequence[str],
    found: Sequence[str],
) -> Mapping[str, Any]:
    """Return the images of each split of a folder with their classes.

    Splits are the folders with names of splits; without any, all images are for training. The
    class is the folder directly below. ``datasets`` would take the innermost folder, and leave
    out linked folders and names that begin with a dot or two underscores.

    `paths` are those of all files and, with a slash at the end, of all folders; the images are
    `found` among them. UsageError, which begins with the `setting`, if they cannot be placed.
    """
    common = os.path.commonpath([os.path.dirname(path) for path in found])
    parts = filter(None, common.split("/"))
    above = [*itertools.takewhile(lambda name: not split_of(name), parts)]
    names_of = {path: path.split("/")[:-1] for path in paths}
    skip = len(above)
    folders = {path: its[skip:] for path, its in names_of.items() if its[:skip] == above}
    tops = {tuple(folders[path][:2]) for path in found} - {()}
    divided = any(split_of(top[0]) for top in tops if len(top) > 1) or (
        bool(tops) and all(split_of(top[0]) for top in tops)
    )
    exact = {SPLITS[top[0].lower()] for top in tops if top[0].lower() in SPLITS}
    images, unread = set(found), set()
    splits: dict[str, dict[str, list[str]]] = {}  # paths of each class of each split
    for path, names in folders.items():
        top = "".join(names[:1])
        below = names[divided:]
        split = split_of(top) if divided else "train"
        if divided and split in exact and top.lower() not in SPLITS:
            split = ""  # such as "train_masks" next to "train"
        if path in images and not split:
            unread.add(path)
        elif path in images:
            if not below or (not divided and any(name in SPLITS for name in below[1:])):
                raise UsageError(
                    f"{setting}: {path} is in no class of a split; put every image into "
                    "the folder of its class, such as train/<class>/*.png"
                )
            splits.setdefault(split, {}).setdefault(below[0], []).append(path)
        elif path.endswith("/") and split and len(below) == 1 and below[0][0] != ".":
            splits.setdefault(split, {}).setdefault(below[0], [])
    if unread:
        _LOG.warning("%s: images next to the splits are not used, such as %s", setting, min(unread))
    known = {name for split in train for name in splits.get(split, ())}
    for split, classes in splits.items():
        if more := sorted(classes.keys() - known):
            raise UsageError(
                f"{setting}: {split} has classes without training images: "
                f"{', '.join(more)}; use the same class folders in {train[0]} and {split}"
            )
        if empty := sorted(name for name in classes if not classes[name]):
            raise UsageError(
                f"{setting}: the class folder {empty[0]} of {split} has no images; add "
                "some, or remove it"
            )
    numbers = {name: number for number, name in enumerate(sorted(known))}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(numbers))}
    tables = {}
    for split, classes in splits.items():
        rows = sorted((path, numbers[name]) for name in classes for path in classes[name])
        columns = {
            "image": [f"{folder}/{path}" for path, _ in rows],
            "label": [number for _, number in rows],
        }
        tables[split] = datasets.Dataset.from_dict(columns, datasets.Features(features))
    return tables
