"""CIFAR-100, Flowers-102 and Tiny ImageNet on a few images in the hub's layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

from flower_blsgd.errors import UsageError
from flower_blsgd.tasks import load_model, load_task
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.tasks.check import check_task
from flower_blsgd.tasks.prepare import prepare_task
from flower_blsgd.worker.local_sgd import cross_entropy

from ..stand_ins import write_stand_in

# Classes, side as stored, side as augmented.
TASKS = {
    "cifar100": (100, 32, 32),
    "tiny-imagenet": (200, 64, 64),
    "flowers102": (102, 256, 224),
}
TRAIN, TEST = 12, 5  # and as many for validation as for testing


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image-tasks")
    for task in TASKS:
        write_stand_in(task, root / task, TRAIN, TEST)
    return root


@pytest.fixture(autouse=True)
def _cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLSGD_CACHE", str(root / "cache"))


def loaded(root: Path, name: str, model: str = "wrn-10-1", **options: Any) -> Any:
    return load_task(name, str(root / name), model, **options)


@pytest.mark.parametrize("name", TASKS)
def test_task_is_sound(root: Path, name: str) -> None:
    classes, stored, seen = TASKS[name]
    task = loaded(root, name)
    assert (task.num_train, task.num_test) == (TRAIN, TEST)
    assert task.train[0].shape == (TRAIN, 3, stored, stored)
    assert str(task.train[0].dtype) == "uint8"
    assert task.loss is cross_entropy
    images = torch.from_numpy(task.train[0][:4].copy())
    augmented = task.augment(images, torch.Generator().manual_seed(0))
    assert augmented.shape == (4, 3, seen, seen)
    model = task.initial_model(0)
    assert model(augmented).shape == model(images).shape == (4, classes)
    check_task(task, name)
    assert task.pretrained is None
    assert task.fingerprint() == task.data_fingerprint


@pytest.mark.parametrize("name", TASKS)
def test_models_without_data(name: str) -> None:
    classes = TASKS[name][0]
    model = load_model(name, "wrn-10-1", num_classes=7)
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    assert model(images).shape == (2, 7)
    if name == "cifar100":
        assert load_model(name, "resnet20", classes)(images).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "default", "parameters"),
    [("cifar100", "wrn-28-10", 36_536_884), ("flowers102", "wrn-16-8", 11_010_486)],
)
def test_default_models(name: str, default: str, parameters: int) -> None:
    with torch.device("meta"):
        for chosen in ("", default):
            model = load_model(name, chosen, TASKS[name][0])
            assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_default_model_of_tiny_imagenet_is_pretrained(root: Path) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = load_model("tiny-imagenet", "", 200)
    assert sum(weight.numel() for weight in model.parameters()) == 85_952_456
    assert loaded(root, "tiny-imagenet", "").pretrained is not None
    assert loaded(root, "tiny-imagenet", "", pretrained=False).pretrained is None


@pytest.mark.parametrize("name", TASKS)
def test_vision_transformer_of_any_task(root: Path, name: str) -> None:
    pytest.importorskip("transformers")
    task = loaded(root, name, "vit-micro-16")
    check_task(task, name)
    assert task.evaluation_batch_size <= 64


@pytest.mark.parametrize(("name", "padding"), [("cifar100", 4), ("tiny-imagenet", 8)])
def test_padding_of_crops(root: Path, name: str, padding: int) -> None:
    task = loaded(root, name)
    images = torch.from_numpy(task.train[0].copy())
    expected = random_crop_and_flip(images, torch.Generator().manual_seed(1), padding)
    assert torch.equal(task.augment(images, torch.Generator().manual_seed(1)), expected)


def test_both_cuts_of_flowers(root: Path) -> None:
    official, paper = (loaded(root, "flowers102", split=split) for split in ("official", "paper"))
    assert (official.num_train, official.num_test) == (TRAIN, TEST)
    assert (paper.num_train, paper.num_test) == (TRAIN + TEST, TEST)
    assert (paper.train[0][:TRAIN] == official.train[0]).all()
    assert (paper.train[0][TRAIN:] == official.test[0]).all()
    assert (paper.test[0] != official.test[0]).any()
    assert official.fingerprint() != paper.fingerprint()
    assert loaded(root, "flowers102").fingerprint() == official.fingerprint()
    with pytest.raises(UsageError, match="split = 'papers' is not known; did you mean paper"):
        loaded(root, "flowers102", split="papers")


@pytest.mark.parametrize("name", TASKS)
def test_options(root: Path, name: str) -> None:
    task = loaded(root, name, max_samples=3, dropout=0.2)
    assert (task.num_train, task.num_test) == (3, 3)
    model = task.fresh_model(0)
    assert [p.p for p in model.modules() if isinstance(p, torch.nn.Dropout)] == [0.2] * 3
    key = "max_tokens" if name == "flowers102" else "split"
    with pytest.raises(UsageError, match=f"task = '{name}' does not take it"):
        loaded(root, name, **{key: 3 if key == "max_tokens" else "paper"})


@pytest.mark.parametrize("name", TASKS)
def test_unknown_model_is_refused_before_the_data_is_read(name: str) -> None:
    for model in ("wrn-9-1", "resnet21"):
        with pytest.raises(UsageError, match=f"model = '{model}'"):
            load_task(name, "/no/such/folder", model)
        with pytest.raises(UsageError, match=f"model = '{model}'"):
            prepare_task(name, "/no/such/folder", model)
    with pytest.raises(UsageError, match=r"dropout = 0\.5"):
        load_task(name, "/no/such/folder", "vit-micro-16", dropout=0.5)


@pytest.mark.parametrize("name", TASKS)
def test_prepare(root: Path, name: str) -> None:
    told = prepare_task(name, str(root / name), "vit-micro-16")
    images = f"{TRAIN} training and {TEST} test images"
    expected = f"{name}: {images} of {TASKS[name][0]} classes, ready in "
    assert told.startswith(expected)


def test_prepare_the_other_cut_of_flowers(root: Path) -> None:
    told = prepare_task("flowers102", str(root / "flowers102"), split="paper", max_samples=10)
    assert told.startswith(f"flowers102: 10 training and {TEST} test images")
