"""Classification models of torchvision for uint8 images, and weights for image models."""

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.libraries import answers, import_torchvision
from ..errors import UsageError, first_line
from .resnets import IMAGENET_CHANNELS, PixelNormalize

_LOG = logging.getLogger(__name__)

MICRO = "vit-micro-16"
"""Name of a narrow vision transformer, for tests."""

_MICRO_SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 256}

_ONE_SIZE = ("vit", "maxvit")
"""Beginnings of the names of models that accept one image size only."""

_AUXILIARY = {"aux_logits": False, "transform_input": True, "init_weights": True}
"""Arguments of the models with auxiliary outputs: one output, and the normalization of their
published weights."""


class VisionModel(nn.Module):
    """Classification model of torchvision, for uint8 images of any size in NCHW.

    Images are normalized with ImageNet's mean and deviation. On their device, they are enlarged to
    the smallest size that the network supports, or resized to the only one. `name` is one in
    ``torchvision.models``, or `MICRO`.
    """

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        models = import_torchvision().models
        self._side = 224 if name == MICRO else max(_weights(name).meta["min_size"])
        self._only = name.startswith(_ONE_SIZE)
        options: dict[str, Any] = {"num_classes": num_classes}
        if name.startswith("vit"):
            options["image_size"] = self._side
        if name in ("googlenet", "inception_v3"):
            options |= _AUXILIARY
        make = functools.partial(models.get_model, name)
        if name == MICRO:
            make = functools.partial(models.VisionTransformer, patch_size=16, **_MICRO_SIZES)
        self.network: nn.Module = make(**options)
        self.pixels = PixelNormalize(*IMAGENET_CHANNELS)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        # Normalizing before resizing gives the same result up to rounding, with less work.
        images = self.pixels(images)
        wanted = self._side
        height, width = images.shape[-2:]
        if min(height, width) < wanted or (self._only and (height, width) != (wanted, wanted)):
            shrinks = max(height, width) > wanted
            images = functional.interpolate(
                images, size=(wanted, wanted), mode="bilinear", antialias=shrinks
            )
        logits: Tensor = self.network(images)
        return logits


def vision_model_names() -> list[str]:
    """Return the names of all models of `VisionModel`."""
    models = import_torchvision().models
    return [MICRO, *models.list_models(module=models)]


def _weights(name: str) -> Any:
    return import_torchvision().models.get_model_weights(name).DEFAULT


def read_weights(model: str) -> Mapping[str, Tensor]:
    """Return the published weights of a model of torchvision, or weights from a file.

    `model` is a name, or ``NAME:FILE`` with a file of safetensors or of ``torch.save``. Code in the
    weights is never executed.
    """
    name, _, file = model.partition(":")
    try:
        if file.endswith(".safetensors"):
            from safetensors.torch import load_file

            found = load_file(Path(file).expanduser())
        elif file:
            found = torch.load(Path(file).expanduser(), map_location="cpu", weights_only=True)
        else:
            weights = _weights(name)
            cached = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
            if not cached.is_file() and not answers(weights.url):
                raise ConnectionError(f"{weights.url} does not answer")
            found = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        # Wrappers add a prefix, and the first weights of DenseNet have other names.
        found = {re.sub(r"^(module|network)\.", "", key): tensor for key, tensor in found.items()}
        old = r"(denselayer\d+\.\w+)\.([12]\.)"
        return {re.sub(old, r"\1\2", key): tensor for key, tensor in found.items()}
    except Exception as error:  # libraries raise any kind for damaged files
        remedy = "save them with torch.save(model.state_dict(), FILE)"
        if not file:
            remedy = f"give a file, model = {name}:FILE, or set pretrained = false"
        raise UsageError(
            f"model = {model!r}: its weights cannot be loaded ({first_line(error)}); {remedy}"
        ) from None


def load_image_weights(model: nn.Module, name: str) -> None:
    """Load weights into a model in place; `name` is that of `read_weights`.

    A last layer of another size keeps its random weights, with one line in the log. UsageError if
    there are no weights, or if others than those of the last layer are missing.
    """
    network: nn.Module = getattr(model, "network", model)
    own = network.state_dict()
    found = {
        key: tensor
        for key, tensor in read_weights(name).items()
        if key in own and tensor.shape == own[key].shape
    }
    fresh = [key for key in own if key not in found and not key.endswith("num_batches_tracked")]
    head = last_tensor(network).rpartition(".")[0]
    if lacking := [key for key in fresh if not key.startswith(f"{head}.")]:
        raise UsageError(
            f"model = {name!r}: its weights lack {len(lacking)} tensors, or have them in another "
            f"size, such as {lacking[0]}; name weights of this model, or set pretrained = false"
        )
    network.load_state_dict(found, strict=False)
    if fresh:
        _LOG.warning("model = %r: new random weights for %s", name, ", ".join(fresh))


def last_tensor(network: nn.Module) -> str:
    """Return the name of a tensor of the last layer, which has one row per class."""
    return list(dict(network.named_parameters()))[-1]
