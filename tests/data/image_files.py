"""Small real image folders and parquet files."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

CLASSES = ("cat", "dog", "owl")


def pixels(number: int, size: int = 32) -> npt.NDArray[np.uint8]:
    """Return an image of its own for each number, as HWC."""
    drawn = np.random.default_rng(number).integers(0, 256, (size, size, 3))
    return drawn.astype(np.uint8)


def png(number: int, size: int = 32) -> bytes:
    return encoded(pixels(number, size))


def encoded(image: npt.NDArray[np.uint8], kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind)
    return buffer.getvalue()


def broken_jpeg() -> bytes:
    """Return a JPEG that ends in the middle."""
    whole = encoded(pixels(0), "JPEG")
    return whole[: len(whole) // 2]


def make_folders(root: Path, train: int = 6, test: int = 3) -> Path:
    """Write image folders; image k is `pixels(k)`, test images count from 1000."""
    for split, first, count in (("train", 0, train), ("test", 1000, test)):
        for k in range(count):
            folder = root / split / CLASSES[k % len(CLASSES)]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{k:05}.png").write_bytes(png(first + k))
    return root


def make_parquet(
    root: Path, train: list[Any], test: list[Any], image: str = "img", hints: bool = True
) -> Path:
    """Write parquet files of encoded images; labels count 0, 1, 2, 0, ...

    Without `hints` the files do not say that a column holds images.
    """
    from datasets import Dataset
    from datasets import Image as ImageFeature

    root.mkdir(parents=True, exist_ok=True)
    for split, images in (("train", train), ("test", test)):
        labels = [k % len(CLASSES) for k in range(len(images))]
        table = Dataset.from_dict({image: images, "label": labels})
        if hints:
            table = table.cast_column(image, ImageFeature())
        table.to_parquet(root / f"{split}-00000-of-00001.parquet")
    return root


def some_images(side: int, count: int = 2) -> Tensor:
    """Return random images as bytes."""
    generator = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
