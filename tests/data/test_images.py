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
from flower_blsgd.data.samples import decoded, prepared_images
from flower_blsgd.data.source import DataSource, import_torchvision

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
    assert message.startswith(f"data: row 2 of train cannot be used ({file}: image file is trunc")
    file.write_bytes(b"not a picture")
    assert f"cannot identify image file '{file}'" in refused(folder)
    assert not list(tmp_path.rglob("*.npy"))
    assert ready(folder, skip_bad=True).train[1].tolist() == [0, 0, 1, 2, 2]


def test_a_part_of_a_folder_has_all_classes(tmp_path: Path) -> None:
    """Its images are sorted by class, so the first ones would be of one class."""
    folder = make_folders(tmp_path / "own", train=12, test=9)
    part = ready(folder, max_samples=3)
    assert part.train[1].tolist() == part.test[1].tolist() == [0, 1, 2]
    assert np.array_equal(part.train[0], chw(0, 1, 2))
    others = ready(folder), ready(folder, skip_bad=True)
    assert len({part.folder, *(other.folder for other in others)}) == 3, "entries of the cache"


def test_folders_without_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "own" / split).mkdir(parents=True)
        (tmp_path / "own" / split / "0.png").write_bytes(png(0))
    assert refused(tmp_path / "own").endswith(
        "train has images but no classes; put every image into the folder of its class, such as "
        "train/<class>/*.png, with at least two classes"
    )


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
        "from flower_blsgd.data.source import import_torchvision\n"
        "assert import_torchvision() is import_torchvision()\nprint('imported')"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "imported\n", done.stderr
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
