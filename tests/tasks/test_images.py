"""The tasks of images: their models, and what a few images in their layouts become."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("datasets")

from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.by_name import load_saved_model, prepare_task
from flower_blsgd.tasks.check import check_task
from flower_blsgd.tasks.images import BENCHMARKS
from flower_blsgd.worker.local_sgd import cross_entropy

from ..data.image_files import make_folders, make_parquet, png, some_images
from ..refusal import refusal
from ..stand_ins import write_stand_in

# Classes, side.
TASKS = {
    "cifar10": (10, 32),
    "cifar100": (100, 32),
    "tiny-imagenet": (200, 64),
    "flowers102": (102, 224),
}
TRAIN, TEST = 12, 5  # and as many for validation as for testing


def parameters_of(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def dropouts(model: nn.Module) -> list[float]:
    return [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]


# models


@pytest.mark.parametrize(
    ("task", "name", "parameters"),
    [
        ("cifar10", "", 269_722),
        ("cifar10", "resnet8", 75_290),
        ("cifar10", "wrn-16-8", 10_961_370),  # 11.0 M in the paper
        ("cifar10", "wrn-10-1", 77_850),
        ("cifar100", "", 36_536_884),  # the authors' code prints it; 36.5 M in the paper
        ("cifar100", "resnet20", 269_722 + 90 * 65),
        ("flowers102", "", 11_010_486),
        ("tiny-imagenet", "wrn-28-10", 36_536_884 + 100 * 641),
        ("tiny-imagenet", "", 85_952_456),
        ("images", "", 11_176_512 + 10 * 513),
    ],
)
def test_models_by_name(task: str, name: str, parameters: int) -> None:
    classes, side = TASKS.get(task, (10, 224))
    with torch.device("meta"):
        make = BENCHMARKS[task].maker(name or BENCHMARKS[task].default_model)
        model = make(classes, side > 64)
        assert parameters_of(model) == parameters
        again = load_saved_model(task, name, model.state_dict())
        assert parameters_of(again) == parameters


def test_dropout() -> None:
    maker = BENCHMARKS["cifar100"].maker
    assert dropouts(maker("wrn-16-1", 0.25)(5, False)) == [0.25] * 6
    assert dropouts(maker("wrn-16-1")(5, True)) == dropouts(maker("wrn-16-1", 0.0)(5, True)) == []
    for name in ("resnet8", "resnet18"):
        maker(name, 0.0)
        message = refusal(load_task, "cifar100", "/no/such/folder", name, dropout=0.3)
        assert f"dropout = 0.3: model = '{name}' has no dropout" in message


def test_unknown_models_are_refused_before_data_are_read(tmp_path: Path) -> None:
    for name, message in (
        ("resnet9", "is not known; did you mean resnet8"),
        ("convnext_tine", "is not known; did you mean convnext_tiny"),
        ("/no/such/folder", "is not known; known: resnet20, resnet8, wrn-16-8, wrn-28-10, another"),
        (str(tmp_path), "or a classification model of torchvision, such as resnet18 or vit_b_16"),
    ):
        refused = refusal(load_task, "cifar10", "/no/such/data", name)
        assert refused.startswith(f"model = {name!r}")
        assert message in refused


# data


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
    classes, side = TASKS[name]
    task = loaded(root, name)
    assert (task.num_train, task.num_test) == (TRAIN, TEST)
    assert task.train[0].shape == (TRAIN, 3, side, side)
    assert str(task.train[0].dtype) == "uint8"
    mean = torch.tensor(BENCHMARKS[name].channels[0]).view(1, 3, 1, 1)
    narrow: Any = task.model()
    assert float(narrow.pixels(mean * 255).abs().max()) < 1e-5
    assert task.loss is cross_entropy
    images = torch.from_numpy(task.train[0][:4].copy())
    augmented = task.augment(images, torch.Generator().manual_seed(0))
    assert augmented.shape == (4, 3, side, side)
    assert torch.equal(augmented, task.augment(images, torch.Generator().manual_seed(0)))
    assert not torch.equal(augmented, task.augment(images, torch.Generator().manual_seed(1)))
    model = task.initial_model(0).eval()
    assert model(augmented).shape == model(images).shape == (4, classes)
    again = load_saved_model(name, "wrn-10-1", model.state_dict())
    again.load_state_dict(model.state_dict())  # also its first layer is that of the size
    check_task(task, name)
    assert task.pretrained is None
    assert task.fingerprint() == task.data_fingerprint
    half = loaded(root, name, validation_share=0.5, seed=1)
    assert (half.num_train, half.num_test) == (TRAIN // 2, TRAIN // 2)
    assert half.fingerprint() != task.fingerprint()


def test_own_images_have_their_own_number_of_classes(tmp_path: Path) -> None:
    own = make_parquet(tmp_path / "parquet", [png(1), png(2), b"bad"], [png(3)])
    assert "skip-bad = true" in refusal(load_task, "cifar10", str(own), "resnet8")
    task = load_task("cifar10", str(own), "resnet8", skip_bad=True)
    line = prepare_task("cifar10", str(own), skip_bad=True)
    assert "2 training and 1 test images of 3 classes, 1 unreadable ones skipped, " in line
    assert task.num_train == 2
    model = task.initial_model(0)
    assert model(some_images(32)).shape == (2, 3)
    again = load_saved_model("cifar10", "resnet8", model.state_dict())
    again.load_state_dict(model.state_dict())


def test_image_size_is_that_of_small_images_or_as_set(tmp_path: Path) -> None:
    def side(data: Path, name: str = "images", **options: Any) -> int:
        task = load_task(name, str(data), "resnet8", **options)
        assert task.test[0].shape[1:] == task.train[0].shape[1:]
        return int(task.train[0].shape[-1])

    small = make_folders(tmp_path / "small")
    large = make_parquet(tmp_path / "large", [png(k, 65) for k in range(4)], [png(5, 65)])
    assert (side(small), side(large), side(large, "cifar10")) == (32, 224, 32)
    assert side(small, image_size=40) == side(small, "cifar10", image_size=40) == 40


def test_one_folder_of_classes_is_divided_by_validation_share(tmp_path: Path) -> None:
    folder = make_folders(tmp_path / "two") / "train"
    message = refusal(load_task, "images", str(folder), "resnet8")
    assert "no test split, found train; expected" in message
    assert message.endswith("without a test split, set validation-share")
    assert not list((tmp_path / "two").rglob("*.npy"))
    task = load_task("images", str(folder), "resnet8", validation_share=0.5)
    assert (task.num_train, task.num_test) == (3, 3)
    again = load_task("images", str(folder), "resnet8", validation_share=0.5, prefer_test=True)
    assert again.fingerprint() == task.fingerprint()
    assert "no test split" in refusal(load_task, "images", str(folder), "resnet8")
    assert "6 training and 0 test images of 3 classes" in prepare_task("images", str(folder))
    whole = str(make_folders(tmp_path / "two"))
    assert (
        load_task("images", whole, "resnet8", validation_share=0.5, prefer_test=True).num_test == 3
    )


def test_images_need_data() -> None:
    message = refusal(load_task, "images", "", "resnet8")
    assert message.startswith("data is empty, but task = 'images' needs data; name a folder with ")
    assert message.endswith("or a data set OWNER/NAME of the HF hub")
