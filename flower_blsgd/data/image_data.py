"""Image data sets: those we know by name, their published archives, and their images as arrays."""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, first_line
from .cache import Prepared, prepared
from .source import DataSource, find_source
from .splits import read_parts, write_part

_COLUMNS = ("img", "image"), ("fine_label", "label")
"""Of images and of labels; of CIFAR-100's two kinds of labels the fine one."""


# --- archives as their authors publish them, which no library reads


@dataclass(frozen=True)
class Archive:
    """The form in which the authors of a data set publish it.

    Parameters
    ----------
    layout : str
        What it is, for messages.
    folder, mark : str
        The folder that it unpacks to, and a file within that no other form has.
    read : callable
        ``(folder) -> splits``, each a ``datasets.Dataset`` of ``image`` and ``label``, by name.
    """

    layout: str
    folder: str
    mark: str
    read: Callable[[Path], Mapping[str, Any]]

    def splits(self, source: DataSource) -> Mapping[str, Any] | None:
        """Return the splits of a folder, or of the one in it; None if it holds something else.

        Raises
        ------
        UsageError
            If files are missing, damaged or contradict each other.
        """
        if source.folder is None:
            return None
        for folder in (source.folder, source.folder / self.folder):
            if (folder / self.mark).is_file():
                try:
                    return self.read(folder)
                except Exception as error:  # numpy and scipy raise anything of damaged files
                    raise UsageError(
                        f"{source.setting} cannot be read ({first_line(error)}); unpack the "
                        "archive again, or name another folder"
                    ) from error
        return None


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
    archive : Archive
        Its published form.
    train, test : tuple of str (default: ("train",), ("test",))
        The splits to train and to test on; several are joined in this order.
    """

    name: str
    hf_hub_name: str
    side: int
    num_classes: int | None
    archive: Archive
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("test",)

    @property
    def layout(self) -> str:
        """What a folder must look like."""
        names = (*self.train, *self.test)
        files = " and ".join(f"{name}-*.parquet" for name in names)
        folders = " and ".join(f"{name}/<class>/*.png" for name in names)
        forms = [
            f"{files} with columns img or image, and label or fine_label",
            f"image folders {folders}",
            "what datasets' save_to_disk wrote",
            self.archive.layout,
        ]
        return ", or ".join(forms)


CIFAR10 = ImageData(
    name="cifar10",
    hf_hub_name="uoft-cs/cifar10",
    side=32,
    num_classes=None,
    archive=Archive(
        "the binary version (data_batch_1.bin; the Python version's pickles are unsafe)",
        "cifar-10-batches-bin",
        "data_batch_1.bin",
        functools.partial(
            _read_cifar,
            num_labels=1,
            train=[f"data_batch_{number}.bin" for number in range(1, 6)],
            test=["test_batch.bin"],
        ),
    ),
)
"""50,000 + 10,000 photographs of ten things, or one's own in its layout."""

CIFAR100 = ImageData(
    name="cifar100",
    hf_hub_name="uoft-cs/cifar100",
    side=32,
    num_classes=100,
    archive=Archive(
        "the binary version (train.bin; the Python version's pickles are unsafe)",
        "cifar-100-binary",
        "train.bin",
        functools.partial(_read_cifar, num_labels=2, train=["train.bin"], test=["test.bin"]),
    ),
)
"""50,000 + 10,000 photographs of a hundred things."""

TINY_IMAGENET = ImageData(
    name="tiny-imagenet",
    hf_hub_name="zh-plus/tiny-imagenet",
    side=64,
    num_classes=200,
    test=("validation",),
    archive=Archive(
        "the published folder (tiny-imagenet-200)",
        "tiny-imagenet-200",
        "wnids.txt",
        _read_tiny_imagenet,
    ),
)
"""100,000 + 10,000 photographs of 200 things; what it calls test has no labels."""

_FLOWERS102 = ImageData(
    name="flowers102",
    hf_hub_name="dpdl-benchmark/oxford_flowers102",
    side=256,
    num_classes=102,
    archive=Archive(
        "the published files (jpg, imagelabels.mat and setid.mat)",
        "flowers-102",
        "setid.mat",
        _read_flowers,
    ),
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

    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        source.check_libraries()
        from PIL.Image import init

        init()  # here: not every thread on its own
        tables = images.archive.splits(source) or source.tables(scratch)
        parts, num_classes = read_parts(
            source,
            images.name,
            tables,
            {"train": images.train, "test": images.test},
            _COLUMNS,
            images.num_classes,
            max_samples,
        )
        convert = functools.partial(decoded, side=images.side)
        shape = (3, images.side, images.side)
        skipped = {
            part: write_part(rows, folder, part, convert, shape, np.uint8, skip_bad)
            for part, rows in parts.items()
        }
        return {"num_classes": num_classes, "skipped": skipped}

    return prepared(images.name, source, options, write, again)


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
