"""Where images come from, and what is said when they do not come."""

import errno
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from flower_blsgd.data.image_columns import image_bytes, table_split
from flower_blsgd.data.image_data import prepared_images
from flower_blsgd.data.image_sets import CIFAR10
from flower_blsgd.data.image_split import ImageSplit
from flower_blsgd.data.source import DataSource, find_source

from .image_files import make_folders, make_parquet, png

IMAGES = [png(k) for k in range(6)]


def source_of(data: Path | str) -> DataSource:
    return find_source(CIFAR10.hub_name, str(data), CIFAR10.layout)


def splits_of(data: Path | str, scratch: Path) -> tuple[ImageSplit, ImageSplit]:
    """Return the training and the test split of a source."""
    source = source_of(data)
    tables = source.tables(scratch)
    train, test = (
        table_split(source, name, source.find_split(tables, name)) for name in ("train", "test")
    )
    return train, test


def refusal(data: Path | str, scratch: Path) -> str:
    """Return the line that refuses a source."""
    with pytest.raises(UsageError) as refused:
        splits_of(data, scratch / "scratch")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_image_folders(tmp_path: Path) -> None:
    train, test = splits_of(make_folders(tmp_path / "own"), tmp_path / "s")
    assert (train.name, len(train), len(test)) == ("train", 6, 3)
    assert train.class_names == test.class_names == ("cat", "dog", "owl")
    assert list(train.labels) == [0, 0, 1, 1, 2, 2]  # folder after folder
    stored = train.stored(0, 2)
    assert [Path(one["path"]).name for one in stored] == ["00000.png", "00003.png"]


@pytest.mark.parametrize(
    ("image", "label", "hints"),
    [("img", "label", True), ("photo", "labels", True), ("image", "label", False)],
)
def test_parquet(tmp_path: Path, image: str, label: str, hints: bool) -> None:
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES[:2], image, label, hints=hints)
    train, test = splits_of(folder, tmp_path / "scratch")
    assert list(train.labels) == [0, 1, 2, 0, 1, 2]
    assert list(test.labels) == [0, 1]
    assert train.class_names == ()
    assert train.stored(1, 2) in ([{"bytes": IMAGES[1], "path": None}], [IMAGES[1]])


def test_folder_names_with_signs_of_patterns(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "my {own} data, #1")
    assert len(splits_of(folder, tmp_path / "scratch")[0]) == 6
    folder = make_folders(tmp_path / "my [own] data?")
    with pytest.raises(UsageError, match=r"holds \?\[\], which .* pattern; rename the folder"):
        source_of(folder)


def test_nothing_is_left_outside_of_the_scratch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = make_folders(tmp_path / "own")
    before = sorted(folder.rglob("*"))
    splits_of(folder, tmp_path / "scratch")
    assert sorted(folder.rglob("*")) == before
    assert not (tmp_path / "home").exists()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, told in (("none", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(UsageError) as refused:
            source_of(tmp_path / name)
        assert str(refused.value).startswith(f"data = {str(tmp_path / name)!r} {told}; name a fol")
        assert "uoft-cs/cifar10" in str(refused.value)


def test_a_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_bytes(b"0")
    for name in ("empty", "other"):
        said = refusal(tmp_path / name, tmp_path)
        assert said.startswith(f"data = {str(tmp_path / name)!r} holds no readable data; expected")
        assert "train/<class>/*.png" in said


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES)
    (folder / "train-00000-of-00001.parquet").write_bytes(b"this is not parquet")
    assert "cannot be read (Parquet magic bytes not found" in refusal(folder, tmp_path)


def test_no_image_column(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("text,label\nhello,1\n")
    said = refusal(tmp_path, tmp_path / "s")
    assert "no image column in train, found the columns text, label; expected" in said


def test_no_label_column(tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "a", IMAGES, IMAGES, label="fine_label")
    assert "no label column in train, found the columns img, fine_label" in refusal(
        folder, tmp_path
    )
    texts = {"train": ["cat"] * 6, "test": ["cat"] * 6}
    folder = make_parquet(tmp_path / "b", IMAGES, IMAGES, labels=texts)
    assert "no label column in train, found the columns img, label" in refusal(folder, tmp_path)


def test_no_test_split(tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES)
    (folder / "test-00000-of-00001.parquet").unlink()
    assert "no test split, found train; expected train-*.parquet and test-*" in refusal(
        folder, tmp_path
    )


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"train": [0, 1, 2, 0, 1, 2], "test": [-1] * 6}, "label of test goes down to -1"),
        ({"train": [0, 1, None, 0, 1, None], "test": [0] * 6}, "2 rows of train have no label"),
        ({"train": [4] * 6, "test": [4] * 6}, "all images of train have the same label"),
    ],
)
def test_labels_that_are_no_classes(
    tmp_path: Path, labels: dict[str, list[int | None]], told: str
) -> None:
    assert told in refusal(make_parquet(tmp_path / "a", IMAGES, IMAGES, labels=labels), tmp_path)


