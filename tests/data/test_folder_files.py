"""Which files of a folder belong to which split, whatever classes and files are called."""

from pathlib import Path

import numpy as np
import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from flower_blsgd.data.folder_files import files_of_splits, pattern_signs, shared_file
from flower_blsgd.data.image_data import prepared_images
from flower_blsgd.data.image_sets import CIFAR10

from .image_files import make_parquet, pixels, png


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_classes(
    root: Path, classes: tuple[str, ...], file: str = "a.png", splits: str = "train test"
) -> Path:
    """Write one image of each class; image k is `pixels(k)`, test images count from 1000."""
    for split, first in zip(splits.split(), (0, 1000), strict=True):
        for k, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            (root / split / name / file).write_bytes(png(first + k))
    return root


@pytest.mark.parametrize(
    ("classes", "file"),
    [
        (("cat", "dog", "train"), "a.png"),  # as CIFAR-100 has
        (("cat", "dev", "test"), "a.png"),
        (("cat", "eval", "val"), "a.png"),
        (("cat", "dog"), "train-0.png"),
        (("cat", "dog"), "test 1.png"),
    ],
)
@pytest.mark.parametrize("splits", ["train test", "training eval"])
def test_no_image_of_one_split_is_in_the_other(
    tmp_path: Path, classes: tuple[str, ...], file: str, splits: str
) -> None:
    images = prepared_images(CIFAR10, str(make_classes(tmp_path / "own", classes, file, splits)))
    assert images.class_names == classes
    for (found, labels), first in ((images.train, 0), (images.test, 1000)):
        expected = [pixels(first + k).transpose(2, 0, 1) for k in range(len(classes))]
        assert np.array_equal(found, np.stack(expected))
        assert labels.tolist() == list(range(len(classes)))


def test_a_file_of_two_splits_is_refused(tmp_path: Path) -> None:
    """The splits are not at the top, so that the library looks for them everywhere."""
    make_classes(tmp_path / "own" / "images", ("cat", "dog", "train"))
    with pytest.raises(UsageError) as refused:
        prepared_images(CIFAR10, str(tmp_path / "own"))
    said = str(refused.value)
    assert said.startswith(f"data = {str(tmp_path / 'own')!r}: ")
    assert "/test/train/a.png belongs by its name to train and to test; rename files" in said


def test_files_of_splits(tmp_path: Path) -> None:
    assert files_of_splits(tmp_path) is None
    (tmp_path / "training").mkdir()
    (tmp_path / "test").write_text("no directory")
    assert files_of_splits(tmp_path) is None
    (tmp_path / "val").mkdir()
    assert files_of_splits(tmp_path) == {"train": "training/**", "validation": "val/**"}
    (tmp_path / "train").mkdir()
    (tmp_path / "README.md").write_text("# My images")
    assert files_of_splits(tmp_path) == {"train": "train/**", "validation": "val/**"}
    (tmp_path / "README.md").write_text("---\nconfigs: []\n---\n")
    assert files_of_splits(tmp_path) is None


def test_shared_file() -> None:
    assert shared_file({"train": ["a", "b", "a"], "test": ["c"]}) is None
    assert shared_file({"train": ["a", "b"], "test": ["c", "b"]}) == ("b", "train", "test")


def test_signs_of_patterns() -> None:
    assert pattern_signs(Path("/a/b:c{d}")) == ""
    assert pattern_signs(Path("/a/b::c")) == "::"
    assert pattern_signs(Path("/a[1]/b*")) == "*[]"


# --- data set cards

FILES = """- config_name: {name}
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
"""
SIZES = """dataset_info:
  splits:
  - {name: train, num_bytes: 100, num_examples: 50000}
  - {name: test, num_bytes: 100, num_examples: 10000}
"""


def folder_with_card(root: Path, card: str) -> Path:
    make_parquet(root / "data", [png(k) for k in range(6)], [png(k) for k in range(3)])
    (root / "README.md").write_text(f"---\n{card}---\n")
    return root


def test_a_part_of_what_the_card_speaks_of(tmp_path: Path) -> None:
    card = f"{SIZES}configs:\n{FILES.format(name='default')}"
    images = prepared_images(CIFAR10, str(folder_with_card(tmp_path / "own", card)))
    assert (len(images.train[1]), len(images.test[1])) == (6, 3)


def test_a_card_of_several_data_sets(tmp_path: Path) -> None:
    card = f"configs:\n{FILES.format(name='a')}{FILES.format(name='b')}"
    with pytest.raises(UsageError) as refused:
        prepared_images(CIFAR10, str(folder_with_card(tmp_path / "own", card)))
    assert "its README.md describes several data sets; remove README.md, or" in str(refused.value)
    assert "\n" not in str(refused.value)
