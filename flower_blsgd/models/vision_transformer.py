"""Vision transformers of Dosovitskiy et al. 2021, as transformers has them.

``vit-b-16`` is ViTForImageClassification, on the HF hub google/vit-base-patch16-224: trained on
ImageNet-21k, then on ImageNet-1k. It takes images of any size: they are brought to the size that
the network works with on their device, bilinearly and without regard to their shape, as
ViTImageProcessor does, only that values between are not rounded to bytes.

A folder in Hugging Face's layout is a model too: its ``config.json`` is the architecture, its
``preprocessor_config.json`` the normalisation, its safetensors the weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError
from .layers import CentreCrop, PixelNormalize, Resize
from .pretrained import (
    hf_hub_folder,
    import_transformers,
    load_weights,
    own_folder,
    quiet,
    read_json,
)

VIT_B_16 = "vit-b-16"
VIT_B_16_HF_HUB_NAME = "google/vit-base-patch16-224"

CONFIGS: Mapping[str, Mapping[str, int]] = {
    VIT_B_16: {},  # what transformers' own defaults describe
    "vit-micro-16": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    },
}
"""How each differs from ViT-B/16."""

_HALVES = (0.5, 0.5, 0.5)

_PROCESSOR = "preprocessor_config.json"


class VisionTransformer(nn.Module):
    """A ViTForImageClassification for images of any size, bytes in NCHW.

    Parameters
    ----------
    network : transformers.ViTForImageClassification
        Takes normalised images of its own size.
    side : int
        That size, in pixels.
    mean, std : sequence of float
        Of each channel, for values in [0, 1].
    crop : int (default: 0)
        Above 0: of larger images only a square of so many pixels in the middle is seen.
    """

    def __init__(
        self,
        network: nn.Module,
        side: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop: int = 0,
    ) -> None:
        super().__init__()
        # Normalised before it is resized: the same up to rounding, and less work.
        first: list[nn.Module] = [PixelNormalize(mean, std), Resize(side)]
        self.pixels = nn.Sequential(*([CentreCrop(crop)] if crop else []), *first)
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.network(pixel_values=self.pixels(images), return_dict=True).logits
        return logits


def vision_transformer(name: str, num_classes: int, crop: int = 0) -> VisionTransformer:
    """Return a model with fresh weights.

    Parameters
    ----------
    name : str
        Of `CONFIGS`, or a folder in Hugging Face's layout.
    num_classes : int
        Outputs.
    crop : int (default: 0)
        See `VisionTransformer`.

    Raises
    ------
    UsageError
        If transformers is not installed, or the folder is not that of a ViT.
    """
    transformers = import_transformers(f"model = {name!r}", "vision")
    mean: tuple[float, ...] = _HALVES
    std: tuple[float, ...] = _HALVES
    with quiet():
        if name in CONFIGS:
            config = transformers.ViTConfig(num_labels=num_classes, **CONFIGS[name])
        else:
            settings = _settings_of(name)
            config = transformers.ViTConfig.from_dict(settings)
            config.num_labels = num_classes
            mean, std = _normalisation(name)
        side = _side_of(name, config)
        network: nn.Module = transformers.ViTForImageClassification(config)
    return VisionTransformer(network, side, mean, std, crop)


def check_vit_folder(name: str) -> None:
    """Refuse a folder that no vision transformer can be made of; its weights are not looked at."""
    _settings_of(name)
    _normalisation(name)


def has_published_weights(name: str) -> bool:
    """Return whether a model of that name is on the HF hub, or is a folder."""
    return name == VIT_B_16 or name not in CONFIGS


def find_weights(name: str) -> Path:
    """Return the folder with a model's weights, downloaded if need be; UsageError if in vain."""
    return hf_hub_folder(name, VIT_B_16_HF_HUB_NAME) if name in CONFIGS else own_folder(name)


def load_published_weights(model: nn.Module, name: str) -> None:
    """Put the published weights of a model of that name into a fresh one; see `load_weights`."""
    load_weights(model.get_submodule("network"), find_weights(name), name)


def _settings_of(name: str) -> dict[str, Any]:
    settings = read_json(name, Path(name).expanduser() / "config.json")
    if settings is None:
        raise UsageError(
            f"model = {name!r}: the folder has no config.json; name a Hugging Face folder of a "
            f"ViT, or one of {', '.join(CONFIGS)}"
        )
    if settings.get("model_type") != "vit":
        raise UsageError(
            f"model = {name!r}: its config.json has model_type {settings.get('model_type')!r}, but "
            "a ViT is needed"
        )
    return settings


def _normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation as the folder's own processor uses them, else 0.5."""
    processor = read_json(name, Path(name).expanduser() / _PROCESSOR) or {}
    if not processor.get("do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    try:
        mean, std = (
            tuple(float(value) for value in processor.get(key, _HALVES))
            for key in ("image_mean", "image_std")
        )
    except (TypeError, ValueError):
        mean = std = ()
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UsageError(
            f"model = {name!r}: image_mean and image_std in {_PROCESSOR} must be three numbers "
            "each, those of image_std above 0"
        )
    return mean, std


def _side_of(name: str, config: Any) -> int:
    sides = config.image_size
    sides = {sides} if isinstance(sides, int) else set(sides)
    if len(sides) != 1 or config.num_channels != 3:
        raise UsageError(
            f"model = {name!r} takes images of {config.num_channels} channels and size "
            f"{config.image_size}; only square ones of 3 channels are supported"
        )
    return int(sides.pop())
