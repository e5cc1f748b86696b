"""Wide ResNets, against the authors' counts and a second way to compute them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_blsgd.errors import UsageError
from flower_blsgd.models.layers import CIFAR100_MEAN, CIFAR100_STD, PixelNormalize
from flower_blsgd.models.wide_resnet import Stem, WideResNet, depth_and_width, is_wide_resnet


def made(
    depth: int, width: int, num_classes: int = 10, dropout: float = 0.0, stem: Stem = "3x3"
) -> WideResNet:
    pixels = PixelNormalize(CIFAR100_MEAN, CIFAR100_STD)
    return WideResNet(depth, width, num_classes, pixels, dropout, stem)


def images_of(side: int, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def parameters_of(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "stem", "parameters"),
    [
        ("wrn-28-10", 100, "3x3", 36_536_884),  # the authors' code prints it; 36.5 M in the paper
        ("wrn-16-8", 10, "3x3", 10_961_370),  # 11.0 M
        ("wrn-16-8", 102, "7x7", 11_010_486),
        ("wrn-10-1", 10, "3x3", 77_850),
    ],
)
def test_parameters(name: str, num_classes: int, stem: Stem, parameters: int) -> None:
    depth, width = depth_and_width(name)
    with torch.device("meta"):
        model = made(depth, width, num_classes, stem=stem)
    assert parameters_of(model) == parameters


def by_hand(model: WideResNet, images: Tensor, stem: Stem) -> Tensor:
    """Return the logits in eval mode, computed from nothing but the state dict."""
    state = model.state_dict()

    def norm_relu(name: str, values: Tensor) -> Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        scale = state[f"{name}.weight"] / torch.sqrt(variance + 1e-5)
        shift = state[f"{name}.bias"] - mean * scale
        return (values * scale[:, None, None] + shift[:, None, None]).clamp(min=0)

    mean, std = torch.tensor(CIFAR100_MEAN), torch.tensor(CIFAR100_STD)
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
    images = images_of(side, count=4)
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
    images = images_of(32, count=8)
    model(images)
    normed, given = seen
    active = functional.relu(normed)
    kept = given != 0
    assert torch.equal(given[kept], 2 * active[kept])
    assert float(kept.sum() / (active > 0).sum()) == pytest.approx(0.5, abs=0.02)
    model.eval()
    assert torch.equal(model(images), model(images))
    assert model.state_dict().keys() == made(10, 1).state_dict().keys()


def test_weights_are_drawn_as_he_does_over_the_outputs() -> None:
    torch.manual_seed(0)
    model = made(10, 4)
    for layer, fan_out in (
        (model.stem, 9 * 16),
        (model.stage2[0].conv1, 9 * 128),
        (model.stage3[0].shortcut, 256),
    ):
        weight = layer.weight.detach()
        assert float(weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    assert not model.linear.bias.any()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrn", "must be wrn-DEPTH-WIDTH"),
        ("wrn-28-0", "must be wrn-DEPTH-WIDTH"),
        ("wrn-12-3", "the depth must be 6 n [+] 4, which 12 is not; such as 10, 16"),
        ("wrn-4-2", "which 4 is not"),
    ],
)
def test_impossible_names_are_refused(name: str, expected: str) -> None:
    assert is_wide_resnet(name)
    with pytest.raises(UsageError, match=expected):
        depth_and_width(name)
