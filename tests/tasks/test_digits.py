"""scikit-learn's real 8x8 images."""

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from flower_blsgd.tasks import load_task


def test_data_are_the_stratified_split_of_scikit_learn() -> None:
    """The same samples in the same order, normalised by the training images."""
    digits = load_digits()
    train, test, *labels = train_test_split(
        digits.data, digits.target, test_size=360, stratify=digits.target, random_state=0
    )
    task = load_task("digits")
    mean, std = task.train[0].new_tensor(train).mean(), task.train[0].new_tensor(train).std()
    for (images, targets), expected, classes in zip(
        (task.train, task.test), (train, test), labels, strict=True
    ):
        assert torch.equal(targets, torch.from_numpy(classes))
        pixels = torch.from_numpy(expected).float().view(-1, 1, 8, 8)
        assert torch.allclose(images, (pixels - mean) / std, atol=1e-6)
    assert (task.num_train, task.num_test) == (1437, 360)


@pytest.mark.parametrize(
    ("model", "norms", "parameters"),
    [("", 0, 151_306), ("cnn", 0, 151_306), ("cnn-batchnorm", 2, 151_306 + 2 * (32 + 64))],
)
def test_models(model: str, norms: int, parameters: int) -> None:
    task = load_task("digits", model=model)
    assert task.model() is not task.model()
    made = task.model()
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in made.modules()) == norms
    assert sum(p.numel() for p in made.parameters()) == parameters
    assert made(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
