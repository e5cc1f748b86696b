"""Put the published weights of a vision transformer, or those of a folder, into a model."""

import functools
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import UsageError
from .hugging_face import import_transformers, quiet
from .vision_transformer import CONFIGS, VIT_B_16, VIT_B_16_HUB_NAME, pixels_made_otherwise
from .weights_folder import hub_folder, own_folder

_log = logging.getLogger(__name__)

_HEAD = "classifier."
_BODY = "vit"
_UNUSED = ("pooler.", "embeddings.mask_token")
"""Of the body, what only other uses of it need."""


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


def find_weights(name: str) -> Path:
    """Return the folder with the weights of a model of that name, downloaded if need be.

    Raises
    ------
    UsageError
        If the hub is out of reach, or a folder has none.
    """
    return hub_folder(name, VIT_B_16_HUB_NAME) if name in CONFIGS else own_folder(name)


def load_weights(model: nn.Module, name: str) -> None:
    """Put the weights of a model of that name into a fresh one, in place.

    The head stays fresh where the weights are for another number of classes, or have none. A line
    in the log says so, and one where a folder asks for pixels that are made in another way.

    Raises
    ------
    UsageError
        If they cannot be had, or are not those of this model.
    """
    folder = find_weights(name)
    network = model.get_submodule("network")
    fresh = network.state_dict()
    given, head_classes = _read(folder, name)
    heads = [key for key in fresh if key.startswith(_HEAD)]
    if any(key not in given or given[key].shape != fresh[key].shape for key in heads):
        its = f"a head for {head_classes} classes" if head_classes else "no head"
        classes = len(fresh[f"{_HEAD}weight"])
        _log.warning("model = %r has %s; it begins with a fresh one for %d", name, its, classes)
        given |= {key: fresh[key] for key in heads}
    try:
        network.load_state_dict(given)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"model = {name!r}: its weights are of another model: {reason}") from None
    if name not in CONFIGS and (others := pixels_made_otherwise(name)):
        _log.warning(
            "model = %r: its preprocessor_config.json says %s; here bytes become values in [0, 1] "
            "and are resized bilinearly",
            name,
            ", ".join(others),
        )


def _read(folder: Path, name: str) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a folder, and for how many classes its head is; 0 if it has none.

    Their names are those that transformers has for them now. A head that does not go with
    config.json is left out.
    """
    transformers = import_transformers(f"model = {name!r}", "vision")
    try:
        # transformers draws anew what it does not find: not from the caller's random numbers.
        with quiet(), torch.random.fork_rng(devices=[]):
            loaded, told = transformers.ViTForImageClassification.from_pretrained(
                folder,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told
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
    shapes = {key: (tuple(found), tuple(needed)) for key, found, needed in told["mismatched_keys"]}
    if others := sorted(key for key in shapes if not key.startswith(_HEAD)):
        found, needed = shapes[others[0]]
        raise UsageError(
            f"model = {name!r}: the weights in {folder} do not go with its config.json: "
            f"{others[0]} has shape {found}, but {needed} is needed"
        )
    body = [child for child, _ in loaded.get_submodule(_BODY).named_children()]
    if surplus := sorted(key for key in told["unexpected_keys"] if _is_of_body(key, body)):
        raise UsageError(
            f"model = {name!r}: the weights in {folder} are of a larger model than its "
            f"config.json: of {len(surplus)} tensors without a place one is {surplus[0]}"
        )
    given = loaded.state_dict()
    weight = f"{_HEAD}weight"
    head_classes = shapes[weight][0][0] if weight in shapes else len(given[weight])
    given = {key: value for key, value in given.items() if key not in missing | shapes.keys()}
    return given, 0 if weight in missing else head_classes


def _is_of_body(key: str, body: Collection[str]) -> bool:
    """Say whether a tensor that has no place takes part in what a ViT computes.

    A body that was saved alone has no prefix before its names.
    """
    inner = key.removeprefix(f"{_BODY}.")
    of_body = inner != key or inner.partition(".")[0] in body
    return of_body and not inner.startswith(_UNUSED)
