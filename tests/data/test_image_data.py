"""The image data sets in the forms of the hub, of folders and as they are published."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

import datasets

from flower_blsgd.data.entry import Prepared
from flower_blsgd.data.image_data import ImageData, prepared_images
from flower_blsgd.data.image_sets import CIFAR10, CIFAR100, FLOWERS102, TINY_IMAGENET

from ..log_capture import captured_log
from .image_files import encoded, make_folders, make_parquet, pixels, png
from .test_cifar_binary import image as cifar_image
from .test_cifar_binary import make_cifar10, make_cifar100
from .test_flowers_folder import make_flowers
from .test_tiny_imagenet_folder import make_tiny_imagenet


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small(images: ImageData, **changes: Any) -> ImageData:
    """Return a data set of images of 8 pixels, so that tests write little."""
    return dataclasses.replace(images, side=8, **changes)


def chw(number: int, size: int) -> npt.NDArray[np.uint8]:
    return pixels(number, size).transpose(2, 0, 1)


def table_of(columns: dict[str, list[int]], images: list[bytes], image: str = "image") -> Any:
    """Return a table as the hub has it: images, and one column of classes for each labels."""
    features: dict[str, Any] = {image: datasets.Image()}
    rows: dict[str, Any] = {image: [{"bytes": one, "path": None} for one in images]}
    for name, labels in columns.items():
        classes = [f"class {label}" for label in range(max(labels) + 1)]
        features[name] = datasets.ClassLabel(names=classes)
        rows[name] = labels
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def refusal(images: ImageData, data: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as refused:
        prepared_images(images, str(data), **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- the four data sets


def test_numbers_are_those_of_the_paper() -> None:
    sets = [CIFAR10, CIFAR100, TINY_IMAGENET, *FLOWERS102.values()]
    assert [(one.name, one.side, one.num_classes) for one in sets] == [
        ("cifar10", 32, None),
        ("cifar100", 32, 100),
        ("tiny-imagenet", 64, 200),
        ("flowers102", 256, 102),
        ("flowers102", 256, 102),
    ]
    assert {name: (one.train, one.test) for name, one in FLOWERS102.items()} == {
        "official": (("train",), ("test",)),
        "paper": (("train", "test"), ("validation",)),
    }


def test_cifar100_as_on_the_hub(tmp_path: Path) -> None:
    """The fine labels, whatever else is there."""
    for split, first in (("train", 0), ("test", 1000)):
        columns = {"coarse_label": [k % 20 for k in range(100)], "fine_label": list(range(100))}
        table = table_of(columns, [png(first + k) for k in range(100)], "img")
        (tmp_path / "own").mkdir(exist_ok=True)
        table.to_parquet(tmp_path / "own" / f"{split}-00000-of-00001.parquet")
    images = prepared_images(CIFAR100, str(tmp_path / "own"))
    assert images.train[1].tolist() == list(range(100))
    assert len(images.class_names) == 100
    assert np.array_equal(images.train[0][99], chw(99, 32))
    assert np.array_equal(images.test[0][99], chw(1099, 32))


def test_cifar100_binary(tmp_path: Path) -> None:
    make_cifar100(tmp_path / "own")
    images = prepared_images(CIFAR100, str(tmp_path / "own"))
    assert images.train[1].tolist() == list(range(100))
    assert np.array_equal(images.train[0], np.stack([cifar_image(k) for k in range(100)]))


def test_cifar10_binary(tmp_path: Path) -> None:
    images = prepared_images(CIFAR10, str(make_cifar10(tmp_path / "own")))
    assert images.class_names[0] == "airplane"
    assert np.array_equal(images.train[0], np.stack([cifar_image(k) for k in range(10)]))
    assert np.array_equal(images.test[0][1], cifar_image(1001))
    assert images.test[1].tolist() == [9, 0]


def test_tiny_imagenet_as_published(tmp_path: Path) -> None:
    make_tiny_imagenet(tmp_path / "own", tuple(f"n{k:08}" for k in range(200)))
    images = prepared_images(small(TINY_IMAGENET), str(tmp_path / "own"))
    assert images.train[1].tolist() == [k // 2 for k in range(400)]
    # val_0 shows the last class; val_10 comes before val_2.
    expected = [199 - int(name) for name in sorted(str(k) for k in range(200))]
    assert images.test[1].tolist() == expected
    assert (images.train[0].shape, images.test[0].shape) == ((400, 3, 8, 8), (200, 3, 8, 8))


@pytest.mark.parametrize("valid", ["validation", "valid", "val", "dev"])
def test_names_of_the_validation_split(tmp_path: Path, valid: str) -> None:
    """Image folders, as for Tiny ImageNet."""
    folder = make_folders(tmp_path / "own")
    (folder / "test").rename(folder / valid)
    images = prepared_images(small(TINY_IMAGENET, num_classes=3), str(folder))
    assert (len(images.train[1]), len(images.test[1])) == (6, 3)


def test_flowers_as_published_are_cut_in_two_ways(tmp_path: Path) -> None:
    labels = tuple(k % 102 + 1 for k in range(110))
    ids = {"train": (2, 1), "validation": (110,), "test": (*range(109, 2, -1),)}
    make_flowers(tmp_path / "own", labels=labels, **ids)
    official = prepared_images(small(FLOWERS102["official"]), str(tmp_path / "own"))
    paper = prepared_images(small(FLOWERS102["paper"]), str(tmp_path / "own"))
    assert official.train[1].tolist() == [1, 0]
    assert official.test[1].tolist() == [(number - 1) % 102 for number in range(109, 2, -1)]
    assert paper.train[1].tolist() == [*official.train[1], *official.test[1]]
    assert np.array_equal(paper.train[0][2:], official.test[0])
    assert paper.test[1].tolist() == [109 % 102]
    assert len(official.class_names) == len(paper.class_names) == 102
    assert official.folder.is_dir()  # both stay
    assert official.folder != paper.folder


def test_flowers_of_many_sizes_are_resized_without_a_word(tmp_path: Path) -> None:
    labels = tuple(range(1, 103))
    folder = make_flowers(tmp_path / "own", (1,), (2,), tuple(range(3, 103)), labels)
    wide = np.zeros((50, 70, 3), np.uint8)
    wide[:, 10:60] = 200
    (folder / "jpg" / "image_00001.jpg").write_bytes(encoded(wide, "JPEG"))
    with captured_log() as log:
        images = prepared_images(small(FLOWERS102["official"]), str(folder))
    assert log.warnings == []
    assert abs(images.train[0][0].astype(int)[:, :, 1:-1] - 200).max() <= 4


# --- forms of folders that all of them read


def save_to_disk(folder: Path) -> None:
    table = table_of({"label": [0, 1, 2]}, [png(k) for k in range(3)])
    whole = datasets.DatasetDict({"train": table, "test": table.select([2])})
    whole.save_to_disk(str(folder))


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "own")
    images = prepared_images(CIFAR10, str(tmp_path / "own"))
    assert images.class_names == ("class 0", "class 1", "class 2")
    assert np.array_equal(images.train[0], np.stack([chw(k, 32) for k in range(3)]))
    assert images.test[1].tolist() == [2]


def test_a_single_split_that_save_to_disk_wrote(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "own")
    told = refusal(CIFAR10, tmp_path / "own" / "train")
    assert "no test split, found train; expected train-*.parquet" in told


def test_damage_of_what_save_to_disk_wrote(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "own")
    (tmp_path / "own" / "train" / "state.json").write_text("{")
    assert f"data = {str(tmp_path / 'own')!r} cannot be read (" in refusal(
        CIFAR10, tmp_path / "own"
    )


def test_all_forms_are_named_where_none_is_found(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    told = refusal(FLOWERS102["paper"], tmp_path / "own")
    for form in (
        "train-*.parquet and test-*.parquet and validation-*.parquet",
        "train/<class>/*.png",
        "save_to_disk",
        "setid.mat",
    ):
        assert form in told


def test_pickles_are_refused_with_what_is_read_instead(tmp_path: Path) -> None:
    folder = tmp_path / "own" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(b"\x80\x02.")
    told = refusal(CIFAR10, tmp_path / "own")
    assert "holds pickles (CIFAR-10's Python version)" in told
    assert "expected train-*.parquet" in told
    assert "data_batch_1.bin" in told


# --- classes, parts and bad images


def test_wrong_number_of_classes(tmp_path: Path, cache: Path) -> None:
    folder = make_folders(tmp_path / "own")
    assert refusal(CIFAR100, folder) == (
        f"data = {str(folder)!r}: wrong number of classes: found 3, expected the 100 of cifar100, "
        "counted from 0; name a folder with these, or leave data empty for the hub's "
        "uoft-cs/cifar100"
    )
    make_cifar100(tmp_path / "few", range(99))
    assert "found 99, expected the 100" in refusal(CIFAR100, tmp_path / "few")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_classes_are_counted_before_rows_are_left_out(tmp_path: Path) -> None:
    make_cifar100(tmp_path / "own")
    images = prepared_images(CIFAR100, str(tmp_path / "own"), max_samples=3)
    assert (len(images.class_names), images.train[1].tolist()) == (100, [0, 1, 2])


def test_names_of_classes_must_agree(tmp_path: Path) -> None:
    names = {"train": ["cat", "dog"], "test": ["dog", "cat"]}
    (tmp_path / "own").mkdir()
    for split, classes in names.items():
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)}
        rows = {"image": [{"bytes": png(k), "path": None} for k in range(2)], "label": [0, 1]}
        table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
        table.save_to_disk(str(tmp_path / "own" / split))
    (tmp_path / "own" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "train and test have different classes" in refusal(CIFAR10, tmp_path / "own")


def parquet_with_bad(tmp_path: Path) -> Path:
    train = [png(0), png(1), b"no image", png(3), b"nor this", png(5)]
    return make_parquet(tmp_path / "own", train, [png(10), png(11), b"bad"])


def test_only_the_first_rows_count(tmp_path: Path) -> None:
    folder = parquet_with_bad(tmp_path)
    images = prepared_images(CIFAR10, str(folder), max_samples=2)
    assert (images.train[1].tolist(), images.test[1].tolist()) == ([0, 1], [0, 1])
    assert np.array_equal(images.train[0][1], chw(1, 32))
    assert "image 2 of train cannot be decoded" in refusal(CIFAR10, folder, max_samples=3)
    whole = prepared_images(CIFAR10, str(folder), skip_bad=True, max_samples=1000)
    assert whole.skipped == {"train": 2, "test": 1}
    assert len(whole.train[1]) == 4
    assert images.folder.is_dir()  # a smaller one stays


def test_bad_image_of_joined_splits_is_named_where_it_is(tmp_path: Path) -> None:
    joined = small(CIFAR10, train=("train", "test"))
    good = make_parquet(tmp_path / "good", [png(0), png(1)], [png(2), png(3)])
    assert prepared_images(joined, str(good)).train[1].tolist() == [0, 1, 0, 1]
    bad = make_parquet(tmp_path / "bad", [png(0), png(1)], [png(2), b"bad"])
    assert "data: image 1 of test cannot be decoded" in refusal(joined, bad)


def prepared_sizes(images: Prepared) -> tuple[int, int]:
    return len(images.train[1]), len(images.test[1])


def test_a_missing_image_is_named_by_its_file(tmp_path: Path) -> None:
    folder = make_flowers(tmp_path / "own", (1,), (2,), tuple(range(3, 103)), tuple(range(1, 103)))
    (folder / "jpg" / "image_00050.jpg").unlink()
    images = small(FLOWERS102["official"])
    told = refusal(images, folder)
    assert told.startswith("data: image 47 of test cannot be decoded (")
    assert told.count("image_00050.jpg") == 1
    assert prepared_sizes(prepared_images(images, str(folder), skip_bad=True)) == (1, 99)
