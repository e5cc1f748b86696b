"""Images in folders, in tables and of torchvision, as arrays."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

pytest.importorskip("datasets")

from flower_blsgd.data.cache import Prepared
from flower_blsgd.data.libraries import import_torchvision
from flower_blsgd.data.samples import decoded, prepared_images
from flower_blsgd.data.source import DataSource

from ..log_capture import captured_log
from ..refusal import refusal
from .image_files import broken_jpeg, make_folders, make_parquet, pixels, png

IMAGES = [png(k) for k in range(6)]


def chw(*numbers: int) -> npt.NDArray[np.uint8]:
    return np.stack([pixels(number).transpose(2, 0, 1) for number in numbers])


def ready(data: Path | str, side: int = 32, **rows: Any) -> Prepared:
    return prepared_images(DataSource(name="images", data=str(data), **rows), side)


def refused(data: Path | str, side: int = 32, **rows: Any) -> str:
    return refusal(ready, data, side, **rows)


# --- folders and tables


@pytest.mark.parametrize(("image", "hints"), [("img", True), ("image", False)])
def test_parquet_comes_out_as_it_is(tmp_path: Path, image: str, hints: bool) -> None:
    """Whether its metadata say that a column holds images or not."""
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES[:3], image, hints=hints)
    images = ready(folder)
    assert np.array_equal(images.train[0], chw(*range(6)))
    assert images.train[1].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    file = folder / "train" / "dog" / "00001.png"
    file.write_bytes(broken_jpeg())
    message = refused(folder)
    assert f": row 3 of train: image cannot be used ({file}: image file is truncated" in message
    file.write_bytes(b"not a picture")
    assert f"cannot identify image file '{file}'" in refused(folder)
    assert not list(tmp_path.rglob("*.npy"))
    assert ready(folder, skip_bad=True).train[1].tolist() == [0, 0, 1, 2, 2]


def test_a_part_of_a_folder_has_all_classes(tmp_path: Path) -> None:
    """Its images are sorted by class, so the first ones would be of one class."""
    names = ("cat-2", "cat", "dog")  # in the order of the paths
    paths = [
        f"{split}/{name}/{k}.png" for split in ("train", "test") for name in names for k in "01"
    ]
    part = ready(draw(tmp_path / "other", *paths), max_samples=3)
    assert part.train[1].tolist() == part.test[1].tolist() == [1, 0, 2]
    folder = make_folders(tmp_path / "own", train=12, test=9)
    part = ready(folder, max_samples=3)
    assert part.train[1].tolist() == part.test[1].tolist() == [0, 1, 2]
    assert np.array_equal(part.train[0], chw(0, 1, 2))
    others = ready(folder), ready(folder, skip_bad=True)
    assert len({part.folder, *(other.folder for other in others)}) == 3, "entries of the cache"


def draw(root: Path, *paths: str) -> Path:
    """Write image k to path k."""
    for k, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(png(k))
    return root


ODD = (".cat", "007", "__background__", "_x", "a::b", "d[1]*")
"""Names of classes, in their order."""


@pytest.mark.parametrize(
    "layout", ["odd", "deep", "linked", "other names", "one above", "side files"]
)
def test_the_class_is_the_folder_below_the_split(tmp_path: Path, layout: str) -> None:
    """Also if the library that reads tables would leave it out, or take another one."""
    own = tmp_path / "own"
    paths = ["train/cat/0.PNG", "train/dog/0.png", "test/cat/0.png", "test/dog/0.png"]
    labels = [0, 1]
    if layout == "odd":
        paths = [f"{split}/{name}/.0.png" for split in ("train", "test") for name in ODD]
        labels = list(range(len(ODD)))
    elif layout == "deep":
        paths = [
            *("train/cat/v1/0.png", "train/cat/v2/train/0.png", "train/dog/v1/0.png"),
            *("train/dog/v3/0.png", "train/owl/0.png", "test/dog/v2/0.png"),
        ]
        labels = [0, 0, 1, 1, 2]
    elif layout == "other names":
        paths = [path.replace("train", "Training set").replace("test", "Test") for path in paths]
    elif layout == "one above":
        paths = [f"images/{path}" for path in paths]
    draw(own, *paths)
    if layout == "linked":
        (own / "train" / "dog").rename(tmp_path / "dog")
        (own / "train" / "dog").symlink_to(tmp_path / "dog")
        (own / "test" / "cat" / "0.png").rename(tmp_path / "cat.png")
        (own / "test" / "cat" / "0.png").symlink_to(tmp_path / "cat.png")
    elif layout == "side files":
        draw(own, *paths, "train/cat/.ipynb_checkpoints/0.png")
        (own / "train" / "cat" / "._0.png").write_text("of macOS")
        for k in range(9):
            (own / "train" / "cat" / f"{k}.txt").write_text("a caption")
            (own / "test" / "dog" / f"{k}.json").write_text("{}")
        (own / "train" / "metadata.csv").write_text("file_name,size\ncat/0.PNG,3\n")
        (own / "metadata.jsonl").write_text("{}")
    images = ready(own)
    assert (images.train[1].tolist(), images.num_classes) == (labels, max(labels) + 1)
    assert np.array_equal(images.train[0], chw(*range(len(labels))))
    assert np.array_equal(images.test[0], chw(*range(len(labels), len(paths))))


def test_images_that_cannot_be_placed_are_named(tmp_path: Path) -> None:
    own = draw(tmp_path / "own", "train/cat/0.png", "train/dog/0.png", "test/cat/0.png")
    source = f"data = {str(own)!r}"
    (own / "train" / "owl").mkdir()
    assert refused(own) == (
        f"{source}: the class folder owl of train has no images; add some, or remove it"
    )
    draw(own, "train/owl/0.png", "train/0.png")
    assert refused(own) == (
        f"{source}: train/0.png is in no class of a split; put every image into the folder of its "
        "class, such as train/<class>/*.png"
    )
    (own / "train" / "0.png").unlink()
    for to, why in ((tmp_path / "none", "No such file"), (own / "train", "Too many levels of sym")):
        (own / "train" / "fox").symlink_to(to)
        message = refused(own)
        assert message.startswith(f"{source} cannot be read ([Errno ")
        assert why in message
        assert f"'{own}/train/fox')" in message
        (own / "train" / "fox").unlink()
    draw(own, "logo.png", "masks/0.png", "train_masks/cat/0.png", "old-test/dog/0.png")
    with captured_log() as log:
        assert ready(own).train[1].tolist() == [0, 1, 2]
    assert log.warnings == [f"{source}: images next to the splits are not used, such as logo.png"]
    for paths in (("train/0.png", "test/0.png"), ("a/train/x/0.png", "b/test/x/0.png")):
        message = refused(draw(tmp_path / paths[0][0], *paths))
        assert "0.png is in no class of a split" in message


def test_classes_without_splits(tmp_path: Path) -> None:
    own = draw(tmp_path / "own", "cat/0.png", "cat/old/0.png", "train/0.png", "dog/0.png")
    (own / ".config").mkdir()
    assert ready(own, needs_test=False).train[1].tolist() == [0, 0, 1, 2]


def test_metadata_files_with_labels_list_all_images(tmp_path: Path) -> None:
    own = draw(
        tmp_path / "own", *(f"{split}/{k}.png" for split in ("train", "test") for k in (0, 1))
    )
    for split, names in (("train", "01"), ("test", "0")):
        rows = "".join(f"{name}.png,{'ab'[int(name)]}\n" for name in names)
        (own / split / "metadata.csv").write_text(f"file_name,label\n{rows}")
    assert refused(own) == (
        f"data = {str(own)!r}: the metadata do not list 1 images, such as test/1.png; add or "
        "remove them"
    )
    (own / "test" / "1.png").unlink()
    assert ready(own).train[1].tolist() == [0, 1]


def test_other_classes_for_testing(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    (folder / "test" / "dog").rename(folder / "test" / "dogs")
    assert refused(folder).endswith(
        "test has classes without training images: dogs; use the same class folders in train and "
        "test"
    )
    shutil.rmtree(folder / "test" / "dogs")
    assert ready(folder).num_classes == 3


# --- torchvision


class Numbers:
    """A data set as torchvision has them: image k is `pixels(k)`, of class k % 3."""

    def __init__(self, root: Path, train: bool = True) -> None:
        self.numbers = range(6) if train else range(1000, 1004)
        if not (root / "numbers").is_file():
            raise RuntimeError("Dataset not found. You can use download=True to download it")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(pixels(self.numbers[index])), index % 3


class Divided(Numbers):
    """The same, by the name of a split."""

    def __init__(self, root: Path, split: str = "train") -> None:
        if split not in ("trainval", "val"):
            raise ValueError(f"unknown split {split}")
        super().__init__(root, split == "trainval")
        self.targets = [k % 3 for k in range(len(self))]


class Damaged(Divided):
    """The same, with an image that cannot be read."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index == 2:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


