"""Published models: find their folders, read configs, weights and tokenizers with transformers."""

import contextlib
import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..data.source import hf_hub_reachable
from ..errors import UsageError, first_line, pip_install

_LOG = logging.getLogger(__name__)

HF_HUB_NAMES: Mapping[str, str] = {
    "vit-b-16": "google/vit-base-patch16-224",
    "distilbert": "distilbert/distilbert-base-uncased",
}
"""The models that are published with weights, and what the Hugging Face hub calls them."""

_FRESH = re.compile("encoder|resnet(8|20)|wrn.*|distilbert-micro|vit-micro-16")
"""Names of models that begin with fresh weights; a folder of such a name is not looked at."""

_WEIGHTS = "*.safetensors"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
_EXPECTED = "a Hugging Face folder with config.json, *.safetensors and, for texts, a tokenizer"


def import_transformers(model: str, extra: str) -> ModuleType:
    """Return transformers, which a model needs and an extra of ours brings, "vision" or "text".

    UsageError if it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"model = {model!r} needs transformers; {pip_install(extra)}")
    return importlib.import_module("transformers")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging and drawing progress bars; its settings return afterwards."""
    settings = importlib.import_module("transformers.utils.logging")
    level, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity(logging.CRITICAL)
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()


@contextlib.contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Raise UsageError ``what (reason)remedy`` of whatever transformers raises, and be `quiet`."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise UsageError(f"{what} ({first_line(error)}){remedy}") from None


# --- folders


def is_published(model: str) -> bool:
    """Return whether a model comes with weights: from the HF hub, or as a folder."""
    if model in HF_HUB_NAMES or _FRESH.fullmatch(model):
        return model in HF_HUB_NAMES
    return _is_complete(Path(model).expanduser())


def model_folder(model: str, weights: bool = True) -> Path:
    """Return the whole path of the Hugging Face folder of a published model.

    One of `HF_HUB_NAMES` is downloaded if that was not done yet, without pickles, which may run
    anything when they are opened; what was downloaded is found without a network too. Without
    `weights` config and tokenizer are enough.

    Raises
    ------
    UsageError
        If the folder has no config.json or no weights as safetensors, or the HF hub is out of
        reach or refuses the model.
    """
    if model in HF_HUB_NAMES:
        return _downloaded(model, weights)
    folder = Path(model).expanduser().resolve()
    if not _is_complete(folder):
        raise UsageError(f"model = {model!r}: the folder has no config.json; name {_EXPECTED}")
    if not _is_complete(folder, weights):
        raise UsageError(
            f"model = {model!r}: the folder has no weights as safetensors; if you trust pickles, "
            "convert them: transformers.AutoModel.from_pretrained(OLD).save_pretrained(NEW) and "
            "the same with AutoTokenizer; or set pretrained = false for fresh weights"
        )
    return folder


def _downloaded(model: str, weights: bool) -> Path:
    import_transformers(model, "text")  # it brings the hub's library
    from huggingface_hub import snapshot_download

    reachable = hf_hub_reachable()
    reason = "refused it" if reachable else "is out of reach"
    try:
        folder = Path(
            snapshot_download(
                HF_HUB_NAMES[model],
                allow_patterns=["*.json", "*.txt", *([_WEIGHTS] if weights else [])],
                ignore_patterns="*/*",  # below the top of a repository are other formats
                local_files_only=not reachable,
            )
        )
        if _is_complete(folder, weights):
            return folder
    except Exception as error:
        if reachable:
            reason = f"refused it ({first_line(error)})"
    raise UsageError(
        f"model = {model!r}: the HF hub with {HF_HUB_NAMES[model]} {reason}; give model=<folder>, "
        f"{_EXPECTED}, or set pretrained = false for fresh weights"
    )


def _is_complete(folder: Path, weights: bool = False) -> bool:
    return (folder / "config.json").is_file() and (not weights or any(folder.glob(_WEIGHTS)))


# --- what is in them


def folder_config(model: str, num_classes: int) -> Any:
    """Return the config that a Hugging Face folder's config.json describes, for so many classes.

    Raises
    ------
    UsageError
        If transformers is not installed, or does not know it.
    """
    transformers = import_transformers(model, "text")
    folder = model_folder(model, weights=False)
    with reading(f"model = {model!r}: transformers cannot use its config.json"):
        return transformers.AutoConfig.from_pretrained(
            folder, num_labels=num_classes, local_files_only=True, trust_remote_code=False
        )


def load_weights(model: nn.Module, name: str) -> None:
    """Put published weights into the network of a model, in place, as float32.

    A head, or a pooler, that the folder lacks or has in another size is drawn anew from torch's
    generator, and one line in the log names it. What the network has no part for is left out.

    Parameters
    ----------
    model : torch.nn.Module
        Its `network` is a transformers.PreTrainedModel of the architecture of the weights.
    name : str
        The setting; see `model_folder`.

    Raises
    ------
    UsageError
        If there are no weights, they cannot be read, or are not all those of the network's body.
    """
    folder = model_folder(name)
    network: Any = model.network
    with reading(
        f"model = {name!r}: the weights in {folder} cannot be read",
        "; only safetensors can, or begin without: pretrained = false",
    ):
        loaded, found = type(network).from_pretrained(
            folder,
            config=network.config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
        )
    mismatched = {key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]}
    fresh = sorted(set(found["missing_keys"]) | mismatched)
    # Weights that were trained on words alone are published without a pooler.
    body = [key for key in fresh if key.startswith(f"{loaded.base_model_prefix}.")]
    if lacking := [key for key in body if "pooler" not in key.split(".")]:
        raise UsageError(
            f"model = {name!r}: its weights lack {len(lacking)} tensors of the "
            f"{network.config.model_type} that its config.json describes, or have them in another "
            f"size, such as {lacking[0]}; name a folder that was saved whole, or set pretrained = "
            "false for fresh ones"
        )
    network.load_state_dict(loaded.state_dict())
    if fresh:
        _LOG.warning("model = %r begins with fresh weights in %s", name, ", ".join(fresh))


def folder_tokenizer(model: str) -> Any:
    """Return the tokenizer of a published model as one of the library `tokenizers`.

    Code that a folder brings along is never run.

    Raises
    ------
    UsageError
        If there is none, or transformers cannot make a fast tokenizer of it.
    """
    transformers = import_transformers(model, "text")
    folder = model_folder(model, weights=False)
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise UsageError(
            f"model = {model!r}: the folder has no tokenizer; save it there: "
            "tokenizer.save_pretrained(FOLDER)"
        )
    with reading(f"model = {model!r}: its tokenizer cannot be read as a fast one"):
        return transformers.AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        ).backend_tokenizer
