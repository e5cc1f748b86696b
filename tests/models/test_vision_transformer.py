"""Vision transformers of transformers, for bytes of any size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flower_blsgd.errors import UsageError

from ..log_capture import captured_log

pytest.importorskip("transformers")

from flower_blsgd.models.layers import Resize
from flower_blsgd.models.vision_transformer import (
    VisionTransformer,
    check_vit_folder,
    has_published_weights,
    load_published_weights,
    vision_transformer,
)

from .hf_folders import save_model, some_images, transformers, vit_config

MICRO = "vit-micro-16"
PROCESSOR = "preprocessor_config.json"


@pytest.fixture
def published() -> Any:
    torch.manual_seed(8)
    return transformers.ViTForImageClassification(vit_config()).eval()


@pytest.fixture
def folder(tmp_path: Path, published: Any) -> str:
    return save_model(tmp_path / "own", published)


def test_forward_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    model = vision_transformer(MICRO, 7).eval()
    plain = transformers.ViTForImageClassification(model.network.config).eval()
    plain.load_state_dict(model.network.state_dict())
    images = some_images(224)
    with torch.no_grad():
        expected = plain(pixel_values=(images / 255 - 0.5) / 0.5).logits
        assert torch.allclose(model(images), expected, rtol=1e-5, atol=1e-5)
    assert expected.shape == (2, 7)


@pytest.mark.parametrize("side", [64, 300])
def test_other_sizes_are_cropped_then_resized(side: int) -> None:
    torch.manual_seed(0)
    model, cropping = (vision_transformer(MICRO, 7, crop).eval() for crop in (0, 224))
    cropping.load_state_dict(model.state_dict())
    images = some_images(side)
    over = max(0, side - 224) // 2
    middle = images[:, :, over : side - over, over : side - over]
    with torch.no_grad():
        expected = model(Resize(224)(images.float()))  # resized before it is normalised
        assert torch.allclose(model(images), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(cropping(images), model(middle))
        assert torch.equal(cropping(images), model(images)) == (side < 224)


# folders


def normalised_by(model: VisionTransformer, pixels: float) -> list[float]:
    images = torch.full((1, 3, 32, 32), pixels)
    values: list[float] = model.pixels(images)[0, :, 0, 0].tolist()
    return values


def test_folder_is_the_architecture(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    check_vit_folder("~/own")
    model = vision_transformer("~/own", 9)
    assert model.network.config.hidden_size == 32
    assert model.network.classifier.out_features == 9
    assert model(some_images(64)).shape == (2, 9)
    assert model.pixels(some_images(64)).shape == (2, 3, 32, 32)  # the size that the folder says
    assert normalised_by(model, 255.0) == pytest.approx([1.0] * 3)


def test_folder_says_how_to_normalise(folder: str) -> None:
    """In the file that the library itself writes."""
    processor = transformers.ViTImageProcessor(
        image_mean=[0.2, 0.4, 0.6], image_std=[0.5, 0.25, 0.1]
    )
    processor.save_pretrained(folder)
    values = normalised_by(vision_transformer(folder, 5), 255.0)
    assert values == pytest.approx([1.6, 2.4, 4.0])
    (Path(folder) / PROCESSOR).write_text('{"do_normalize": false}')
    assert normalised_by(vision_transformer(folder, 5), 51.0) == pytest.approx([0.2] * 3)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", '{"model_type": "bert"}', "has model_type 'bert', but a ViT"),
        (PROCESSOR, '{"image_mean": [0.5]}', "must be three numbers each"),
        (PROCESSOR, '{"image_std": [1, 1, 0]}', "must be three numbers each"),
    ],
)
def test_unfit_folder_is_refused(folder: str, file: str, content: str | None, message: str) -> None:
    path = Path(folder) / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(UsageError, match=message) as refused:
        check_vit_folder(folder)
    assert str(refused.value).startswith(f"model = {folder!r}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"num_channels": 1}, {"image_size": [32, 48]}])
def test_folder_of_other_images_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    own = tmp_path / "own"
    vit_config(**changes).save_pretrained(own)
    with pytest.raises(UsageError, match="only square ones of 3 channels"):
        vision_transformer(str(own), 5)


def test_missing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs transformers; pip install 'flower-blsgd\[vision"):
        vision_transformer(MICRO, 5)


# published weights


def test_weights_of_a_folder(folder: str, published: Any) -> None:
    """See test_pretrained for what may be missing."""
    assert has_published_weights(folder)
    model = vision_transformer(folder, 5).eval()
    with captured_log() as log:
        load_published_weights(model, folder)
    images = some_images(32)
    with torch.no_grad():
        expected = published(pixel_values=(images / 255 - 0.5) / 0.5).logits
        assert torch.allclose(model(images), expected, rtol=1e-5, atol=1e-5)
    assert not log.lines()
    with pytest.raises(UsageError, match=r"model = '.*': its weights lack"):
        load_published_weights(vision_transformer(MICRO, 5), folder)
