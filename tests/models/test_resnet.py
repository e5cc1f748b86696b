"""ResNets for 32x32 images."""

import pytest
import torch
from torch import nn

from flower_blsgd.models.pixels import CIFAR10_MEAN, CIFAR10_STD, PixelNormalize
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


@pytest.mark.parametrize("made", [resnet20(), resnet20(7, "B"), resnet8(7)])
def test_bytes_in_logits_out(made: nn.Module) -> None:
    classes = made.linear.out_features
    assert made(PLAIN).shape == (2, classes)
    assert made(PLAIN.float()).dtype == torch.float32
    made(PLAIN)[:, 0].sum().backward()
    assert all(weight.grad is not None for weight in made.parameters())


def test_state_is_that_of_the_plain_network() -> None:
    names = resnet8().state_dict()
    assert not [name for name in names if "normalize" in name]
    assert {name.split(".")[0] for name in names} == {
        *("conv1", "bn1", "layer1", "layer2", "layer3", "linear")
    }
    resnet8().load_state_dict(names)


def test_normalize_by_hand() -> None:
    layer = PixelNormalize((0.2, 0.4), (0.5, 0.25))
    pixels = torch.tensor([[[[0, 51]], [[102, 255]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-0.4, 0.0]], [[0.0, 2.4]]]])
    assert torch.allclose(layer(pixels), expected, atol=1e-6)
    assert torch.allclose(layer(pixels.float()), expected, atol=1e-6)
    assert layer.half()(pixels).dtype == torch.float16


def test_normalize_brings_average_pixels_to_zero() -> None:
    pixels = torch.tensor(CIFAR10_MEAN).view(1, 3, 1, 1) * 255
    layer = PixelNormalize(CIFAR10_MEAN, CIFAR10_STD)
    assert float(layer(pixels).abs().max()) < 1e-6


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


def test_weights_are_a_function_of_the_generator() -> None:
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return resnet8().state_dict()

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])
