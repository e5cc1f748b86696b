"""Put the published weights of a vision transformer, or those of a folder, into a model."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import UsageError
from .hugging_face import import_transformers, quiet
from .vision_transformer import CONFIGS, VIT_B_16, VIT_B_16_HUB_NAME
from .weights_folder import hub_folder, own_folder

_log = logging.getLogger(__name__)

_HEAD = "classifier."


def pretrained_weights(name: str) -> Callable[[nn.Module], None] | None:
    """Return what puts weights into a fresh `VisionTransformer`; None if it has none to begin with.

    Parameters
    ----------
    name : str
        Of the model: the one that is on the hub, or a folder.
    """
    if name in CONFIGS and name != VIT_B_16:
        return None
    return functools.partial(load_weights, name=name)


def load_weights(model: nn.Module, name: str) -> None:
    """Put the weights of a model of that name into a fresh one, in place.

    The head stays fresh where the weights are for another number of classes, or have none.

    Raises
    ------
    UsageError
        If they cannot be had, or are not those of this model.
    """
    at_hub = name in CONFIGS
    folder = hub_folder(name, VIT_B_16_HUB_NAME) if at_hub else own_folder(name)
    network = model.get_submodule("network")
    fresh = network.state_dict()
    given = _read(folder, name)
    heads = [key for key in fresh if key.startswith(_HEAD)]
    if any(key not in given or given[key].shape != fresh[key].shape for key in heads):
        weight = given.get(f"{_HEAD}weight")
        its = "no head" if weight is None else f"a head for {len(weight)} classes"
        classes = len(fresh[f"{_HEAD}weight"])
        _log.warning("model = %r has %s; it begins with a fresh one for %d", name, its, classes)
        given |= {key: fresh[key] for key in heads}
    try:
        network.load_state_dict(given)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"model = {name!r}: its weights are of another model: {reason}") from None


def _read(folder: Path, name: str) -> dict[str, Tensor]:
    """Return all tensors of a folder under the names that transformers has for them now."""
    transformers = import_transformers(f"model = {name!r}", "vision")
    try:
        # transformers draws anew what it does not find: not from the caller's random numbers.
        with quiet(), torch.random.fork_rng(devices=[]):
            loaded, told = transformers.ViTForImageClassification.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"model = {name!r}: the weights in {folder} cannot be read: {reason}; only "
            "safetensors are, or begin without: pretrained = false"
        ) from None
    missing = set(told["missing_keys"])
    lost = sorted(key for key in missing if not key.startswith(_HEAD))
    if lost:
        raise UsageError(
            f"model = {name!r}: the weights in {folder} are not whole: of {len(missing)} missing "
            f"tensors one is {lost[0]}"
        )
    return {key: value for key, value in loaded.state_dict().items() if key not in missing}
