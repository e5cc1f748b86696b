"""scikit-learn's real 8x8 images."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.digits import digits, small_cnn


def test_digits_has_all_images_once() -> None:
    task = digits()
    assert (task.num_train, task.num_test) == (1437, 360)
    bunch = load_digits()
    mean, std = _scale(task)
    images = torch.cat([task.train[0], task.test[0]]) * std + mean
    found = sorted(tuple(image) for image in images.flatten(1).round().int().tolist())
    assert found == sorted(tuple(image) for image in bunch.data.astype(int).tolist())


def _scale(task: object) -> tuple[float, float]:
    """Return mean and spread that turn the task's images back into grey levels 0 to 16."""
    images = task.train[0]  # type: ignore[attr-defined]
    lowest, highest = float(images.min()), float(images.max())
    std = 16 / (highest - lowest)
    return -lowest * std, std


def test_digits_shapes_and_types() -> None:
    task = digits()
    for images, labels in (task.train, task.test):
        assert images.shape == (len(labels), 1, 8, 8)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert (int(labels.min()), int(labels.max())) == (0, 9)


def test_digits_is_normalised_by_the_training_images() -> None:
    images, _ = digits().train
    assert float(images.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1.0, abs=1e-5)


def test_digits_classes_are_equally_frequent_in_both_parts() -> None:
    task = digits()
    train = torch.bincount(task.train[1]) / 1437
    test = torch.bincount(task.test[1]) / 360
    assert float((train - test).abs().max()) < 0.003


def test_digits_is_the_same_every_time() -> None:
    first, second = digits(), digits()
    assert torch.equal(first.train[0], second.train[0])
    assert torch.equal(first.test[1], second.test[1])
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize(
    ("model", "norms", "parameters"),
    [("", 0, 151_306), ("cnn", 0, 151_306), ("cnn-batchnorm", 2, 151_306 + 2 * (32 + 64))],
)
def test_digits_models(model: str, norms: int, parameters: int) -> None:
    made = digits(model=model).model()
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in made.modules()) == norms
    assert sum(p.numel() for p in made.parameters()) == parameters
    assert made(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_digits_model_is_fresh_each_time() -> None:
    task = digits()
    assert task.model() is not task.model()
    assert not any(isinstance(layer, nn.Dropout) for layer in small_cnn().modules())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"data": "/some/where"}, "data = '/some/where'"),
        ({"model": "cnm"}, "did you mean cnn"),
        ({"model": "resnet"}, "known: cnn, cnn-batchnorm"),
    ],
)
def test_digits_refuses_what_it_does_not_know(arguments: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        digits(**arguments)
