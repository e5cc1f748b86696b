"""Image data sets: the built-in ones, their published archives, and their images as arrays."""

import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, first_line
from .cache import Prepared
from .source import DataSource
from .splits import Convert, prepared_rows


@dataclass(frozen=True, kw_only=True)
class ImageData(DataSource):
    """Image data set of the HF hub or of a folder, which may be the published archive.

    Parameters
    ----------
    side : int
        Height and width of the stored images, in pixels.
    archive, mark : str
        Folder name of the unpacked archive, and a file that identifies it.
    read : callable
        ``(folder) -> splits`` of the archive, by name, each a ``datasets.Dataset`` of ``image`` and
        ``label``.
    others
        See `DataSource`.
    """

    columns: tuple[tuple[str, ...], tuple[str, ...]] = (("img", "image"), ("fine_label", "label"))
    side: int
    archive: str
    mark: str
    read: Callable[[Path], Mapping[str, Any]]

    def tables(self, scratch: Path) -> Mapping[str, Any]:
        """Return all splits, including those of an archive or of its parent folder.

        UsageError if the data cannot be read.
        """
        for folder in (self.folder, self.folder / self.archive) if self.folder else ():
            if (folder / self.mark).is_file():
                try:
                    return self.read(folder)
                except Exception as error:  # numpy and scipy raise any kind for damaged files
                    raise UsageError(
                        f"{self.setting} cannot be read ({first_line(error)}); unpack the "
                        "archive again, or name another folder"
                    ) from error
        return super().tables(scratch)


# --- published archives, which no library reads


