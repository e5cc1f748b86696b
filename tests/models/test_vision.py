"""Models of torchvision: sizes, last layers, and weights from files."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

from flower_blsgd.data.libraries import import_torchvision
from flower_blsgd.models.resnets import resnet8
from flower_blsgd.models.vision import (
    VisionModel,
    last_tensor,
    load_image_weights,
    read_weights,
    vision_model_names,
)

from ..data.image_files import some_images
from ..log_capture import captured_log
from ..refusal import refusal

TINY = "shufflenet_v2_x0_5"


def test_the_last_tensor_has_a_row_per_class() -> None:
    names = vision_model_names()
    assert {
        "vit-micro-16",
        "resnet18",
        "vit_b_16",
        "convnext_tiny",
        "maxvit_t",
        "googlenet",
    } <= set(names)
    # One of each family: its sizes have the same modules. RegNets read values while they are made.
    families = {re.findall(r"^[a-z-]+(?:_v\d)?", name)[0]: name for name in names}
    for name in families.values():
        if not name.startswith("regnet"):
            with torch.device("meta"):
                model = VisionModel(name, 7)
            assert len(model.get_parameter(last_tensor(model))) == 7, name
    model = VisionModel("regnet_x_400mf", 7)
    assert len(model.get_parameter(last_tensor(model))) == 7


@pytest.mark.parametrize(("name", "side", "seen"), [("densenet121", 20, 29), (TINY, 20, 20)])
def test_small_images_are_enlarged_if_necessary(name: str, side: int, seen: int) -> None:
    torch.manual_seed(0)
    model = VisionModel(name, 3).eval()
    images = some_images(side)
    sized = functional.interpolate(images.float(), (seen, seen), mode="bilinear")
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    expected = model.network((sized / 255 - mean) / std)
    assert torch.allclose(model(images), expected, atol=1e-4)
    assert model(some_images(70)).shape == (2, 3)


def test_vision_transformers_have_one_size() -> None:
    with torch.device("meta"):
        model = VisionModel("vit_b_16", 5)
        for side in (32, 224, 300):
            assert model(some_images(side).to("meta")).shape == (2, 5)


# weights


@pytest.mark.parametrize("kind", ["safetensors", "pth", "run"])
def test_weights_of_a_file(tmp_path: Path, kind: str) -> None:
    """As torchvision saves them, or as a run does, whose model is a part of ours."""
    torch.manual_seed(1)
    saved = VisionModel(TINY, 5)
    state = saved.state_dict() if kind == "run" else saved.network.state_dict()
    file = tmp_path / f"own.{'pth' if kind == 'pth' else 'safetensors'}"
    torch.save(state, file) if kind == "pth" else save_file(state, file)
    for classes, warned in ((5, 0), (7, 1)):
        model = VisionModel(TINY, classes)
        with captured_log() as log:
            load_image_weights(model, f"{TINY}:{file}")
        assert len(log.warnings) == warned
        for name, tensor in model.state_dict().items():
            if classes == 5 or ".fc." not in name:
                assert torch.equal(tensor, saved.state_dict()[name]), name
    name = f"{TINY}:{file}"
    assert log.warnings == [f"model = {name!r}: new random weights for fc.weight, fc.bias"]


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "own.pth"
    torch.save(VisionModel(TINY, 5).network.state_dict(), file)
    message = refusal(load_image_weights, resnet8(), f"resnet8:{file}")
    assert message.startswith(f"model = 'resnet8:{file}': its weights lack ")
    assert message.endswith("name weights of this model, or set pretrained = false")


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"weight": Harm()}, tmp_path / "own.pth")
    for file in ("own.pth", "none.pth", "none.safetensors"):
        message = refusal(read_weights, f"resnet18:{tmp_path / file}")
        assert "its weights cannot be loaded (" in message
        assert message.endswith("); save them with torch.save(model.state_dict(), FILE)")
    assert not (tmp_path / "ran").exists()


def test_downloaded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch's cache, without a pickle; old names of DenseNet are changed."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    url = import_torchvision().models.get_model_weights("densenet121").DEFAULT.url
    (tmp_path / "checkpoints").mkdir()
    old = {
        name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): tensor
        for name, tensor in VisionModel("densenet121", 1000).network.state_dict().items()
        if "num_batches_tracked" not in name
    }
    asked: list[dict[str, Any]] = []

    def load(found: str, **settings: Any) -> Any:
        assert found == url
        asked.append(settings)
        return old

    (tmp_path / "checkpoints" / url.rpartition("/")[2]).touch()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", load)
    model = VisionModel("densenet121", 3)
    with captured_log() as log:
        load_image_weights(model, "densenet121")
    assert log.warnings == [
        "model = 'densenet121': new random weights for classifier.weight, classifier.bias"
    ]
    (settings,) = asked
    assert (settings["weights_only"], settings["check_hash"]) == (True, True)
