"""Vision transformers of Dosovitskiy et al. 2021, from transformers.

``vit-b-16`` is ViTForImageClassification, on the HF hub google/vit-base-patch16-224, trained on
ImageNet-21k and then on ImageNet-1k. A Hugging Face folder is also a model: ``config.json`` defines
the architecture, ``preprocessor_config.json`` the normalization, and its safetensors the weights.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UsageError
from .pretrained import folder_config, import_transformers, model_folder, quiet, reading
from .resnets import Channels, PixelNormalize

VITS: Mapping[str, Mapping[str, int]] = {
    "vit-b-16": {},  # the defaults of transformers
    "vit-micro-16": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    },
}
"""Configs by name, as differences from ViT-B/16."""

_PROCESSOR = "preprocessor_config.json"


class VisionTransformer(nn.Module):
    """ViTForImageClassification with new weights, for uint8 images of any size in NCHW.

    Images are resized bilinearly to the network's input size, on their device and without keeping
    the aspect ratio, as in ViTImageProcessor but without rounding. Shrinking is antialiased, as in
    PIL.

    Parameters
    ----------
    name : str
        Key of `VITS`, or a Hugging Face folder.
    num_classes : int
        Number of outputs.
    crop : int (default: 0)
        Center-crop larger images to this side, in pixels; 0: no cropping.

    Raises
    ------
    UsageError
        See `vit_config`.
    """

    def __init__(self, name: str, num_classes: int, crop: int = 0) -> None:
        super().__init__()
        config, channels = vit_config(name, num_classes)
        transformers = import_transformers(name, "vision")
        with quiet():
            self.network: Any = transformers.ViTForImageClassification(config)
        self.pixels = PixelNormalize(*channels, crop)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        # Normalizing before resizing gives the same result up to rounding, with less work.
        images, side = self.pixels(images), self.network.config.image_size
        if images.shape[-2:] != (side, side):
            shrinks = max(images.shape[-2:]) > side
            images = functional.interpolate(
                images, size=(side, side), mode="bilinear", antialias=shrinks
            )
        logits: Tensor = self.network(pixel_values=images, return_dict=True).logits
        return logits


def vit_config(name: str, num_classes: int = 2) -> tuple[Any, Channels]:
    """Return config and normalization of a ViT by name, or of a Hugging Face folder.

    Raises
    ------
    UsageError
        If transformers is not installed, or the folder does not contain a ViT for square images
        with three channels and a valid normalization.
    """
    transformers = import_transformers(name, "vision")
    if name in VITS:
        config = transformers.ViTConfig(num_labels=num_classes, **VITS[name])
        return config, ([0.5] * 3, [0.5] * 3)  # as in ViTImageProcessor
    config = folder_config(name, num_classes)
    if config.model_type != "vit":
        raise UsageError(
            f"model = {name!r}: its config.json has model_type {config.model_type!r}, but a ViT "
            "is needed"
        )
    if not isinstance(config.image_size, int) or config.num_channels != 3:
        raise UsageError(
            f"model = {name!r} takes images of {config.num_channels} channels and size "
            f"{config.image_size}; only square ones of 3 channels are supported"
        )
    with reading(
        f"model = {name!r}: its {_PROCESSOR} cannot be used",
        "; image_mean and image_std must be 3 numbers each, the latter above 0; without it they "
        "are 0.5",
    ):
        folder, processor = model_folder(name, weights=False), transformers.ViTImageProcessor()
        if (folder / _PROCESSOR).is_file():
            processor = processor.from_pretrained(folder)
        if not processor.do_normalize:
            return config, ([0.0] * 3, [1.0] * 3)
        values = np.array([processor.image_mean, processor.image_std], float)
        if values.shape != (2, 3) or not np.isfinite(values).all() or values[1].min() <= 0:
            raise ValueError(f"found {values.tolist()}")
    mean, std = values.tolist()
    return config, (mean, std)
