"""Where data come from: folders in all their layouts, the hub, and what is refused of them."""

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets
import huggingface_hub.constants as hf_hub_constants

from flower_blsgd.data import source as source_module
from flower_blsgd.data.libraries import hf_hub_reachable
from flower_blsgd.data.source import DataSource

from ..refusal import refusal
from .image_files import make_folders, make_parquet, pixels, png

IMAGES = [png(k) for k in range(6)]
LAYOUT = (
    "image folders train/<class>/*.png and test/<class>/*.png, or train-*.parquet and "
    "test-*.parquet with columns image and label, or the output of datasets' save_to_disk, or "
    "CLASS:FOLDER for a class of torchvision.datasets; without a test split, set validation-share"
)


def source_of(data: Path | str, **values: Any) -> DataSource:
    known = {"name": "cifar10", "hf_hub_name": "uoft-cs/cifar10", "data": str(data)}
    return DataSource(**{**known, **values})


def rows_of(folder: Path, scratch: Path) -> dict[str, int]:
    return {name: len(table) for name, table in source_of(folder).tables(scratch).items()}


# --- folders


@pytest.mark.parametrize(
    ("make", "moved"),
    [
        (make_folders, {}),
        (make_folders, {"train": "training", "test": "eval"}),
        (lambda folder: make_parquet(folder, IMAGES, IMAGES[:3]), {}),
    ],
)
def test_the_splits_of_a_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    moved: dict[str, str],
) -> None:
    """Its name may look odd, and nothing is written beside it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = make(tmp_path / "my {own} data, #1")
    for name, new in moved.items():
        (folder / name).rename(folder / new)
    before = sorted(folder.rglob("*"))
    assert rows_of(folder, tmp_path / "scratch") == {"train": 6, "test": 3}
    assert sorted(folder.rglob("*")) == before
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("other", ["test", "val"])
def test_classes_may_be_called_like_splits(tmp_path: Path, other: str) -> None:
    """CIFAR-100 has a class "train"; no image of one split may be in the other."""
    for split, first in (("train", 0), (other, 1000)):
        for k, name in enumerate(("cat", "test", "train")):
            (tmp_path / "own" / split / name).mkdir(parents=True)
            (tmp_path / "own" / split / name / "train-0.png").write_bytes(png(first + k))
    tables = source_of(tmp_path / "own").tables(tmp_path / "scratch")
    rest = "test" if other == "test" else "validation"
    assert tables.keys() == {"train", rest}
    for table, first in ((tables["train"], 0), (tables[rest], 1000)):
        assert table["label"][:] == [0, 1, 2]
        for k, image in enumerate(table["image"]):
            assert np.array_equal(np.asarray(image), pixels(first + k))


def test_a_file_of_two_splits_is_refused(tmp_path: Path) -> None:
    """The splits are not at the top, so that the library looks for them everywhere."""
    make_parquet(tmp_path / "own" / "train" / "test", IMAGES, IMAGES[:3])
    message = refusal(rows_of, tmp_path / "own", tmp_path / "scratch")
    assert message.startswith(
        f"data = {str(tmp_path / 'own')!r}: the names of some files match two"
    )
    assert message.endswith("; put the splits into top-level folders train and test")


def test_a_byte_order_mark_is_no_character(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("A text\r\nof two lines", encoding="utf-8-sig", newline="")
    tables = source_of(tmp_path / "own.txt", noun="texts").tables(tmp_path / "scratch")
    assert tables["train"]["text"][:] == ["A text\nof two lines"]


CARD = """---
dataset_info:
  splits:
  - {name: train, num_bytes: 100, num_examples: 50000}
  - {name: test, num_bytes: 100, num_examples: 10000}
configs:
- config_name: default
  data_files:
  - split: train
    path: train/train-*
  - split: test
    path: test/test-*
---
"""


def test_data_set_cards(tmp_path: Path) -> None:
    """One may name the files, and speak of more rows than there are."""
    for name in ("train", "test"):  # each with a file more than the card names
        make_parquet(tmp_path / "own" / name, IMAGES, IMAGES[:3])
    (tmp_path / "own" / "README.md").write_text(CARD)
    assert rows_of(tmp_path / "own", tmp_path / "scratch") == {"train": 6, "test": 3}


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for data in (str(tmp_path / "file"), "~no-such-user/x", "a" * 5000, "a\0b"):
        message = refusal(source_of, data)
        assert message.startswith(f"data = {data!r} is not a ")
        assert message.endswith(", or leave data empty for the HF hub's uoft-cs/cifar10")
    (tmp_path / "d[1]").mkdir()  # datasets would read a folder d1
    assert "d[1] contains [ ], which the library" in refusal(source_of, tmp_path / "d[1]")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = refusal(source_of("", noun="texts").check_libraries)
    assert message.endswith(
        "reading texts needs tokenizers; in a clone of flower-blsgd: "
        "pip install -c constraints.txt -e '.[text]'"
    )


# --- the hub


def test_any_answer_of_the_hub_is_one_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(request: Any, timeout: float) -> None:
        assert (request.full_url, request.method) == ("http://hub", "HEAD")
        raise urllib.error.HTTPError("http://hub", 404, "not found", Message(), None)

    monkeypatch.setattr(hf_hub_constants, "ENDPOINT", "http://hub")
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert hf_hub_reachable()
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", True)
    assert not hf_hub_reachable()


@pytest.mark.parametrize(
    ("reachable", "error", "why"),
    [(False, ConnectionError("x"), "not reachable"), (True, ValueError("no\nx"), "no")],
)
def test_a_hub_that_gives_no_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reachable: bool,
    error: Exception,
    why: str,
) -> None:
    """Without a connection, earlier downloads are used and the hub is not queried."""
    seen: list[bool] = []

    def load(name: str) -> None:
        seen.extend(module.HF_HUB_OFFLINE for module in modules)
        raise RuntimeError("while downloading") from error

    modules = (hf_hub_constants, datasets.config)
    for module in modules:
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(source_module, "hf_hub_reachable", lambda: reachable)
    assert refusal(source_of("").tables, tmp_path) == (
        f"data = '': the HF hub's uoft-cs/cifar10 cannot be read ({why}); name a folder with "
        f"{LAYOUT}"
    )
    assert seen == [not reachable] * 2
    assert [module.HF_HUB_OFFLINE for module in modules] == [False] * 2


# --- what the name of a cache entry is made of


def test_state_changes_with_every_file(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "own")
    source = source_of(folder)
    image = folder / "train" / "cat" / "00000.png"

    def lengthen() -> None:
        image.write_bytes(image.read_bytes() + b"0")
        os.utime(image, ns=(0, 12_345))

    seen = [source.state()]
    for change in (
        lambda: os.utime(image, ns=(0, 12_345)),
        lengthen,
        lambda: image.rename(image.with_name("other.png")),
        lambda: (folder / "train" / "owl" / "more.png").write_bytes(png(9)),
    ):
        change()
        seen.append(source.state())
    assert len(set(seen)) == len(seen)
    for name in (".DS_Store", ".notes.csv.swp", ".~lock.notes.csv#"):
        (folder / name).write_text("x")
    (folder / ".#notes.csv").symlink_to("user@host.123")  # of Emacs
    (tmp_path / "link").symlink_to(folder)
    assert source.state() == source_of(tmp_path / "link").state() == seen[-1]
    assert source_of("").state() == "hub uoft-cs/cifar10"
