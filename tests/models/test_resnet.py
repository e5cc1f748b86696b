"""ResNets for 32x32 images."""

import pytest
import torch
from torch import nn

from flower_blsgd.models.resnet import resnet8, resnet20

PLAIN = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("made", "parameters", "convolutions"),
    [
        (resnet20(), 269_722, 19),
        (resnet20(shortcut="B"), 272_474, 21),
        (resnet20(num_classes=100), 269_722 + 90 * 65, 19),
        (resnet8(), 75_290, 7),
    ],
)
def test_parameters(made: nn.Module, parameters: int, convolutions: int) -> None:
    assert sum(weight.numel() for weight in made.parameters()) == parameters
    assert sum(isinstance(layer, nn.Conv2d) for layer in made.modules()) == convolutions


def test_shortcut_a_takes_every_second_pixel_and_adds_zeros() -> None:
    shortcut = resnet8().layer2[0].shortcut
    inputs = torch.arange(16 * 16.0).reshape(1, 16, 4, 4)
    outputs = shortcut(inputs)
    assert outputs.shape == (1, 32, 2, 2)
    assert torch.equal(outputs[:, 8:24], inputs[:, :, [0, 2]][:, :, :, [0, 2]])
    assert not outputs[:, :8].any()
    assert not outputs[:, 24:].any()


def test_weights_are_drawn_as_he_does() -> None:
    torch.manual_seed(0)
    weight = resnet20().layer3[1].conv1.weight.detach()  # 64 x 64 x 3 x 3
    assert float(weight.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert float(weight.mean()) == pytest.approx(0, abs=1e-3)
    assert not resnet20().linear.bias.any()
