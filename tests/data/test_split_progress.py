"""What an interrupted decoding leaves, and when that is believed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from flower_blsgd.data import image_decoding
from flower_blsgd.data.image_decoding import decode_split
from flower_blsgd.data.image_split import ImageSplit, JoinedSplit
from flower_blsgd.data.preparation import PROGRESS_FILES, read_progress, record_progress
from flower_blsgd.data.split_progress import read_split

SIDE = 2
BAD = (1, 6)


def split_of(count: int = 9, last_row: int = 1000) -> JoinedSplit:
    """Return images whose pixels are their row; some are bad, and the reading may break off."""

    def stored(first: int, last: int) -> list[object]:
        if last > last_row:
            raise OSError("as if interrupted")
        rows = range(first, last)
        return [b"bad" if r in BAD else np.full((3, SIDE, SIDE), r, np.uint8) for r in rows]

    labels = np.arange(count, dtype=np.int64)
    return JoinedSplit("train", [ImageSplit("train", labels, (), stored)])


@pytest.fixture(autouse=True)
def _chunks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoding, "_LARGEST_CHUNK", 2)


def decode(folder: Path, split: JoinedSplit) -> tuple[list[int], list[int]]:
    """Return the numbers that it told, and the rows that are there at the end."""
    told: list[int] = []
    decoded = decode_split(split, folder, read_split(folder, split, SIDE), True, told.append)
    images = np.load(folder / "train_images.npy")
    labels = np.load(folder / "train_labels.npy")
    assert images[:, 0, 0, 0].tolist() == labels.tolist()
    assert (decoded.count, decoded.skipped) == (len(labels), len(split) - len(labels))
    return told, labels.tolist()


GOOD = [row for row in range(9) if row not in BAD]


def interrupt(folder: Path, row: int) -> None:
    with pytest.raises(OSError, match="as if interrupted"):
        decode(folder, split_of(last_row=row))


@pytest.mark.parametrize("row", range(0, 9, 2))
def test_it_goes_on_where_it_was_interrupted(tmp_path: Path, row: int) -> None:
    interrupt(tmp_path, row)
    progress = read_split(tmp_path, split_of(), SIDE)
    assert progress.done == row
    assert progress.bad == tuple(bad for bad in BAD if bad < row)
    told, rows = decode(tmp_path, split_of())
    assert (sum(told), rows) == (9 - row, GOOD)


def test_it_may_be_interrupted_many_times(tmp_path: Path) -> None:
    for row in (2, 2, 6, 8):
        interrupt(tmp_path, row)
    assert decode(tmp_path, split_of()) == ([1], GOOD)


def test_after_the_end_nothing_is_read_again(tmp_path: Path) -> None:
    """Also when the bad ones are left out already, so that the array is shorter."""
    decode(tmp_path, split_of())
    assert decode(tmp_path, split_of(last_row=0)) == ([], GOOD)


def test_when_the_bad_ones_are_not_left_out_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("as if interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(image_decoding, "_keep_only", full)
        interrupt(tmp_path, 1000)
    assert decode(tmp_path, split_of(last_row=0)) == ([], GOOD)


def change(**told: object) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        progress = read_progress(folder)
        record_progress(folder, {"train": {**progress["train"], **told}})

    return do


def cut(folder: Path) -> None:
    path = folder / "train_images.npy"
    path.write_bytes(path.read_bytes()[:-1])


def write(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / PROGRESS_FILES[0]).write_text(text) and None


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        lambda folder: (folder / "train_images.npy").unlink(),
        lambda folder: np.save(folder / "train_images.npy", np.zeros((9, 3, 2, 2), np.int8)),
        lambda folder: np.save(folder / "train_images.npy", np.zeros((8, 3, 2, 2), np.uint8)),
        write(""),
        write("[1]"),
        write('{"train": [1]}'),
        write('{"train": {"done": 4}}'),
        change(key="of other labels"),
        change(side=4),
        change(done=-1),
        change(done=10),
        change(done=None),
        change(bad=None),
        change(bad=[4]),
        change(resized="many"),
    ],
)
def test_what_is_in_doubt_is_begun_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    interrupt(tmp_path, 4)
    damage(tmp_path)
    progress = read_split(tmp_path, split_of(), SIDE)
    assert (progress.done, progress.images, progress.bad) == (0, None, ())
    told, rows = decode(tmp_path, split_of())
    assert (sum(told), rows) == (9, GOOD)


def test_other_labels_are_other_data(tmp_path: Path) -> None:
    interrupt(tmp_path, 4)
    assert read_split(tmp_path, split_of(8), SIDE).done == 0
    assert read_split(tmp_path, split_of(9), SIDE).done == 4


def test_progress_is_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    record_progress(tmp_path, {"a": 1})
    with pytest.raises(TypeError):
        record_progress(tmp_path, {"a": {1}})  # cannot be written as JSON
    assert read_progress(tmp_path) == {"a": 1}
    assert json.loads((tmp_path / PROGRESS_FILES[0]).read_text()) == {"a": 1}
    assert read_progress(tmp_path / "elsewhere") == {}