def test_a_damaged_image_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_torchvision().datasets
    monkeypatch.setattr(module, "Damaged", Damaged, raising=False)
    monkeypatch.setattr(module, "__all__", (*module.__all__, "Damaged"))
    own = tmp_path / "own"
    own.mkdir()
    (own / "numbers").touch()
    assert "image file is truncated" in refused(f"Damaged:{own}", 0)
    assert ready(f"Damaged:{own}", 0, skip_bad=True).train[1].tolist() == [0, 1, 0, 1, 2]


def test_data_sets_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_torchvision().datasets
    for made in (Numbers, Divided):
        monkeypatch.setattr(module, made.__name__, made, raising=False)
    monkeypatch.setattr(module, "__all__", (*module.__all__, "Numbers", "Divided"))
    own = tmp_path / "own"
    own.mkdir()
    message = refused(f"Numbers:{own}")
    assert message == (
        f"data = 'Numbers:{own}': torchvision cannot read it (Dataset not found); download it "
        "first, with torchvision.datasets.Numbers(FOLDER, download=True)"
    )
    (own / "numbers").touch()
    for name in ("Numbers", "Divided"):
        images = ready(f"{name}:{own}", 0)
        assert np.array_equal(images.train[0], chw(*range(6)))
        assert np.array_equal(images.test[0], chw(1000, 1001, 1002, 1003))
        assert (images.train[1].tolist(), images.test[1].tolist()) == ([0, 1, 2] * 2, [0, 1, 2, 0])
    assert "has no CIFAR11 with a parameter train or split; did you mean CIFAR10" in refused(
        f"CIFAR11:{own}"
    )
    assert "has no FakeData with a parameter" in refused(f"FakeData:{own}")
    assert "is not a folder, or does not exist" in refused(f"Numbers:{tmp_path / 'none'}")


