"""Tiny ImageNet as its archive unpacks."""

from pathlib import Path

import pytest

from flower_blsgd.data.source import find_source
from flower_blsgd.data.tiny_imagenet_folder import tiny_imagenet_splits
from flower_blsgd.errors import UsageError

from .image_files import encoded, pixels

CLASSES = ("n01443537", "n02124075", "n09999999")


def make_tiny_imagenet(root: Path, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write two training images of each class, and one to validate on, in another order."""
    folder = root / "tiny-imagenet-200"
    lines = []
    for label, name in enumerate(classes):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for k in range(2):
            (images / f"{name}_{k}.JPEG").write_bytes(encoded(pixels(2 * label + k, 64), "JPEG"))
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        image = f"val_{len(classes) - 1 - label}.JPEG"
        (folder / "val" / "images").mkdir(parents=True, exist_ok=True)
        (folder / "val" / "images" / image).write_bytes(encoded(pixels(1000 + label, 64), "JPEG"))
        lines.append(f"{image}\t{name}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(reversed(classes)) + "\n")
    return folder


@pytest.mark.parametrize("parent", [False, True])
def test_splits(tmp_path: Path, parent: bool) -> None:
    folder = make_tiny_imagenet(tmp_path)
    source = find_source("hub/name", str(tmp_path if parent else folder), "LAYOUT")
    splits = tiny_imagenet_splits(source)
    assert splits is not None
    train, valid = splits["train"], splits["valid"]
    assert train.class_names == valid.class_names == CLASSES
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert valid.labels.tolist() == [2, 1, 0]  # of val_0, val_1, val_2
    (stored,) = train.stored(3, 4)
    assert stored == {
        "bytes": None,
        "path": str(folder / "train" / "n02124075" / "images" / "n02124075_1.JPEG"),
    }
    assert [Path(one["path"]).name for one in valid.stored(0, 3)] == [
        "val_0.JPEG",
        "val_1.JPEG",
        "val_2.JPEG",
    ]


def test_other_folders_are_left_to_others(tmp_path: Path) -> None:
    assert tiny_imagenet_splits(find_source("hub/name", str(tmp_path), "LAYOUT")) is None


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    folder = make_tiny_imagenet(tmp_path)
    source = find_source("hub/name", str(tmp_path), "LAYOUT")

    def refusal() -> str:
        with pytest.raises(UsageError) as refused:
            tiny_imagenet_splits(source)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    told = folder / "val" / "val_annotations.txt"
    lines = told.read_text()
    told.write_text(lines + "val_9.JPEG\tn00000000\t0\t0\t1\t1\n")
    assert f"{told} names no class of wnids.txt in line 4" in refusal()
    told.write_text(" \n")
    assert f"{told} is empty" in refusal()
    told.unlink()
    assert f"{told} cannot be read (No such file" in refusal()
    told.write_text(lines)
    for path in (folder / "train" / CLASSES[1] / "images").iterdir():
        path.unlink()
    assert f"{CLASSES[1]}/images holds no *.JPEG" in refusal()
    (folder / "train" / CLASSES[1] / "images").rmdir()
    assert f"{CLASSES[1]}/images cannot be read (No such file" in refusal()


@pytest.mark.parametrize("place", ["{name}/{file}", "{name}/images/{file}"])
def test_images_to_validate_on_may_be_sorted_into_classes(tmp_path: Path, place: str) -> None:
    folder = make_tiny_imagenet(tmp_path)
    source = find_source("hub/name", str(folder), "LAYOUT")
    published = tiny_imagenet_splits(source)
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        file, name, *_ = line.split("\t")
        new = folder / "val" / place.format(file=file, name=name)
        new.parent.mkdir(parents=True)
        (folder / "val" / "images" / file).rename(new)
    moved = tiny_imagenet_splits(source)
    assert published is not None
    assert moved is not None
    assert moved["valid"].labels.tolist() == published["valid"].labels.tolist() == [2, 1, 0]
    paths = [Path(one["path"]) for one in moved["valid"].stored(0, 3)]
    assert [path.name for path in paths] == ["val_0.JPEG", "val_1.JPEG", "val_2.JPEG"]
    assert all(path.is_file() for path in paths)


def test_missing_images_to_validate_on_are_told(tmp_path: Path) -> None:
    folder = make_tiny_imagenet(tmp_path)
    (folder / "val" / "images").rename(folder / "val" / "elsewhere")
    with pytest.raises(UsageError, match=r"val/images/val_2.JPEG of val_annotations.txt is miss"):
        tiny_imagenet_splits(find_source("hub/name", str(folder), "LAYOUT"))


def test_what_a_system_leaves_beside_the_images_is_no_image(tmp_path: Path) -> None:
    folder = make_tiny_imagenet(tmp_path)
    for name in ("Thumbs.db", "._n01443537_0.JPEG"):
        (folder / "train" / CLASSES[0] / "images" / name).write_bytes(b"x")
    splits = tiny_imagenet_splits(find_source("hub/name", str(folder), "LAYOUT"))
    assert splits is not None
    assert splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]
