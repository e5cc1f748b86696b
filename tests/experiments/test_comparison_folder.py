"""The files that a comparison leaves."""

from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.experiments import comparison_picture
from flower_blsgd.experiments.comparison_folder import write_comparison

from ..results.drawings import pixels_of
from .made_runs import several

NAMES = ("biased-local-sgd", "sync-sgd")
FILES = ["comparison.csv", "comparison.md", "comparison.png"]


def test_write_comparison(tmp_path: Path) -> None:
    folder = tmp_path / "deeper" / "compared"
    comparison = write_comparison(several(NAMES), folder, "sync-sgd", 0.95)
    assert (comparison.reference, comparison.target) == ("sync-sgd", 0.95)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert "reference" in (folder / "comparison.md").read_text(encoding="utf-8")
    assert len((folder / "comparison.csv").read_text().splitlines()) == 7
    assert pixels_of(folder / "comparison.png", "#009E73") > 200


def test_written_again_it_is_replaced(tmp_path: Path) -> None:
    write_comparison(several(NAMES), tmp_path, "sync-sgd")
    write_comparison(several(NAMES[:1]), tmp_path, NAMES[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert "sync-sgd" not in (tmp_path / "comparison.md").read_text(encoding="utf-8")


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no room")

    monkeypatch.setattr(comparison_picture, "draw_comparison", half)
    with pytest.raises(RuntimeError, match="no room"):
        write_comparison(several(NAMES), tmp_path, "sync-sgd")
    assert not (tmp_path / "comparison.png").exists()
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_compared_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dlb"):
        write_comparison(several(NAMES), tmp_path / "x", "dlb")
    assert not (tmp_path / "x").exists()


def test_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to"):
        write_comparison(several(NAMES), tmp_path / "file", "sync-sgd")
