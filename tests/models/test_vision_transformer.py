"""Vision transformers of transformers, for bytes of any size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_blsgd.errors import UsageError

pytest.importorskip("transformers")

from flower_blsgd.models.hugging_face import import_transformers, quiet
from flower_blsgd.models.pixels import Resize
from flower_blsgd.models.vision_transformer import (
    VisionTransformer,
    check_vit_folder,
    pixels_made_otherwise,
    vision_transformer,
)

transformers = import_transformers("the tests", "vision")

MICRO = "vit-micro-16"


def images_of(side: int, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def small_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.ViTConfig(
        **({**sizes, "intermediate_size": 64, "image_size": 32, "num_labels": 5} | changes)
    )


def save(folder: Path, model: Any) -> str:
    with quiet():
        model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(8)
    return save(tmp_path / "own", transformers.ViTForImageClassification(small_config()))


@pytest.mark.parametrize(("num_classes", "parameters"), [(200, 85_952_456), (1000, 86_567_656)])
def test_parameters_of_vit_b_16(num_classes: int, parameters: int) -> None:
    """Of 1000 classes as published; the body has 85,798,656."""
    with torch.device("meta"):
        model = vision_transformer("vit-b-16", num_classes)
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert parameters - 769 * num_classes == 85_798_656


def test_forward_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    model = vision_transformer(MICRO, 7).eval()
    plain = transformers.ViTForImageClassification(model.network.config).eval()
    plain.load_state_dict(model.network.state_dict())
    images = images_of(224)
    with torch.no_grad():
        expected = plain(pixel_values=(images / 255 - 0.5) / 0.5).logits
        assert torch.allclose(model(images), expected, rtol=1e-5, atol=1e-5)
    assert expected.shape == (2, 7)


@pytest.mark.parametrize("side", [64, 300])
def test_other_sizes_are_resized(side: int) -> None:
    torch.manual_seed(0)
    model = vision_transformer(MICRO, 7).eval()
    images = images_of(side)
    with torch.no_grad():
        expected = model(Resize(224)(images.float()))  # resized before it is normalised
        assert torch.allclose(model(images), expected, rtol=1e-4, atol=1e-4)


def test_crop_is_taken_before() -> None:
    model = vision_transformer(MICRO, 7, crop=224).eval()
    images = images_of(256)
    with torch.no_grad():
        assert torch.equal(model(images), model(images[:, :, 16:240, 16:240]))
        other = vision_transformer(MICRO, 7).eval()
        other.load_state_dict(model.state_dict())
        assert not torch.equal(other(images), model(images))


def test_weights_are_a_function_of_the_generator() -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return vision_transformer(MICRO, 3).state_dict()

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "network.classifier.weight"
    assert not torch.equal(first[name], other[name])
    assert all(name.startswith("network.") for name in first)  # buffers are not saved


def test_all_weights_learn() -> None:
    model = vision_transformer(MICRO, 3)
    model(images_of(32))[:, 0].sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_transformers_says_nothing_and_is_left_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    told = transformers.utils.logging
    before = told.get_verbosity(), told.is_progress_bar_enabled()
    vision_transformer(MICRO, 3)
    assert (told.get_verbosity(), told.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


# --- folders


def normalised_by(model: VisionTransformer, pixels: float) -> list[float]:
    images = torch.full((1, 3, 32, 32), pixels)
    values: list[float] = model.pixels(images)[0, :, 0, 0].tolist()
    return values


def test_folder_is_the_architecture(folder: str) -> None:
    model = vision_transformer(folder, 9)
    assert model.network.config.hidden_size == 32
    assert model.network.classifier.out_features == 9
    assert model(images_of(64)).shape == (2, 9)
    assert model.pixels(images_of(64)).shape == (2, 3, 32, 32)  # the size that the folder says
    assert normalised_by(model, 255.0) == pytest.approx([1.0] * 3)


def test_folder_below_the_home_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    check_vit_folder("~/own")
    assert vision_transformer("~/own", 4).network.classifier.out_features == 4


def test_folder_says_how_to_normalise(folder: str) -> None:
    described = {"image_mean": [0.2, 0.4, 0.6], "image_std": [0.5, 0.25, 0.1], "do_resize": True}
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(described))
    model = vision_transformer(folder, 5)
    assert normalised_by(model, 255.0) == pytest.approx([1.6, 2.4, 4.0])
    described["do_normalize"] = False
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(described))
    assert normalised_by(vision_transformer(folder, 5), 51.0) == pytest.approx([0.2] * 3)


def test_folder_of_the_processor_of_transformers(folder: str) -> None:
    """What the library itself writes is understood."""
    processor = transformers.ViTImageProcessor(image_mean=[0.1] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(folder)
    assert normalised_by(vision_transformer(folder, 5), 255.0) == pytest.approx([4.5] * 3)


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ({}, []),
        ({"resample": 2, "do_rescale": True, "rescale_factor": 0.00392156862745098}, []),
        ({"resample": None, "do_rescale": None, "rescale_factor": 0.00392157}, []),
        ({"resample": 3}, ["resample = 3"]),
        ({"resample": 0, "do_rescale": False}, ["resample = 0", "do_rescale = false"]),
        ({"rescale_factor": 1}, ["rescale_factor = 1"]),
        ({"resample": "bicubic"}, ['resample = "bicubic"']),
    ],
)
def test_pixels_made_otherwise(folder: str, described: dict[str, Any], told: list[str]) -> None:
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(described))
    assert pixels_made_otherwise(folder) == told


def test_processor_of_transformers_makes_pixels_as_we_do(folder: str) -> None:
    assert pixels_made_otherwise(folder) == []  # there is no such file
    transformers.ViTImageProcessor().save_pretrained(folder)
    assert pixels_made_otherwise(folder) == []
    transformers.ViTImageProcessor(resample=3).save_pretrained(folder)
    assert pixels_made_otherwise(folder) == ["resample = 3"]


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "config.json must hold a JSON object"),
        ("config.json", '{"model_type": "bert"}', "its config.json is of bert, but a ViT"),
        ("config.json", "{}", "of nothing that it names, but a ViT"),
        ("preprocessor_config.json", '{"image_mean": [0.5]}', "must be three numbers each"),
        ("preprocessor_config.json", '{"image_std": [1, 1, 0]}', "must be three numbers each"),
        ("preprocessor_config.json", '{"image_std": "x"}', "must be three numbers each"),
        ("preprocessor_config.json", '{"image_std": 1}', "must be three numbers each"),
    ],
)
def test_unfit_folder_is_refused(folder: str, file: str, content: str | None, told: str) -> None:
    path = Path(folder) / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(UsageError, match=told) as refused:
        check_vit_folder(folder)
    assert str(refused.value).startswith(f"model = {folder!r}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"num_channels": 1}, {"image_size": [32, 48]}])
def test_folder_of_other_images_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    own = tmp_path / "own"
    small_config(**changes).save_pretrained(own)
    with pytest.raises(UsageError, match="only square ones of 3 channels"):
        vision_transformer(str(own), 5)


def test_missing_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs transformers; pip install 'flower-blsgd\[vision"):
        vision_transformer(MICRO, 5)


def test_model_is_a_plain_module() -> None:
    assert isinstance(vision_transformer(MICRO, 5), nn.Module)
