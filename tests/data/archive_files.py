"""Small copies of the archives that the authors of image data sets publish."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.io import savemat

from .image_files import encoded, pixels

WORDNET_IDS = ("n01443537", "n02124075", "n09999999")


def cifar_image(number: int) -> npt.NDArray[np.uint8]:
    """Return an image of its own for each number, as CHW."""
    drawn = np.random.default_rng(number).integers(0, 256, (3, 32, 32))
    return drawn.astype(np.uint8)


def _write_rows(path: Path, rows: Sequence[tuple[int, ...]]) -> None:
    """Write rows of labels and, last, the number of the image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(bytes(labels) + cifar_image(k).tobytes() for *labels, k in rows))


def make_cifar10(root: Path) -> Path:
    """Write two images a file; image k has the label k % 10, test images count from 1000."""
    folder = root / "cifar-10-batches-bin"
    for file in range(5):
        rows = [(k % 10, k) for k in (2 * file, 2 * file + 1)]
        _write_rows(folder / f"data_batch_{file + 1}.bin", rows)
    _write_rows(folder / "test_batch.bin", [(9, 1000), (0, 1001)])
    return folder


def make_cifar100(root: Path, labels: range = range(100)) -> Path:
    """Write train and test alike; image k has the fine label `labels[k]`, the coarse `k % 20`."""
    folder = root / "cifar-100-binary"
    for name in ("train", "test"):
        rows = [(k % 20, label, k) for k, label in enumerate(labels)]
        _write_rows(folder / f"{name}.bin", rows)
    return folder


def make_flowers(
    root: Path,
    train: Sequence[int] = (3, 1),
    validation: Sequence[int] = (4,),
    test: Sequence[int] = (2, 6, 5),
    labels: Sequence[int] = (102, 7, 1, 7, 50, 51),
) -> Path:
    """Write images, image k (from 1) as `pixels(k)`, and the lists as torchvision has them."""
    folder = root / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    for number in range(1, len(labels) + 1):
        jpeg = encoded(pixels(number, 8), "JPEG")
        (folder / "jpg" / f"image_{number:05}.jpg").write_bytes(jpeg)
    # As published: rows, in the smallest types that hold them.
    savemat(folder / "imagelabels.mat", {"labels": np.array([labels], np.uint8)})
    ids = {"trnid": train, "valid": validation, "tstid": test}
    savemat(folder / "setid.mat", {name: np.array([ids[name]], np.uint16) for name in ids})
    return folder


def make_tiny_imagenet(root: Path, classes: Sequence[str] = WORDNET_IDS) -> Path:
    """Write two training images of each class, and one to validate on, in another order."""
    folder = root / "tiny-imagenet-200"
    lines = []
    (folder / "val" / "images").mkdir(parents=True)
    for label, name in enumerate(classes):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for k in range(2):
            (images / f"{name}_{k}.JPEG").write_bytes(encoded(pixels(2 * label + k, 64), "JPEG"))
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        image = f"val_{len(classes) - 1 - label}.JPEG"
        (folder / "val" / "images" / image).write_bytes(encoded(pixels(1000 + label, 64), "JPEG"))
        lines.append(f"{image}\t{name}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(reversed(classes)) + "\n")
    return folder
