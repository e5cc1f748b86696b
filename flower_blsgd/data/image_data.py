"""Image data sets: those we know by name, their published archives, and their images as arrays."""

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
    """A data set of images: of the HF hub, or a folder, which may also be the published archive.

    Parameters
    ----------
    side : int
        Height and width of the images as they are stored, in pixels.
    archive, mark : str
        The folder that the archive of its authors unpacks to, and a file within that no other
        form has.
    read : callable
        ``(folder) -> splits`` of the archive, each a ``datasets.Dataset`` of ``image`` and
        ``label``, by name.
    others
        As of `DataSource`.
    """

    columns: tuple[tuple[str, ...], tuple[str, ...]] = (("img", "image"), ("fine_label", "label"))
    side: int
    archive: str
    mark: str
    read: Callable[[Path], Mapping[str, Any]]

    def tables(self, scratch: Path) -> Mapping[str, Any]:
        """Return all splits, also of an archive or of the folder that holds one.

        UsageError if its files are missing, damaged or contradict each other, as of any other.
        """
        for folder in (self.folder, self.folder / self.archive) if self.folder else ():
            if (folder / self.mark).is_file():
                try:
                    return self.read(folder)
                except Exception as error:  # numpy and scipy raise anything of damaged files
                    raise UsageError(
                        f"{self.setting} cannot be read ({first_line(error)}); unpack the "
                        "archive again, or name another folder"
                    ) from error
        return super().tables(scratch)


# --- archives as their authors publish them, which no library reads


def _read_cifar(
    folder: Path, num_labels: int, train: Sequence[str], test: Sequence[str]
) -> Mapping[str, Any]:
    """Return ``train`` and ``test`` of the binary version.

    Its files are rows of `num_labels` labels, of which the last counts, and of pixels of shape
    (3, 32, 32), all of one byte, without a header.
    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """
    splits = {}
    for split, names in (("train", train), ("test", test)):
        read = [np.fromfile(folder / name, np.uint8) for name in names]
        rows = np.concatenate(read).reshape(-1, num_labels + 3 * 32 * 32)
        images = rows[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        # As image files of the simplest kind, portable pixmaps.
        encoded = (b"P6 32 32 255\n" + image.tobytes() for image in images)
        splits[split] = _table(zip(encoded, rows[:, num_labels - 1], strict=True))
    return splits


def _read_flowers(folder: Path) -> Mapping[str, Any]:
    """Return ``train``, ``validation`` and ``test`` of Oxford Flowers-102, as torchvision keeps it.

    Images are in the order of the published lists; labels 1 to 102 become 0 to 101.
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
    """Return ``train`` and ``validation`` of Tiny ImageNet, as its archive unpacks.

    Labels count the WordNet ids in alphabetical order, as the copy on the Hugging Face hub does;
    images of a class and of the validation split are in the order of their names.
    Source: http://cs231n.stanford.edu/tiny-imagenet-200.zip
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
    """Return a split of images, encoded or as paths of files, with their labels."""
    from datasets import Dataset, Features, Image, Value

    images, labels = zip(*rows, strict=True)
    features = Features({"image": Image(decode=False), "label": Value("int64")})
    return Dataset.from_dict({"image": images, "label": labels}, features)


# --- data sets

_FORMS = (
    "{tables} with columns img or image, and label or fine_label, or image folders {folders}, or "
    "what datasets' save_to_disk wrote, or the "
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
"""50,000 + 10,000 photographs of ten things, or one's own in its layout."""

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
"""50,000 + 10,000 photographs of a hundred things; of its two kinds of labels the fine one."""

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
"""100,000 + 10,000 photographs of 200 things; what it calls test has no labels."""

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
"""8,189 photographs of flowers, cut into 1,020 + 6,149 as published (validation is not used), or
into 7,169 + 1,020 as the paper must have cut them. The Hugging Face hub's copy keeps them as PNG:
3.4 GB, ten times the published files."""


def prepared_images(images: ImageData, data: str = "", **rows: Any) -> Prepared:
    """Return the decoded images of a data set, preparing them if that was not done yet.

    `data` is a folder, or empty for the Hugging Face hub; `rows` are `skip_bad`, `max_samples` and
    `again` of `prepared_rows`, whose errors these are.
    """

    def converter(*_: object) -> tuple[Convert, Mapping[str, Any]]:
        from PIL.Image import init

        init()  # here: not every thread on its own
        return functools.partial(decoded, side=images.side), {}

    options = {"side": images.side, "train": images.train, "test": images.test}
    shape = (3, images.side, images.side)
    return prepared_rows(replace(images, data=data), options, converter, shape, np.uint8, **rows)


def decoded(stored: Any, side: int) -> npt.NDArray[np.uint8]:
    """Return the middle of an image, as RGB of shape (3, side, side).

    The shorter side is made `side` long, bilinearly and without aliasing, and of the longer one
    the middle is kept.

    Parameters
    ----------
    stored : bytes or mapping
        The content of a file of any kind that PIL reads, or a mapping with that as ``bytes`` or
        else its ``path``. Grey of 16 bits is scaled, and transparency dropped.
    side : int
        Height and width in pixels.

    Raises
    ------
    Exception
        Whatever PIL raises of a damaged file; ValueError if nothing says which of its values is
        white, or the path is relative.
    """
    import PIL.Image
    import PIL.ImageOps

    content = stored if isinstance(stored, bytes) else stored["bytes"]
    if content is None and not Path(stored["path"]).is_absolute():
        raise ValueError("it is only a relative path, which may mean any file")
    with PIL.Image.open(stored["path"] if content is None else io.BytesIO(content)) as image:
        if image.mode in ("I", "F"):
            raise ValueError(f"its kind {image.mode} (32 bits) does not say what is white")
        if image.mode.startswith("I;16"):  # PIL would cut values off at 255
            grey = np.rint(np.asarray(image) / 257).astype(np.uint8)
            colours = PIL.Image.fromarray(grey).convert("RGB")
        else:
            colours = image.convert("RGB")
    square = PIL.ImageOps.fit(colours, (side, side), PIL.Image.Resampling.BILINEAR)
    return np.asarray(square).transpose(2, 0, 1)
