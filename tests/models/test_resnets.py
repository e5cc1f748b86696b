"""ResNets, wide ones against a second way to compute them; see test_images for their sizes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_blsgd.errors import UsageError
from flower_blsgd.models.resnets import (
    CIFAR100_CHANNELS,
    PixelNormalize,
    Stem,
    WideResNet,
    depth_and_width,
    resnet8,
    resnet20,
)

from ..data.image_files import some_images


def made(
    depth: int, width: int, num_classes: int = 10, dropout: float = 0.0, stem: Stem = "3x3"
) -> WideResNet:
    pixels = PixelNormalize(*CIFAR100_CHANNELS)
    return WideResNet(depth, width, num_classes, pixels, dropout, stem)


# pixels


def test_normalize_by_hand() -> None:
    layer = PixelNormalize((0.2, 0.4), (0.5, 0.25))
    pixels = torch.tensor([[[[0, 51]], [[102, 255]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-0.4, 0.0]], [[0.0, 2.4]]]])
    assert torch.allclose(layer(pixels), expected, atol=1e-6)
    assert torch.allclose(layer(pixels.float()), expected, atol=1e-6)
    assert layer.half()(pixels).dtype == torch.float16
    assert not layer.state_dict()


# ResNets


def test_shortcut_a_takes_every_second_pixel_and_adds_zeros() -> None:
    shortcut = resnet8().layer2[0].shortcut
    inputs = torch.arange(16 * 16.0).reshape(1, 16, 4, 4)
    outputs = shortcut(inputs)
    assert outputs.shape == (1, 32, 2, 2)
    assert torch.equal(outputs[:, 8:24], inputs[:, :, [0, 2]][:, :, :, [0, 2]])
    assert not outputs[:, :8].any()
    assert not outputs[:, 24:].any()


def test_weights_are_drawn_as_he_does() -> None:
    """Over the inputs of a layer; in wide ResNets, as the authors have it, over its outputs."""
    torch.manual_seed(0)
    narrow, wide = resnet20(), made(10, 4)
    for layer, fan in (
        (narrow.layer3[1].conv1, 9 * 64),
        (wide.stem, 9 * 16),
        (wide.stage2[0].conv1, 9 * 128),
        (wide.stage3[0].shortcut, 256),
    ):
        assert float(layer.weight.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.05)
    assert not narrow.linear.bias.any()
    assert not wide.linear.bias.any()


# wide ResNets


def by_hand(model: WideResNet, images: Tensor, stem: Stem) -> Tensor:
    """Return the logits in eval mode, computed from nothing but the state dict."""
    state = model.state_dict()

    def norm_relu(name: str, values: Tensor) -> Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        scale = state[f"{name}.weight"] / torch.sqrt(variance + 1e-5)
        shift = state[f"{name}.bias"] - mean * scale
        return (values * scale[:, None, None] + shift[:, None, None]).clamp(min=0)

    mean, std = map(torch.tensor, CIFAR100_CHANNELS)
    values = (images / 255 - mean[:, None, None]) / std[:, None, None]
    if stem == "7x7":
        values = functional.conv2d(values, state["stem.0.weight"], stride=2, padding=3)
        values = functional.max_pool2d(values, 3, 2, 1)
    else:
        values = functional.conv2d(values, state["stem.weight"], padding=1)
    for stage in (1, 2, 3):
        block = 0
        while f"stage{stage}.{block}.conv1.weight" in state:
            here = f"stage{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            active = norm_relu(f"{here}.bn1", values)
            out = functional.conv2d(active, state[f"{here}.conv1.weight"], stride=stride, padding=1)
            out = norm_relu(f"{here}.bn2", out)
            out = functional.conv2d(out, state[f"{here}.conv2.weight"], padding=1)
            if f"{here}.shortcut.weight" in state:
                weight = state[f"{here}.shortcut.weight"]
                values = functional.conv2d(active, weight, stride=stride)
            values = out + values
            block += 1
    pooled = norm_relu("bn", values).flatten(2).sum(dim=2) / values[0, 0].numel()
    return pooled @ state["linear.weight"].T + state["linear.bias"]


@pytest.mark.parametrize(
    ("depth", "width", "stem", "side"),
    [(16, 2, "3x3", 32), (10, 2, "7x7", 224)],
)
def test_forward_is_that_of_the_paper(depth: int, width: int, stem: Stem, side: int) -> None:
    torch.manual_seed(1)
    model = made(depth, width, 7, dropout=0.3, stem=stem)
    images = some_images(side, count=4)
    model(images)  # moves the running statistics away from 0 and 1
    for name, values in model.named_parameters():
        if ".bn" in name or name.startswith("bn"):
            nn.init.uniform_(values.data, 0.5, 1.5)
    with torch.no_grad():
        logits = model.eval()(images)
        assert torch.allclose(logits, by_hand(model, images, stem), rtol=1e-5, atol=1e-5)
    assert logits.shape == (4, 7)


def test_dropout_is_between_the_convolutions_and_only_in_training() -> None:
    torch.manual_seed(0)
    model = made(10, 1, dropout=0.5)
    seen: list[Tensor] = []
    model.stage1[0].conv2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.stage1[0].bn2.register_forward_hook(lambda _, __, output: seen.append(output))
    images = some_images(32, count=8)
    model(images)
    normed, given = seen
    active = functional.relu(normed)
    kept = given != 0
    assert torch.equal(given[kept], 2 * active[kept])
    assert float(kept.sum() / (active > 0).sum()) == pytest.approx(0.5, abs=0.02)
    model.eval()
    assert torch.equal(model(images), model(images))
    assert model.state_dict().keys() == made(10, 1).state_dict().keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrn-28-0", "must be wrn-DEPTH-WIDTH"),
        ("wrn-12-3", "the depth must be 6 n [+] 4, which 12 is not; such as 10, 16"),
    ],
)
def test_impossible_names_are_refused(name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        depth_and_width(name)
