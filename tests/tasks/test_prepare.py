"""`blsgd prepare`: one line, and then nothing is left to do."""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd import cli
from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from flower_blsgd.data import image_data
from flower_blsgd.tasks import TASKS, cifar10, load_task
from flower_blsgd.tasks.prepare import prepare_task

from ..data.image_files import make_folders, make_parquet, png
from ..data.test_flowers_folder import make_flowers
from ..log_capture import captured_log

OWN = """
import torch
from flower_blsgd import Task


def task(data, model):
    if model not in ("", "big"):
        from flower_blsgd import UsageError

        raise UsageError(f"model = {model!r} is not known")
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
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _leave_the_logs_as_they_were() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("flower_blsgd", "flwr")]
    before = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    yield
    for log, handlers, propagate, level in before:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "images", train=6, test=4)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the splits that are decoded from now on, in order."""
    splits: list[str] = []
    decode = image_data.decode_split

    def noting(split: Any, *arguments: Any) -> Any:
        splits.append(split.name)
        return decode(split, *arguments)

    monkeypatch.setattr(image_data, "decode_split", noting)
    return splits


@pytest.fixture
def prepare(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `blsgd prepare`, and hands back its only line."""

    def run(*arguments: str, code: int = 0) -> str:
        assert cli.main(["prepare", *arguments]) == code
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        assert told.out.count("\n") == (code == 0), told.out  # how it goes is told on stderr
        return told.out.rstrip("\n") if code == 0 else told.err.splitlines()[-1]

    return run


Prepare = Callable[..., str]


def test_images_are_made_ready_in_one_line(
    prepare: Prepare, images: Path, cache: Path, decoded: list[str]
) -> None:
    line = prepare("-s", "task=cifar10", "-s", f"data={images}")
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    assert line == (f"cifar10: 6 training and 4 test images of 3 classes, ready in {entry}")
    assert decoded == ["train", "test"]
    task = load_task("cifar10", str(images))  # a run finds them
    assert (task.num_train, task.num_test) == (6, 4)
    assert decoded == ["train", "test"]


def test_second_time_there_is_nothing_to_do_unless_again(
    prepare: Prepare, images: Path, cache: Path, decoded: list[str]
) -> None:
    arguments = ("-s", "task=cifar10", "-s", f"data={images}")
    line = prepare(*arguments)
    assert prepare(*arguments) == line
    assert decoded == ["train", "test"]
    assert prepare(*arguments, "--again") == line
    assert decoded == ["train", "test"] * 2
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    assert load_task("cifar10", str(images)).train[0][5].tolist() == (
        cifar10.prepare(str(images), again=True).train[0][5].tolist()
    )


def test_content_that_has_changed_is_made_again(
    prepare: Prepare, images: Path, cache: Path, decoded: list[str]
) -> None:
    arguments = ("-s", "task=cifar10", "-s", f"data={images}")
    line = prepare(*arguments)
    (file,) = cache.glob("*/train_images.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with captured_log("flower_blsgd.tasks.prepare") as log:  # the command line sets up those above
        assert prepare(*arguments) == line
    assert log.warnings == [
        f"{file.parent} is damaged (train_images.npy has not the content that was written); "
        "preparing it again"
    ]
    assert file.read_bytes() == whole
    assert decoded == ["train", "test"] * 2


def test_settings_may_come_from_a_file(prepare: Prepare, images: Path) -> None:
    Path("mine.toml").write_text(f"task = 'cifar10'\ndata = '{images}'\nmodel = 'resnet8'\n")
    assert prepare("-c", "mine.toml").startswith("cifar10: 6 training and 4 test images")


def test_bad_images_are_named_or_left_out(prepare: Prepare, tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "own", [png(1), b"bad", png(2), b"worse"], [png(3)])
    arguments = ("-s", "task=cifar10", "-s", f"data={folder}")
    line = prepare(*arguments, code=2)
    assert line.startswith("blsgd: data: image 1 of train cannot be decoded")
    assert "skip-bad = true" in line
    line = prepare(*arguments, "-s", "skip-bad=true")
    assert line.startswith(
        "cifar10: 2 training and 1 test images of 3 classes, 2 that cannot be read left out, "
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["data=/no/such/folder"], "data = '/no/such/folder' does not exist"),
        (["data=."], "data = "),
        (["task=cifar11"], "did you mean cifar10"),
        (["task=digits", "data=here"], "leave data empty"),
        (["task=digits", "model=cnm"], "did you mean cnn"),
        (["task=digits", "skip-bad=true"], "skip-bad = true"),
        (["tusk=digits"], "did you mean task"),
        (["task=no_module_of_this_name:task"], "no_module_of_this_name"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_line(
    prepare: Prepare, cache: Path, settings: list[str], told: str
) -> None:
    defaults = ["task=cifar10"] if not settings[0].startswith("t") else []
    arguments = [part for setting in (*defaults, *settings) for part in ("-s", setting)]
    line = prepare(*arguments, code=2)
    assert line.startswith("blsgd: ")
    assert told in line
    assert not list(cache.glob("cifar*"))


def test_unknown_model_is_refused_before_any_image_is_decoded(
    prepare: Prepare, images: Path, decoded: list[str]
) -> None:
    line = prepare("-s", "task=cifar10", "-s", f"data={images}", "-s", "model=resnet9", code=2)
    assert "model = 'resnet9' is not known; did you mean resnet" in line
    assert decoded == []


def test_digits_need_nothing(prepare: Prepare, cache: Path) -> None:
    line = "digits: 1,437 training and 360 test samples; nothing has to be prepared"
    assert prepare() == prepare("--again") == line
    assert not cache.exists()


def test_own_task_of_the_current_folder(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_prepared_task.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_prepared_task", raising=False)
    assert str(Path.cwd()) not in sys.path
    name = "own_prepared_task:task"
    assert prepare("-s", f"task={name}") == (
        f"{name}: 4 training and 3 test samples, as its own code makes them; nothing has to be "
        "prepared"
    )
    line = prepare("-s", f"task={name}", "-s", "data=more", "-s", "model=big")
    assert line.startswith(f"{name}: 1,200 training and 3 test samples")
    assert "model = 'small'" in prepare("-s", f"task={name}", "-s", "model=small", code=2)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "digits"])
def test_all_tasks_with_data_on_disk_prepare_them(name: str) -> None:
    """By a function of their module, with those of the task's options that change the data."""
    module_name, _, function_name = TASKS[name].partition(":")
    module = importlib.import_module(module_name)
    of_task = list(inspect.signature(getattr(module, function_name)).parameters)
    of_data = list(inspect.signature(module.prepare).parameters)
    assert of_task[:2] == of_data[:2] == ["data", "model"]
    assert "again" in of_data
    assert {"max_samples", "skip_bad"} <= set(of_data) - {"again"} <= set(of_task)


def test_only_the_first_rows_are_prepared(prepare: Prepare, images: Path) -> None:
    line = prepare("-s", "task=cifar10", "-s", f"data={images}", "-s", "max-samples=2")
    assert line.startswith("cifar10: 2 training and 2 test images of 3 classes, ready in ")


def test_flowers_are_cut_as_the_split_says(prepare: Prepare, tmp_path: Path) -> None:
    make_flowers(tmp_path / "f", (1,), (2,), tuple(range(3, 103)), tuple(range(1, 103)))
    arguments = ("-s", "task=flowers102", "-s", f"data={tmp_path / 'f'}", "-s", "split=paper")
    line = prepare(*arguments, "-s", "max-samples=3")
    assert line.startswith("flowers102: 3 training and 1 test images of 102 classes, ready in ")


def test_prepare_task_from_python(images: Path) -> None:
    assert prepare_task("cifar10", str(images)).startswith("cifar10: 6 training")
    with pytest.raises(UsageError, match="does not take it"):
        prepare_task("digits", skip_bad=True)
