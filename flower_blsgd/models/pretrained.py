"""Published text models: folders, configs, weights and tokenizers, read with transformers."""

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..data.libraries import hf_hub_reachable, import_torchvision, is_hf_hub_name
from ..errors import UsageError, first_line, pip_install

_LOG = logging.getLogger(__name__)

_HF_HUB_NAMES: Mapping[str, str] = {"distilbert": "distilbert/distilbert-base-uncased"}
"""Short names of models on the HF hub."""

_WEIGHTS = "*.safetensors"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
_EXPECTED = "a Hugging Face folder with config.json, *.safetensors and, for texts, a tokenizer"


def import_transformers(model: str) -> ModuleType:
    """Return the module transformers, which is part of our extra "text"."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"model = {model!r} needs transformers; " + pip_install("text"))
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # as transformers does, but also from a build for another torch
    return importlib.import_module("transformers")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable logging and progress bars of transformers within the block."""
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
    """Convert errors of transformers to UsageError ``what (reason)remedy``; also `quiet`."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise UsageError(f"{what} ({first_line(error)}){remedy}") from None


# --- folders


def hf_hub_name(model: str) -> str:
    """Return the name of a model on the HF hub; empty for other models and for folders."""
    if is_hf_hub_name(model) and not Path(model).is_dir():
        return model
    return _HF_HUB_NAMES.get(model, "")


def model_folder(model: str, weights: bool = True) -> Path:
    """Return the absolute path of the Hugging Face folder of a published model.

    Models of the HF hub are downloaded if necessary, without pickles, which can execute code.
    Downloads are found without a network. Without `weights`, config and tokenizer are sufficient.
    UsageError if the folder has no config.json or no weights as safetensors, or the HF hub is not
    reachable or refuses the model.
    """
    if name := hf_hub_name(model):
        return _downloaded(model, name, weights)
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


def _downloaded(model: str, name: str, weights: bool) -> Path:
    import_transformers(model)  # installs the hub's library too
    from huggingface_hub import snapshot_download

    reachable = hf_hub_reachable()
    reason = "refused it" if reachable else "is not reachable"
    try:
        folder = Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.txt", *([_WEIGHTS] if weights else [])],
                ignore_patterns="*/*",  # subfolders contain other formats
                local_files_only=not reachable,
            )
        )
        if _is_complete(folder, weights):
            return folder
    except Exception as error:
        if reachable:
            reason = f"refused it ({first_line(error)})"
    raise UsageError(
        f"model = {model!r}: the HF hub with {name} {reason}; give model=<folder>, "
        f"{_EXPECTED}, or set pretrained = false for fresh weights"
    )


def _is_complete(folder: Path, weights: bool = False) -> bool:
    return (folder / "config.json").is_file() and (not weights or any(folder.glob(_WEIGHTS)))


# --- what is in them


def folder_config(model: str, num_classes: int = 2) -> Any:
    """Return the config in a Hugging Face folder, for this number of classes."""
    transformers = import_transformers(model)
    folder = model_folder(model, weights=False)
    with reading(f"model = {model!r}: transformers cannot use its config.json"):
        return transformers.AutoConfig.from_pretrained(
            folder, num_labels=num_classes, local_files_only=True, trust_remote_code=False
        )


def load_weights(model: nn.Module, name: str) -> None:
    """Load published weights into the network of a model, in place, as float32.

    ``model.network`` is a transformers.PreTrainedModel of the weights' architecture, and `name` the
    setting ``model``, see `model_folder`. A head or pooler that is missing or has another size is
    initialized from torch's generator, with one line in the log. Weights without a counterpart in
    the network are ignored. UsageError if weights of the network's body are missing.
    """
    folder = model_folder(name)
    network: Any = model.network
    with reading(
        f"model = {name!r}: the weights in {folder} cannot be read",
        "; use safetensors, or set pretrained = false",
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
    # Weights from masked language modeling are published without a pooler.
    body = [key for key in fresh if key.startswith(f"{loaded.base_model_prefix}.")]
    if lacking := [key for key in body if "pooler" not in key.split(".")]:
        raise UsageError(
            f"model = {name!r}: its weights lack {len(lacking)} tensors of the "
            f"{network.config.model_type} in its config.json, or have them in another size, such "
            f"as {lacking[0]}; name a complete folder, or set pretrained = false"
        )
    network.load_state_dict(loaded.state_dict())
    if fresh:
        _LOG.warning("model = %r: new random weights for %s", name, ", ".join(fresh))


def folder_tokenizer(model: str) -> Any:
    """Return the tokenizer of a published model; code in the folder is never executed."""
    transformers = import_transformers(model)
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
