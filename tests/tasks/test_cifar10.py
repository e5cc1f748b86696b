"""CIFAR-10's task on small data of its layout."""

from pathlib import Path

import pytest
import torch

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.tasks.check import check_task
from flower_blsgd.tasks.cifar10 import cifar10, model
from flower_blsgd.worker.local_sgd import cross_entropy

from ..data.image_files import make_folders, make_parquet, png


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return str(make_folders(tmp_path / "own"))


def test_task_is_sound(folder: str) -> None:
    task = cifar10(folder)
    assert (task.num_train, task.num_test) == (6, 3)
    assert task.loss is cross_entropy
    assert task.augment is random_crop_and_flip
    check_task(task)


def test_model_has_the_classes_of_the_data(folder: str) -> None:
    for name in ("", "resnet20", "resnet8", "resnet20-b"):
        made = cifar10(folder, name).initial_model(0)
        assert made(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 3)
        again = model(name, num_classes=3)
        again.load_state_dict(made.state_dict())


def test_fingerprint_is_that_of_the_images(folder: str) -> None:
    first = cifar10(folder)
    assert first.fingerprint() == first.data_fingerprint
    (Path(folder) / "train" / "cat" / "00000.png").write_bytes(png(50))
    assert cifar10(folder).fingerprint() != first.fingerprint()


def test_task_by_name_with_a_validation_share(folder: str) -> None:
    task = load_task("cifar10", folder, "resnet8", validation_share=0.5, seed=1)
    assert (task.num_train, task.num_test) == (3, 3)
    check_task(task)


def test_skip_bad_reaches_the_images(folder: str, tmp_path: Path) -> None:
    own = make_parquet(tmp_path / "parquet", [png(1), png(2), b"bad"], [png(3)])
    with pytest.raises(UsageError, match="skip-bad = true"):
        load_task("cifar10", str(own))
    assert load_task("cifar10", str(own), skip_bad=True).num_train == 2


def test_unknown_model_is_refused_before_the_data_is_read() -> None:
    with pytest.raises(UsageError, match="model = 'resnet9' is not known; did you mean resnet"):
        cifar10("/no/such/folder", "resnet9")