def test_images_without_class_folders(tmp_path: Path) -> None:
    """The library gives such images a label column without values."""
    for split in ("train", "test"):
        (tmp_path / "own" / split).mkdir(parents=True)
        for k in range(3):
            (tmp_path / "own" / split / f"{k}.png").write_bytes(png(k))
    said = refusal(tmp_path / "own", tmp_path)
    assert "3 rows of train have no label" in said
    assert "train/<class>/*.png" in said


def test_hub_out_of_reach_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        monkeypatch.setattr("flower_blsgd.hub._PATIENCE_SECONDS", 0.3)
        monkeypatch.setenv("no_proxy", "*")
        for endpoint in (f"http://127.0.0.1:{port}", "http://127.0.0.1:9", "nonsense"):
            monkeypatch.setattr(hub, "ENDPOINT", endpoint)
            began = time.monotonic()
            said = refusal("", tmp_path)
            assert time.monotonic() - began < 5
            assert said.startswith("data = '': the hub with uoft-cs/cifar10 is out of reach; give ")
            assert "data=<folder>" in said
    assert not hub.HF_HUB_OFFLINE


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folders(tmp_path / "own")
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    for name in ("datasets", "PIL"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(UsageError, match=f"needs {name}; pip install 'flower-blsgd.vision"):
                prepared_images(CIFAR10, str(folder))


def test_folders_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("~no-such-user/x", "home"), ("x" * 300, "File name too long")):
        with pytest.raises(UsageError) as refused:
            source_of(name)
        said = str(refused.value)
        assert said.startswith(f"data = {name!r} cannot be looked at (")
        assert told in said
        assert "; name a folder with train-*.parquet" in said

    def closed(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(UsageError, match=r"cannot be looked at \(Permission denied\); name a fol"):
        source_of(tmp_path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/hf/x"), "No space left on device"),
        (OSError("Not enough disk space. Needed: 3.4 GiB"), "Not enough disk space. Needed"),
        (PermissionError(errno.EACCES, "Permission denied", "/hf/x"), "Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/hf/x"), "Read-only file system"),
    ],
)
def test_a_full_or_closed_cache_of_the_hub_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, told: str
) -> None:
    import datasets

    def load(name: str) -> None:
        try:
            raise error
        except OSError as reason:
            raise RuntimeError("while downloading") from reason

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("flower_blsgd.data.source.hub_answers", lambda: True)
    said = refusal("", tmp_path)
    assert said.startswith("data = '': the cache of the hub's library cannot be written (")
    assert told in said
    assert said.endswith("; make room, or set HF_HOME to another folder")


def test_a_closed_network_is_no_closed_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load(name: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("flower_blsgd.data.source.hub_answers", lambda: True)
    assert "the hub with uoft-cs/cifar10 refused (" in refusal("", tmp_path)


def test_relative_paths_of_images_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be read relative to wherever one starts a run."""
    (tmp_path / "a.png").write_bytes(png(1))
    monkeypatch.chdir(tmp_path)
    for path in ("a.png", "./a.png"):
        with pytest.raises(ValueError, match="no image but a relative path"):
            image_bytes({"bytes": None, "path": path})
    assert image_bytes({"bytes": None, "path": str(tmp_path / "a.png")}) == png(1)
    assert image_bytes({"bytes": b"1", "path": "a.png"}) == b"1"


# --- what a source's state is made of


def test_state_changes_with_the_files(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    source = source_of(folder)
    image = folder / "train" / "cat" / "00000.png"
    seen = [source.state()]
    os.utime(image, ns=(0, 12_345))
    seen.append(source.state())
    image.write_bytes(image.read_bytes() + b"0")
    os.utime(image, ns=(0, 12_345))
    seen.append(source.state())
    image.rename(image.with_name("other.png"))
    seen.append(source.state())
    (folder / "train" / "owl" / "more.png").write_bytes(png(9))
    seen.append(source.state())
    assert len(set(seen)) == len(seen)
    assert source.state() == seen[-1]


def test_state_leaves_hidden_files_alone(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    before = source_of(folder).state()
    (folder / ".DS_Store").write_text("x")
    assert source_of(folder).state() == before


def test_state_is_that_of_the_folder_behind_a_link(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    (tmp_path / "link").symlink_to(folder)
    assert source_of(tmp_path / "link").state() == source_of(folder).state()


def test_state_of_a_folder_with_a_broken_link(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    (folder / "gone.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"gone\.png cannot be read \(No such file"):
        source_of(folder).state()
