"""Small folders of texts for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict

CLASS_NAMES = ("World", "Sports", "Business", "Sci/Tech")

TRAIN = [
    ("The vote in the capital", 0),
    ("The match in the rain", 1),
    ("Shares of the bank fall", 2),
    ("The chip in the phone", 3),
    ("A vote, a capital", 0),
    ("A bank in the rain", 2),
]
TEST = [("The vote", 0), ("The match", 1), ("The bank", 2)]
"""Rows of text and label."""


def make_texts(
    folder: Path,
    train: Sequence[tuple[Any, Any]] = TRAIN,
    test: Sequence[tuple[Any, Any]] = TEST,
    *,
    names: Sequence[str] = (),
    kind: str = "parquet",
) -> Path:
    """Write rows as a data set in a folder: parquet, csv, or as ``save_to_disk`` does."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, rows in (("train", train), ("test", test)):
        columns = {"text": [row[0] for row in rows], "label": [row[1] for row in rows]}
        splits[split] = Dataset.from_dict(columns)
        if names:
            splits[split] = splits[split].cast_column("label", ClassLabel(names=list(names)))
    if kind == "saved":
        DatasetDict(splits).save_to_disk(str(folder))
        return folder
    for split, table in splits.items():
        if kind == "csv":
            table.to_csv(str(folder / f"{split}.csv"))
        else:
            table.to_parquet(str(folder / f"{split}.parquet"))
    return folder
