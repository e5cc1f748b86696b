"""Which models the tasks of images offer, and how each is made."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_blsgd.errors import UsageError
from flower_blsgd.models.resnet import resnet8
from flower_blsgd.models.wide_resnet import WideResNet
from flower_blsgd.tasks.image_models import ImageModels

MODELS = ImageModels(
    default="wrn-10-1",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    side=32,
    others={"resnet8": resnet8},
)


def images_of(side: int) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (2, 3, side, side), generator=generator, dtype=torch.uint8)


def dropouts(model: nn.Module) -> list[float]:
    return [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]


@pytest.mark.parametrize("name", ["", "wrn-10-1", "wrn-10-2", "resnet8"])
def test_models_by_name(name: str) -> None:
    model = MODELS.maker(name)(num_classes=7).eval()
    logits = model(images_of(32))
    assert logits.shape == (2, 7)
    # What is larger than the data should be is cut, not squeezed.
    larger = images_of(36)
    assert torch.equal(model(larger), model(larger[:, :, 2:34, 2:34]))


def test_the_default_is_meant_where_nobody_says() -> None:
    torch.manual_seed(0)
    model = MODELS.maker()(num_classes=5)
    assert isinstance(model, WideResNet)
    torch.manual_seed(0)
    again = MODELS.maker("wrn-10-1")(num_classes=5)
    assert torch.equal(model.eval()(images_of(32)), again.eval()(images_of(32)))


def test_mean_and_deviation_are_those_of_the_data() -> None:
    for name in ("wrn-10-1", "resnet8"):
        model: Any = MODELS.maker(name)(num_classes=5)
        pixels = model.pixels if name == "wrn-10-1" else model.normalize
        white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
        assert pixels(white).flatten().tolist() == pytest.approx([1.0] * 3)
        assert pixels(white * 0).flatten().tolist() == pytest.approx([-1.0] * 3)


def test_stem_of_large_images() -> None:
    large = ImageModels("wrn-10-1", (0.5,) * 3, (0.5,) * 3, side=224, stem="7x7")
    model: Any = large.maker()(num_classes=5)
    assert model.stem[0].kernel_size == (7, 7)
    assert MODELS.maker()(num_classes=5).stem.kernel_size == (3, 3)


def test_dropout_of_wide_resnets() -> None:
    assert dropouts(MODELS.maker("wrn-16-1", 0.25)(num_classes=5)) == [0.25] * 6
    assert dropouts(MODELS.maker("wrn-16-1")(num_classes=5)) == []
    assert dropouts(MODELS.maker("wrn-16-1", 0.0)(num_classes=5)) == []


@pytest.mark.parametrize("name", ["resnet8", "vit-micro-16"])
def test_dropout_of_others_is_refused(name: str) -> None:
    MODELS.maker(name, 0.0)
    with pytest.raises(UsageError, match=rf"dropout = 0.3: model = '{name}' is trained without"):
        MODELS.maker(name, 0.3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("resnet9", r"model = 'resnet9' is neither a wrn-DEPTH-WIDTH nor .*; did you mean resnet8"),
        ("wrn-11-1", r"model = 'wrn-11-1': the depth must be 6 n \+ 4"),
        ("vit-b-32", r"did you mean vit-b-16"),
        ("/no/such/folder", r"nor a Hugging Face folder of a ViT; known: "),
    ],
)
def test_unknown_models_are_refused_at_once(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        MODELS.maker(name)
    assert "\n" not in str(refused.value)


def test_folder_of_something_else_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        MODELS.maker(str(tmp_path))


def test_only_vision_transformers_are_published_with_weights(tmp_path: Path) -> None:
    for name in ("", "wrn-28-10", "resnet8", "vit-micro-16"):
        assert MODELS.weights(name, pretrained=True) is None
    for name in ("vit-b-16", str(tmp_path)):
        give = MODELS.weights(name, pretrained=True)
        assert isinstance(give, functools.partial)
        assert give.keywords == {"name": name}
        assert MODELS.weights(name, pretrained=False) is None


def test_evaluation_takes_less_at_once_of_what_is_larger() -> None:
    large = ImageModels("wrn-10-1", (0.5,) * 3, (0.5,) * 3, side=224, stem="7x7")
    tiny = ImageModels("wrn-10-1", (0.5,) * 3, (0.5,) * 3, side=64)
    sizes = [
        MODELS.evaluation_batch_size("resnet8"),
        MODELS.evaluation_batch_size(""),
        tiny.evaluation_batch_size("wrn-28-10"),
    ]
    assert sizes == sorted(set(sizes), reverse=True)
    assert large.evaluation_batch_size("") == MODELS.evaluation_batch_size("vit-b-16") == sizes[-1]


def test_vision_transformer_sees_the_middle_of_large_images() -> None:
    pytest.importorskip("transformers")
    large = ImageModels("vit-micro-16", (0.5,) * 3, (0.5,) * 3, side=224)
    model = large.maker()(num_classes=5).eval()
    images = images_of(256)
    with torch.no_grad():
        assert torch.equal(model(images), model(images[:, :, 16:240, 16:240]))