def _read_cifar(
    folder: Path, num_labels: int, train: Sequence[str], test: Sequence[str]
) -> Mapping[str, Any]:
    """Return ``train`` and ``test`` of the binary version.

    The files have no header. A row has `num_labels` labels, of which the last one counts, and
    pixels of shape (3, 32, 32), one byte each. Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """
    splits = {}
    for split, names in (("train", train), ("test", test)):
        read = [np.fromfile(folder / name, np.uint8) for name in names]
        rows = np.concatenate(read).reshape(-1, num_labels + 3 * 32 * 32)
        images = rows[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        # Encode as portable pixmaps, the simplest image format.
        encoded = (b"P6 32 32 255\n" + image.tobytes() for image in images)
        splits[split] = _table(zip(encoded, rows[:, num_labels - 1], strict=True))
    return splits


def _read_flowers(folder: Path) -> Mapping[str, Any]:
    """Return the splits of Oxford Flowers-102 from torchvision's folder.

    Images are in the order of the published lists. Labels 1 to 102 become 0 to 101.
    Source: https://www.robots.ox.ac.uk/~vgg/data/flowers/102/
    """
    from scipy.io import loadmat

    labels = loadmat(folder / "imagelabels.mat")["labels"].reshape(-1).astype(np.int64)
    numbers = loadmat(folder / "setid.mat")
    splits = {}
    for name, variable in (("train", "trnid"), ("validation", "valid"), ("test", "tstid")):
        chosen = numbers[variable].reshape(-1).astype(np.int64)
        paths = [str(folder / "jpg" / f"image_{number:05}.jpg") for number in chosen]
        splits[name] = _table(zip(paths, labels[chosen - 1] - 1, strict=True))
    return splits


def _read_tiny_imagenet(folder: Path) -> Mapping[str, Any]:
    """Return ``train`` and ``validation`` of Tiny ImageNet, from its unpacked archive.

    Labels number the WordNet ids in alphabetical order, like the copy on the HF hub. Images of a
    class and of the validation split are sorted by name. Source:
    http://cs231n.stanford.edu/tiny-imagenet-200.zip
    """
    names = sorted(set((folder / "wnids.txt").read_text().split()))
    train = []
    for label, name in enumerate(names):
        images = sorted((folder / "train" / name / "images").glob("[!.]*.JPEG"))
        if not images:
            raise ValueError(f"there is no image of {name}")
        train += [(str(path), label) for path in images]
    lines = sorted((folder / "val" / "val_annotations.txt").read_text().splitlines())
    validation = [
        (str(folder / "val" / "images" / file), names.index(name))
        for file, name in (line.split("\t")[:2] for line in lines)
    ]
    return {"train": _table(train), "validation": _table(validation)}


def _table(rows: Iterable[tuple[str | bytes, int]]) -> Any:
    """Return a split of images, encoded or as file paths, with labels."""
    from datasets import Dataset, Features, Image, Value

    images, labels = zip(*rows, strict=True)
    features = Features({"image": Image(decode=False), "label": Value("int64")})
    return Dataset.from_dict({"image": images, "label": labels}, features)


# --- data sets

_FORMS = (
    "{tables} with columns img or image, and label or fine_label, or image folders {folders}, or "
    "the output of datasets' save_to_disk, or the "
)

CIFAR10 = ImageData(
    name="cifar10",
    hf_hub_name="uoft-cs/cifar10",
    side=32,
    forms=f"{_FORMS}binary version (data_batch_1.bin; the Python version's pickles are unsafe)",
    archive="cifar-10-batches-bin",
    mark="data_batch_1.bin",
    read=functools.partial(
        _read_cifar,
        num_labels=1,
        train=[f"data_batch_{number}.bin" for number in range(1, 6)],
        test=["test_batch.bin"],
    ),
)
"""50,000 + 10,000 photographs of ten classes, or custom images in the same layout."""

CIFAR100 = ImageData(
    name="cifar100",
    hf_hub_name="uoft-cs/cifar100",
    side=32,
    num_classes=100,
    forms=f"{_FORMS}binary version (train.bin; the Python version's pickles are unsafe)",
    archive="cifar-100-binary",
    mark="train.bin",
    read=functools.partial(_read_cifar, num_labels=2, train=["train.bin"], test=["test.bin"]),
)
"""50,000 + 10,000 photographs of 100 classes, with the fine labels."""

TINY_IMAGENET = ImageData(
    name="tiny-imagenet",
    hf_hub_name="zh-plus/tiny-imagenet",
    side=64,
    num_classes=200,
    test=("validation",),
    forms=f"{_FORMS}published folder (tiny-imagenet-200)",
    archive="tiny-imagenet-200",
    mark="wnids.txt",
    read=_read_tiny_imagenet,
)
"""100,000 + 10,000 photographs of 200 classes; its test split has no labels."""

_FLOWERS102 = ImageData(
    name="flowers102",
    hf_hub_name="dpdl-benchmark/oxford_flowers102",
    side=256,
    num_classes=102,
    forms=f"{_FORMS}published files (jpg, imagelabels.mat and setid.mat)",
    archive="flowers-102",
    mark="setid.mat",
    read=_read_flowers,
)

FLOWERS102: Mapping[str, ImageData] = {
    "official": _FLOWERS102,
    "paper": replace(_FLOWERS102, train=("train", "test"), test=("validation",)),
}
"""8,189 photographs of flowers, split into 1,020 + 6,149 as published (without validation), or into
7,169 + 1,020 as in the paper (our reconstruction). The HF hub's copy is PNG: 3.4 GB, ten times the
published files."""


def prepared_images(images: ImageData, data: str = "", **rows: Any) -> Prepared:
    """Return the decoded images of a data set, and prepare them if necessary.

    `data` is a folder, or empty for the HF hub. `rows` are `skip_bad`, `max_samples` and `again` of
    `prepared_rows`, which also documents the errors.
    """

    def converter(*_: object) -> tuple[Convert, Mapping[str, Any]]:
        from PIL.Image import init

        init()  # once, not in every thread
        return functools.partial(decoded, side=images.side), {}

    options = {"side": images.side, "train": images.train, "test": images.test}
    shape = (3, images.side, images.side)
    return prepared_rows(replace(images, data=data), options, converter, shape, np.uint8, **rows)


def decoded(stored: Any, side: int) -> npt.NDArray[np.uint8]:
    """Return the center of an image, as RGB of shape (3, side, side).

    The shorter side is resized to `side`, bilinearly with antialiasing, and the longer one is
    center-cropped.

    Parameters
    ----------
    stored : bytes or mapping
        Content of a file in any format of PIL, or a mapping with the content as ``bytes`` or with
        its ``path``. 16-bit gray values are scaled, and transparency is dropped.
    side : int
        Height and width in pixels.

    Raises
    ------
    Exception
        Any error of PIL for a damaged file; ValueError if the white level is undefined or the path
        is relative.
    """
    import PIL.Image
    import PIL.ImageOps

    content = stored if isinstance(stored, bytes) else stored["bytes"]
    if content is None and not Path(stored["path"]).is_absolute():
        raise ValueError("a relative path is ambiguous")
    with PIL.Image.open(stored["path"] if content is None else io.BytesIO(content)) as image:
        if image.mode in ("I", "F"):
            raise ValueError(f"the white level of mode {image.mode} (32 bits) is undefined")
        if image.mode.startswith("I;16"):  # PIL would clip values at 255
            grey = np.rint(np.asarray(image) / 257).astype(np.uint8)
            colours = PIL.Image.fromarray(grey).convert("RGB")
        else:
            colours = image.convert("RGB")
    square = PIL.ImageOps.fit(colours, (side, side), PIL.Image.Resampling.BILINEAR)
    return np.asarray(square).transpose(2, 0, 1)
