"""Vision transformers of transformers, for bytes of any size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ..refusal import refusal

pytest.importorskip("transformers")


from flower_blsgd.models.vision_transformer import (
    VisionTransformer,
    vit_config,
)

from .hf_folders import change_config, save_model, some_images, transformers
from .hf_folders import vit_config as tiny_config

MICRO = "vit-micro-16"


@pytest.fixture
def published() -> Any:
    torch.manual_seed(8)
    return transformers.ViTForImageClassification(tiny_config()).eval()


@pytest.fixture
def folder(tmp_path: Path, published: Any) -> Path:
    return Path(save_model(tmp_path / "own", published))


@pytest.mark.parametrize("side", [64, 224, 300])
def test_forward_is_that_of_transformers(side: int) -> None:
    """Of other sizes the images are cropped, if so wanted, then resized."""
    torch.manual_seed(0)
    model, cropping = (VisionTransformer(MICRO, 7, crop).eval() for crop in (0, 224))
    plain = transformers.ViTForImageClassification(model.network.config).eval()
    for network in (plain, cropping.network):
        network.load_state_dict(model.network.state_dict())
    images = some_images(side)
    over = max(0, side - 224) // 2
    middle = images[:, :, over : side - over, over : side - over]
    resized = functional.interpolate(
        images.float(), (224, 224), mode="bilinear", antialias=side > 224
    )
    with torch.no_grad():
        expected = plain(pixel_values=(resized / 255 - 0.5) / 0.5).logits
        assert torch.allclose(model(images), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(cropping(images), model(middle))
    assert expected.shape == (2, 7)


# folders


def normalised_by(model: VisionTransformer, pixels: float) -> list[float]:
    images = torch.full((1, 3, 32, 32), pixels)
    values: list[float] = model.pixels(images)[0, :, 0, 0].tolist()
    return values


def test_folder_is_the_architecture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    model = VisionTransformer("~/own", 9)
    assert model.network.config.hidden_size == 32
    assert model(some_images(64)).shape == (2, 9)  # resized to the 32 that the folder says
    assert normalised_by(model, 255.0) == pytest.approx([1.0] * 3)


def test_folder_says_how_to_normalise(folder: Path) -> None:
    """In the file that the library itself writes."""
    processor = transformers.ViTImageProcessor(
        image_mean=[0.2, 0.4, 0.6], image_std=[0.5, 0.25, 0.1]
    )
    processor.save_pretrained(folder)
    values = normalised_by(VisionTransformer(str(folder), 5), 255.0)
    assert values == pytest.approx([1.6, 2.4, 4.0])
    (folder / "preprocessor_config.json").write_text('{"do_normalize": false}')
    assert normalised_by(VisionTransformer(str(folder), 5), 51.0) == pytest.approx([0.2] * 3)
    for text in ("{", '{"image_mean": null}', '{"image_mean": [0, 0]}', '{"image_std": [1, 1, 0]}'):
        (folder / "preprocessor_config.json").write_text(text)
        message = refusal(vit_config, str(folder))
        assert message.startswith(f"model = {str(folder)!r}: its preprocessor_config.json cannot")
        assert "must be 3 numbers each" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "has model_type 'bert', but a ViT"),
        ({"num_channels": 1}, "only square ones of 3 channels"),
        ({"image_size": [32, 48]}, "only square ones of 3 channels"),
    ],
)
def test_unfit_folder_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    refused = refusal(vit_config, str(folder))
    assert refused.startswith(f"model = {str(folder)!r}")
    assert message in refused