def test_torchvision_of_another_build_is_imported(tmp_path: Path) -> None:
    """Its compiled operators are missing; with one line in the log, the rest works."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\nfor name in ('nms', 'qnms'):\n"
        "    torch.library.register_fake(f'torchvision::{name}')(print)\n"
    )
    code = (
        "from flower_blsgd.data.libraries import import_torchvision\n"
        "assert import_torchvision() is import_torchvision()\nimport torchvision\n"
        "print('imported', torchvision.__spec__.name)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "imported torchvision\n", done.stderr
    assert done.stderr == (
        "torchvision was built for another torch, so its compiled operators are missing; "
        "classification works without them\n"
    )


def test_torchvision_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert refusal(import_torchvision).startswith("task: images need torchvision; in a clone of ")


# --- one image


def stored(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("columns", "height", "expected"),
    [
        ([9, 100, 200, 9], 2, [100, 200]),
        # Half the size: 3/8 each of two pixels and 1/8 of those beside; pixels beyond the cut
        # count: (255 + 3 * 0 + 3 * 70 + 140) / 8.
        ([255, 255, 0, 70, 140, 210, 255, 255], 4, [76, 172]),
    ],
)
def test_the_middle_is_kept_and_resized_without_aliasing(
    columns: list[int], height: int, expected: list[int]
) -> None:
    grey = np.tile(np.array(columns, np.uint8), (height, 1))
    square = decoded(stored(Image.fromarray(grey)), 2)
    assert square.tolist() == [[expected] * 2] * 3
    assert np.array_equal(decoded(stored(Image.fromarray(grey.T)), 2), square.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (4, 4), 77), (77, 77, 77)),
        (Image.new("RGBA", (4, 4), (1, 2, 3, 0)), (1, 2, 3)),
        (Image.new("RGB", (4, 4), (10, 20, 30)).quantize(2), (10, 20, 30)),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.fromarray(np.full((4, 4), 32896, np.uint16)), (128, 128, 128)),
    ],
    ids=["L", "RGBA", "P", "CMYK", "I;16"],
)
@pytest.mark.parametrize("side", [4, 2])
def test_all_kinds_become_rgb(image: Image.Image, colour: tuple[int, ...], side: int) -> None:
    square = decoded(stored(image), side)
    assert square.transpose(1, 2, 0).tolist() == [[list(colour)] * side] * side


def test_what_may_mean_anything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the white level of mode F \(32 bits\) is undefined"):
        decoded(stored(Image.new("F", (4, 4), 70_000)), 4)
    with pytest.raises(ValueError, match="a relative path is ambiguous"):
        decoded({"bytes": None, "path": "0.png"}, 4)
