"""A data set of labelled images: which splits it has, and its images as arrays on disk."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cache import prepared
from .class_names import class_names, tell_of_unused
from .entry import Prepared
from .image_columns import table_split
from .image_decoding import Decoded, decode_split
from .image_split import ImageSplit, JoinedSplit
from .preparation import Contents, OnItems, scratch_folder
from .source import DataSource, find_source
from .split_progress import read_split

_log = logging.getLogger(__name__)

OwnForm = Callable[[DataSource], Mapping[str, ImageSplit] | None]
"""Reads a folder in the form in which a data set was published; None of any other folder."""


@dataclass(frozen=True)
class ImageData:
    """A data set of images.

    Parameters
    ----------
    name : str
        The task.
    hub_name : str
        What the hub calls it.
    side : int
        Height and width of the images as they are stored.
    num_classes : int, optional
        How many it must have; None for any number.
    train, test : tuple of str
        The splits to train and to test on; several are joined in this order.
    label_column : str (default: "label")
        Where the labels are, if not in ``label`` or ``labels``.
    any_size : bool (default: False)
        Its images have many sizes, so that resizing them is no news.
    own_form : callable, optional
        Reads its published form from a folder.
    own_layout : str (default: "")
        What that is, for messages.
    """

    name: str
    hub_name: str
    side: int
    num_classes: int | None
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_column: str = "label"
    any_size: bool = False
    own_form: OwnForm | None = None
    own_layout: str = ""

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
            *filter(None, [self.own_layout]),
        ]
        return ", or ".join(forms)


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
        A folder with images; empty for the hub.
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
    source = find_source(images.hub_name, data, images.layout)
    return prepared(ImagePreparation(images, source, skip_bad, max_samples), again)


@dataclass(frozen=True)
class ImagePreparation:
    """Images that become arrays; a `Preparation`."""

    images: ImageData
    source: DataSource
    skip_bad: bool = False
    max_samples: int = 0
    noun: str = "images"

    @property
    def name(self) -> str:
        """The task."""
        return self.images.name

    @property
    def options(self) -> Mapping[str, Any]:
        """What changes the outcome."""
        return {
            "side": self.images.side,
            "train": list(self.images.train),
            "test": list(self.images.test),
            "skip_bad": self.skip_bad,
            "max_samples": self.max_samples,
        }

    def write(self, part: Path, on_items: OnItems) -> Contents:
        """Write images and labels; see `Preparation`."""
        train, test = self._splits(part)
        names = self._class_names(train, test)
        splits = [
            JoinedSplit(name, parts, self.max_samples)
            for name, parts in (("train", train), ("test", test))
        ]
        began = [read_split(part, split, self.images.side) for split in splits]
        on_items.begin(sum(len(split) for split in splits), sum(one.done for one in began))
        decoded = [
            decode_split(split, part, progress, self.skip_bad, on_items)
            for split, progress in zip(splits, began, strict=True)
        ]
        for split, result in zip(splits, decoded, strict=True):
            self._tell(split, result)
        skipped = {split.name: one.skipped for split, one in zip(splits, decoded, strict=True)}
        return Contents("images", names, skipped)

    def _splits(self, part: Path) -> tuple[list[ImageSplit], list[ImageSplit]]:
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise self.source.missing(error) from None
        own = self.images.own_form
        found = own(self.source) if own is not None and self.source.folder is not None else None
        if found is None:
            tables = self.source.tables(scratch_folder(part))
            found = {
                name: table_split(
                    self.source,
                    name,
                    self.source.find_split(tables, name),
                    self.images.label_column,
                )
                for name in (*self.images.train, *self.images.test)
            }
        return [found[name] for name in self.images.train], [found[n] for n in self.images.test]

    def _class_names(self, train: list[ImageSplit], test: list[ImageSplit]) -> tuple[str, ...]:
        expected = self.images.num_classes
        instead = (
            f"{self.name}, counted from 0; name a folder with these, or leave data empty for the "
            f"hub's {self.images.hub_name}"
        )
        names = class_names(self.source.said, [*train, *test], expected, instead)
        whole = JoinedSplit("train", train)
        if expected is None:
            tell_of_unused(self.source.said, whole.name, whole.labels, len(names))
        cut = JoinedSplit("train", train, self.max_samples)
        used, all_used = (len(np.unique(split.labels)) for split in (cut, whole))
        if used < all_used:
            _log.warning(
                "max-samples = %d: the first images of train show %d of its %d classes",
                self.max_samples,
                used,
                all_used,
            )
        return names

    def _tell(self, split: JoinedSplit, decoded: Decoded) -> None:
        side = self.images.side
        if decoded.resized and not self.images.any_size:
            _log.warning(
                "resized %d images of %s to %dx%d", decoded.resized, split.name, side, side
            )
        if decoded.skipped:
            _log.warning(
                "left out %d of %d images of %s that cannot be decoded",
                decoded.skipped,
                len(split),
                split.name,
            )
