"""Image data sets: those we know by name, and their images as arrays on disk."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .cache import SCRATCH, Contents, OnItems, Preparation, Prepared, prepared
from .image_archives import cifar10_splits, cifar100_splits, flowers_splits, tiny_imagenet_splits
from .image_decoding import decode_split
from .source import DataSource, find_source
from .splits import (
    NO_LABEL,
    Split,
    find_classes,
    find_column,
    join_splits,
    table_split,
    warn_of_unseen_classes,
)

_IMAGE_COLUMNS = ("img", "image")

ArchiveReader = Callable[[DataSource], Mapping[str, Split] | None]
"""Reads a folder in the form in which a data set was published; None of any other folder."""


@dataclass(frozen=True)
class ImageData:
    """A data set of images.

    Parameters
    ----------
    name : str
        The task.
    hf_hub_name : str
        What the Hugging Face hub calls it.
    side : int
        Height and width of the images as they are stored.
    num_classes : int, optional
        How many it must have; None for any number.
    train, test : tuple of str
        The splits to train and to test on; several are joined in this order.
    label_column : str (default: "label")
        Where the labels are.
    archive : callable, optional
        Reads its published form from a folder.
    archive_layout : str (default: "")
        What that is, for messages.
    """

    name: str
    hf_hub_name: str
    side: int
    num_classes: int | None
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_column: str = "label"
    archive: ArchiveReader | None = None
    archive_layout: str = ""

    @property
    def layout(self) -> str:
        """What a folder must look like."""
        names = (*self.train, *self.test)
        files = " and ".join(f"{name}-*.parquet" for name in names)
        folders = " and ".join(f"{name}/<class>/*.png" for name in names)
        forms = [
            f"{files} with columns img or image, and {self.label_column}",
            f"image folders {folders}",
            "what datasets' save_to_disk wrote",
            *filter(None, [self.archive_layout]),
        ]
        return ", or ".join(forms)


CIFAR10 = ImageData(
    name="cifar10",
    hf_hub_name="uoft-cs/cifar10",
    side=32,
    num_classes=None,
    train=("train",),
    test=("test",),
    archive=cifar10_splits,
    archive_layout="the binary version (data_batch_1.bin; the Python version's pickles are unsafe)",
)
"""50,000 + 10,000 photographs of ten things, or one's own in its layout."""

CIFAR100 = ImageData(
    name="cifar100",
    hf_hub_name="uoft-cs/cifar100",
    side=32,
    num_classes=100,
    train=("train",),
    test=("test",),
    label_column="fine_label",
    archive=cifar100_splits,
    archive_layout="the binary version (train.bin; the Python version's pickles are unsafe)",
)
"""50,000 + 10,000 photographs of a hundred things; of the two kinds of labels the fine one."""

TINY_IMAGENET = ImageData(
    name="tiny-imagenet",
    hf_hub_name="zh-plus/tiny-imagenet",
    side=64,
    num_classes=200,
    train=("train",),
    test=("valid",),
    archive=tiny_imagenet_splits,
    archive_layout="the published folder (tiny-imagenet-200)",
)
"""100,000 + 10,000 photographs of 200 things; what it calls test has no labels."""

_FLOWERS102 = ImageData(
    name="flowers102",
    hf_hub_name="dpdl-benchmark/oxford_flowers102",
    side=256,
    num_classes=102,
    train=("train",),
    test=("test",),
    archive=flowers_splits,
    archive_layout="the published files (jpg, imagelabels.mat and setid.mat)",
)

FLOWERS102: Mapping[str, ImageData] = {
    "official": _FLOWERS102,
    "paper": dataclasses.replace(_FLOWERS102, train=("train", "test"), test=("validation",)),
}
"""8,189 photographs of flowers, cut into 1,020 + 6,149 as published (validation is not used), or
into 7,169 + 1,020 as the paper must have cut them. The Hugging Face hub's copy keeps them as PNG:
3.4 GB, ten times the published files."""


def prepared_images(
    images: ImageData,
    data: str = "",
    *,
    skip_bad: bool = False,
    max_samples: int = 0,
    again: bool = False,
) -> Prepared:
    """Return the decoded images of a data set, preparing them if that was not done yet.

    Parameters
    ----------
    images : ImageData
        Which.
    data : str (default: "")
        A folder with images; empty for the Hugging Face hub.
    skip_bad : bool (default: False)
        Leave images out that cannot be decoded.
    max_samples : int (default: 0)
        Only the first so many rows for training and for testing; 0: all.
    again : bool (default: False)
        Prepare them even if that was done.

    Raises
    ------
    UsageError
        If there are no such images, or the cache cannot be written.
    """
    source = find_source(images.hf_hub_name, data, images.layout)
    options = {
        "side": images.side,
        "classes": images.num_classes,
        "train": list(images.train),
        "test": list(images.test),
        "skip_bad": skip_bad,
        "max_samples": max_samples,
    }

    def write(folder: Path, on_items: OnItems) -> Contents:
        found = _find_splits(images, source, folder / SCRATCH)
        train = join_splits([found[name] for name in images.train], max_samples)
        test = join_splits([found[name] for name in images.test], max_samples)
        class_names = find_classes(source, images.name, list(found.values()), images.num_classes)
        warn_of_unseen_classes(source, train, len(class_names))
        total = len(train) + len(test)
        skipped = {
            part: decode_split(
                split, folder, part, images.side, skip_bad, lambda number: on_items(number, total)
            )
            for part, split in (("train", train), ("test", test))
        }
        return Contents("images", class_names, skipped)

    return prepared(Preparation(images.name, source, options, write), again)


def _find_splits(images: ImageData, source: DataSource, scratch: Path) -> Mapping[str, Split]:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise source.missing_library(error) from None
    wanted = (*images.train, *images.test)
    if images.archive is not None and (splits := images.archive(source)) is not None:
        return {name: splits[name] for name in wanted}
    tables = source.tables(scratch)
    return {
        name: _image_split(source, name, source.find_split(tables, name), images.label_column)
        for name in wanted
    }


def _image_split(source: DataSource, name: str, table: Any, label_column: str) -> Split:
    """Return a ``datasets.Dataset`` as a split whose images are not decoded.

    Raises
    ------
    UsageError
        If there is no column of images or of labels, or the labels are no classes.
    """
    from datasets import ClassLabel, Image

    image = find_column(source, name, table, "image", _IMAGE_COLUMNS, Image)
    label = find_column(source, name, table, "label", (label_column, "label"), ClassLabel)
    if isinstance(table.features[image], Image):
        table = table.cast_column(image, Image(decode=False))
    split = table_split(source, name, table, image, label)
    if missing := int((split.labels == NO_LABEL).sum()):
        raise UsageError(
            f"{source.setting}: {missing} rows of {name} have no {label}; expected {source.layout}"
        )
    return split
