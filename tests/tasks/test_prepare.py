"""`blsgd prepare`: one line, and then nothing is left to do."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from flower_blsgd.cli import main as cli
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.prepare import prepare_task

from ..data.image_files import make_folders
from ..log_capture import captured_log
from ..refusal import refusal

OWN = """
import torch
from flower_blsgd import Task


def task(data, model):
    count = {"": 4, "more": 1200}[data]
    inputs = torch.zeros(count, 2)
    return Task(
        model=lambda: torch.nn.Linear(2, 2),
        train=(inputs, torch.zeros(count).long()),
        test=(inputs[:3], torch.zeros(3).long()),
    )
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    current = tmp_path / "here"
    current.mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "cache"


@pytest.fixture
def images(tmp_path: Path) -> str:
    return str(make_folders(tmp_path / "images", train=6, test=4))


def test_images_are_prepared_once_unless_again(images: str, cache: Path) -> None:
    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}

    line = prepare_task("cifar10", images)
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    assert line == f"cifar10: 6 training and 4 test images of 3 classes, ready in {entry}"
    first = written()
    assert load_task("cifar10", images).num_train == 6  # a run finds them
    assert prepare_task("cifar10", images) == line
    assert written() == first
    assert prepare_task("cifar10", images, again=True) == line
    assert written().keys() == first.keys()
    assert written() != first


def test_content_that_has_changed_is_prepared_again(images: str, cache: Path) -> None:
    line = prepare_task("cifar10", images)
    file = max(cache.rglob("*.npy"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with captured_log() as log:
        assert prepare_task("cifar10", images) == line
    (warning,) = log.warnings
    assert warning.startswith(f"{file.parent} is damaged ({file.name} ")
    assert file.read_bytes() == whole


def test_refusals(cache: Path) -> None:
    assert "data = '/no/such/folder' is not a" in refusal(
        prepare_task, "cifar10", "/no/such/folder"
    )
    assert "skip-bad = true" in refusal(prepare_task, "digits", skip_bad=True)
    assert not list(cache.glob("cifar*"))


def test_tasks_without_anything_to_prepare(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, which finds an own task in the current folder."""
    assert cli.main(["prepare"]) == 0
    line = "digits: 1,437 training and 360 test samples; nothing has to be prepared\n"
    assert capsys.readouterr().out == line
    Path("own_prepared_task.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_prepared_task", raising=False)
    name = "own_prepared_task:task"
    assert cli.main(["prepare", "-s", f"task={name}", "-s", "data=more", "-s", "model=big"]) == 0
    assert capsys.readouterr().out == (
        f"{name}: 1,200 training and 3 test samples, as its own code makes them; nothing has to "
        "be prepared\n"
    )
    assert not cache.exists()
