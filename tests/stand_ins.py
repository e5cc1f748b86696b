"""Stand-ins for the paper's data sets: few rows of noise, in the layout that the hub has."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pillow

WORDS = {
    "World": "minister election border treaty president",
    "Sports": "match goal season coach league",
    "Business": "shares profit market bank oil",
    "Sci/Tech": "software chip internet space phone",
}
"""Of each class of AG News some that occur in no other."""


IMAGES = {
    "cifar10": ("img", ("label",), 10, (32, 32), ("train", "test")),
    "cifar100": ("img", ("fine_label", "coarse_label"), 100, (32, 32), ("train", "test")),
    "tiny-imagenet": ("image", ("label",), 200, (64, 64), ("train", "valid")),
    "flowers102": ("image", ("label",), 102, (310, 270), ("train", "validation", "test")),
}
"""Columns of images and labels, number of classes, size of the images, splits."""


def write_stand_in(task: str, folder: Path, train: int = 64, test: int = 16) -> Path:
    """Write parquet files that look like the hub's; labels count 0, 1, 2, ..."""
    if task == "ag-news":
        return _write_texts(folder, train, test)
    image, labels, classes, size, names = IMAGES[task]
    features: dict[str, Any] = {image: Image()}
    for label in labels:
        count = 20 if label == "coarse_label" else classes
        features[label] = ClassLabel(names=[f"{label} {k}" for k in range(count)])
    for split in names:
        rows = train if split == "train" else test
        numbers = range(rows)
        columns: dict[str, list[Any]] = {image: [_picture(split, k, size) for k in numbers]}
        for label in labels:
            columns[label] = [k % features[label].num_classes for k in numbers]
        _write(folder, split, columns, Features(features))
    return folder


def _write_texts(folder: Path, train: int, test: int) -> Path:
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(WORDS))})
    for split, rows in (("train", train), ("test", test)):
        rng = np.random.default_rng([rows, len(split)])
        labels = [k % len(WORDS) for k in range(rows)]
        texts = [" ".join(rng.choice(list(WORDS.values())[k].split(), 12)) for k in labels]
        _write(folder, split, {"text": texts, "label": labels}, features)
    return folder


def _picture(split: str, number: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return noise whose brightness tells the class a little."""
    rng = np.random.default_rng([number, len(split)])
    coarse = rng.integers(0, 200, (8, 8, 3)) + 5 * (number % 10)
    buffer = io.BytesIO()
    Pillow.fromarray(coarse.astype(np.uint8)).resize(size).save(buffer, "JPEG")
    return {"bytes": buffer.getvalue(), "path": None}


def _write(folder: Path, split: str, columns: dict[str, list[Any]], features: Features) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    table = Dataset.from_dict(columns, features=features)
    table.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
