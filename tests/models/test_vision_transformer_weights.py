"""Published weights, and those of a folder, in a fresh vision transformer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flower_blsgd.errors import UsageError

pytest.importorskip("transformers")

from flower_blsgd.models import vision_transformer_weights
from flower_blsgd.models.vision_transformer import vision_transformer
from flower_blsgd.models.vision_transformer_weights import load_weights, pretrained_weights

from ..log_capture import captured_log
from .test_vision_transformer import MICRO, images_of, save, small_config, transformers

HEAD = ("network.classifier.weight", "network.classifier.bias")


@pytest.fixture
def published() -> Any:
    torch.manual_seed(8)
    return transformers.ViTForImageClassification(small_config()).eval()


@pytest.fixture
def folder(tmp_path: Path, published: Any) -> str:
    return save(tmp_path / "own", published)


def change_config(folder: str, **changes: Any) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def body_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values for name, values in state.items() if name not in HEAD}


def equal(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[n], other[n]) for n in state)


def test_weights_of_a_folder(
    folder: str, published: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = vision_transformer(folder, 5).eval()
    give = pretrained_weights(folder)
    assert give is not None
    before = torch.get_rng_state()
    with captured_log() as log:
        give(model)
    assert torch.equal(torch.get_rng_state(), before)
    images = images_of(32)
    with torch.no_grad():
        expected = published(pixel_values=(images / 255 - 0.5) / 0.5).logits
        assert torch.allclose(model(images), expected, rtol=1e-5, atol=1e-5)
    assert not log.lines()
    assert capfd.readouterr() == ("", "")


def test_head_for_other_classes_stays_fresh(folder: str) -> None:
    model = vision_transformer(folder, 7)
    fresh = {name: values.clone() for name, values in model.state_dict().items()}
    with captured_log() as log:
        load_weights(model, folder)
    with_head = vision_transformer(folder, 5)
    load_weights(with_head, folder)
    assert equal(body_of(model.state_dict()), body_of(with_head.state_dict()))
    assert all(torch.equal(model.state_dict()[name], fresh[name]) for name in HEAD)
    assert log.warnings == [
        f"model = {folder!r} has a head for 5 classes; it begins with a fresh one for 7"
    ]


def test_body_without_a_head(tmp_path: Path, published: Any) -> None:
    folder = save(tmp_path / "body", published.vit)
    model = vision_transformer(folder, 5)
    fresh = model.network.classifier.weight.clone()
    with captured_log() as log:
        load_weights(model, folder)
    ours = model.network.vit.state_dict()
    assert equal(ours, published.vit.state_dict())
    assert torch.equal(model.network.classifier.weight, fresh)
    assert log.warnings == [f"model = {folder!r} has no head; it begins with a fresh one for 5"]


def test_head_of_another_size_than_the_config_says_stays_fresh(folder: str) -> None:
    names = {str(label): f"class {label}" for label in range(9)}
    change_config(folder, id2label=names, label2id={name: int(key) for key, name in names.items()})
    for num_classes in (9, 5):
        model = vision_transformer(folder, num_classes)
        fresh = {name: values.clone() for name, values in model.state_dict().items()}
        with captured_log() as log:
            load_weights(model, folder)
        assert all(torch.equal(model.state_dict()[name], fresh[name]) for name in HEAD)
        assert not equal(body_of(model.state_dict()), body_of(fresh))
        assert log.warnings == [
            f"model = {folder!r} has a head for 5 classes; it begins with a fresh one for "
            f"{num_classes}"
        ]


def test_body_alone_with_its_pooler(tmp_path: Path) -> None:
    body = transformers.ViTModel(small_config())
    folder = save(tmp_path / "body", body)
    assert any("pooler" in name for name in load_file(Path(folder) / "model.safetensors"))
    model = vision_transformer(folder, 5)
    load_weights(model, folder)
    ours = model.network.vit.state_dict()
    assert all(torch.equal(ours[name], body.state_dict()[name]) for name in ours)


def test_body_of_masked_images(tmp_path: Path) -> None:
    """Its decoder and its mask token have no place, and no part in what a ViT computes."""
    masked = transformers.ViTForMaskedImageModeling(small_config())
    folder = save(tmp_path / "masked", masked)
    model = vision_transformer(folder, 5)
    load_weights(model, folder)
    ours = model.network.vit.state_dict()
    assert all(torch.equal(ours[name], masked.vit.state_dict()[name]) for name in ours)


def test_half_precision_weights_become_float32(tmp_path: Path, published: Any) -> None:
    folder = save(tmp_path / "half", published.half())
    model = vision_transformer(folder, 5)
    load_weights(model, folder)
    assert {values.dtype for values in model.state_dict().values()} == {torch.float32}
    weight = model.network.classifier.weight
    assert torch.equal(weight, published.classifier.weight.float())


def test_vit_b_16_comes_from_the_hub(
    folder: str, monkeypatch: pytest.MonkeyPatch, published: Any
) -> None:
    asked = []

    def found(model: str, hub_name: str) -> Path:
        asked.append((model, hub_name))
        return Path(folder)

    monkeypatch.setattr(vision_transformer_weights, "hub_folder", found)
    give = pretrained_weights("vit-b-16")
    assert give is not None
    model = vision_transformer(folder, 5)  # in place of the large one
    give(model)
    assert asked == [("vit-b-16", "google/vit-base-patch16-224")]
    assert equal(model.network.state_dict(), published.state_dict())


def test_narrow_one_is_never_pretrained() -> None:
    assert pretrained_weights(MICRO) is None


def test_weights_of_another_model_are_refused(folder: str) -> None:
    model = vision_transformer(MICRO, 5)
    with pytest.raises(UsageError, match="its weights are of another model: ") as refused:
        load_weights(model, folder)
    assert "\n" not in str(refused.value)


def test_cut_off_file_is_refused(folder: str) -> None:
    file = Path(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"cannot be read: .*pretrained = false") as refused:
        load_weights(vision_transformer(folder, 5), folder)
    assert "\n" not in str(refused.value)


def test_missing_tensor_is_refused(folder: str) -> None:
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if "layernorm_before" in name)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"not whole: of 1 missing tensors one is .*layernorm_bef"):
        load_weights(vision_transformer(folder, 5), folder)


def test_pickles_are_refused(folder: str) -> None:
    file = Path(folder) / "model.safetensors"
    file.rename(Path(folder) / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model.bin is a pickle"):
        load_weights(vision_transformer(folder, 5), folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"image_size": 48},
            r"vit\.embeddings\.position_embeddings has shape \(1, 5, 32\), but \(1, 10, 32\) is",
        ),
        (
            {"hidden_size": 64},
            r"vit\.embeddings\.cls_token has shape \(1, 1, 32\), but \(1, 1, 64\) is needed",
        ),
    ],
)
def test_config_of_other_sizes_is_refused(folder: str, changes: dict[str, int], told: str) -> None:
    change_config(folder, **changes)
    model = vision_transformer(folder, 5)
    with pytest.raises(UsageError, match=rf"do not go with its config\.json: {told}") as refused:
        load_weights(model, folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("alone", [True, False])
def test_weights_without_a_place_are_refused(tmp_path: Path, alone: bool) -> None:
    """Two layers in the file, one in config.json; a body that was saved alone has other names."""
    kind = transformers.ViTModel if alone else transformers.ViTForImageClassification
    two = kind(small_config(num_hidden_layers=2))
    folder = save(tmp_path / "two", two)
    change_config(folder, num_hidden_layers=1)
    surplus = sum("layers.1." in name for name in two.state_dict())
    told = rf"larger model than its config\.json: of {surplus} tensors without a place one is "
    with pytest.raises(UsageError, match=rf"{told}(vit\.)?layers\.1\.") as refused:
        load_weights(vision_transformer(folder, 5), folder)
    assert "\n" not in str(refused.value)


def test_pixels_that_a_folder_wants_otherwise_are_told_once(folder: str) -> None:
    described = {"resample": 3, "do_rescale": False, "rescale_factor": 1 / 255, "do_resize": True}
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(described))
    with captured_log() as log:
        load_weights(vision_transformer(folder, 5), folder)
    assert log.warnings == [
        f"model = {folder!r}: its preprocessor_config.json says resample = 3, do_rescale = false; "
        "here bytes become values in [0, 1] and are resized bilinearly"
    ]
