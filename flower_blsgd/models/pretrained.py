"""Published models: find their folders, read their weights and tokenizers with transformers."""

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..data.hf_hub import first_line, hf_hub_reachable, offline
from ..errors import UsageError

_log = logging.getLogger(__name__)

_WEIGHTS = "*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DESCRIPTIONS = ("*.json", "*.txt")
_SUBFOLDERS = "*/*"
"""Only the files at the top of a repository are used: further down are other formats."""

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_READ_FOR_TOKENIZER = (*_TOKENIZER_FILES, "config.json", "*.model")

_POOLER = "pooler"
"""The part of a body that published weights often lack: it was not trained with them."""

_LONGEST_LIST = 4


def import_transformers(needed_for: str, extra: str) -> ModuleType:
    """Return transformers, ready to make models.

    Parameters
    ----------
    needed_for : str
        How the message begins where it is missing, such as ``"model = 'vit-b-16'"``.
    extra : str
        The extra of ours that brings it: ``"vision"`` or ``"text"``.

    Raises
    ------
    UsageError
        If it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{needed_for} needs transformers; pip install 'flower-blsgd[{extra}]'")
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


def read_json(model: str, file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model's folder; None if there is no such file.

    Raises
    ------
    UsageError
        If it cannot be read, or holds something else.
    """
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"model = {model!r}: its {file.name} cannot be read ({reason})") from None
    if not isinstance(read, dict):
        raise UsageError(f"model = {model!r}: its {file.name} must hold a JSON object")
    return read


def own_folder(model: str, weights: bool = True) -> Path:
    """Return the whole path of a Hugging Face folder: config.json, and weights as safetensors.

    Parameters
    ----------
    model : str
        The setting, a folder.
    weights : bool (default: True)
        False where config and tokenizer are enough.

    Raises
    ------
    UsageError
        If it is not complete; for pickles the message says how to convert them.
    """
    folder = Path(model).expanduser()
    expected = "a Hugging Face folder with config.json, model.safetensors and its tokenizer"
    if read_json(model, folder / "config.json") is None:
        raise UsageError(f"model = {model!r}: the folder has no config.json; name {expected}")
    if not weights or any(folder.glob(_WEIGHTS)):
        return folder.resolve()
    if pickles := sorted(path.name for sign in _PICKLES for path in folder.glob(sign)):
        raise UsageError(
            f"model = {model!r}: {pickles[0]} is a pickle, which may run anything when it is "
            "opened; if you trust it, convert it with transformers: "
            "AutoModel.from_pretrained(OLD).save_pretrained(NEW) and the same with AutoTokenizer"
        )
    raise UsageError(
        f"model = {model!r}: the folder has no weights; name {expected}, or set pretrained = "
        "false for fresh ones"
    )


def hf_hub_folder(model: str, hf_hub_name: str, weights: bool = True) -> Path:
    """Return the folder of a repository of the Hugging Face hub, as it was downloaded.

    What was downloaded before is not downloaded again, and found without a network too. A pickle
    is never downloaded.

    Parameters
    ----------
    model : str
        The setting, for messages.
    hf_hub_name : str
        The repository, such as ``"distilbert/distilbert-base-uncased"``.
    weights : bool (default: True)
        False where config and tokenizer are enough.

    Raises
    ------
    UsageError
        If the HF hub is out of reach, or refuses it.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"model = {model!r} needs huggingface_hub; pip install 'flower-blsgd[text]'"
        ) from None
    reachable = hf_hub_reachable()
    reason = "refused it" if reachable else "is out of reach"
    try:
        with offline(not reachable):
            folder = Path(
                snapshot_download(
                    hf_hub_name,
                    allow_patterns=[*_DESCRIPTIONS, *([_WEIGHTS] if weights else [])],
                    ignore_patterns=_SUBFOLDERS,
                    local_files_only=not reachable,
                )
            )
        if (folder / "config.json").is_file() and (not weights or any(folder.glob(_WEIGHTS))):
            return folder
    except Exception as error:
        if reachable:
            reason = f"refused it ({first_line(error)})"
    raise UsageError(
        f"model = {model!r}: the HF hub with {hf_hub_name} {reason}; give model=<folder> with "
        "config.json, model.safetensors and what belongs to them, or set pretrained = false for "
        "fresh weights"
    )


def load_weights(network: Any, folder: Path, name: str) -> None:
    """Put the weights of a Hugging Face folder into a model of transformers, in place, as float32.

    A head, or a pooler, that the folder lacks or has in another size stays as it is; what the
    model has no part for is left out. One line in the log names both. Torch's random numbers are
    as before.

    Parameters
    ----------
    network : transformers.PreTrainedModel
        Of the folder's architecture.
    folder : Path
        With weights as safetensors.
    name : str
        What the user calls the model.

    Raises
    ------
    UsageError
        If the weights cannot be read, or are not all those of the model's body.
    """
    config = copy.deepcopy(network.config)
    try:
        # transformers draws what it does not find: not from the caller's random numbers.
        with quiet(), torch.random.fork_rng(devices=[]):
            loaded, found = type(network).from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    except Exception as error:
        raise UsageError(
            f"model = {name!r}: the weights in {folder} cannot be read ({first_line(error)}); only "
            "safetensors can, or begin without: pretrained = false"
        ) from None
    own = network.state_dict()
    mismatched = {key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]}
    fresh = (set(found["missing_keys"]) | mismatched) & set(own)
    prefix = f"{loaded.base_model_prefix}."
    body = [key for key in own if key.startswith(prefix)]
    if lacking := [key for key in body if key in fresh and _POOLER not in key.split(".")]:
        raise UsageError(
            f"model = {name!r}: its weights lack {len(lacking)} of the {len(body)} tensors of the "
            f"{config.model_type} that its config.json describes, or have them in another size, "
            f"such as {min(lacking)}; name a folder that was saved whole, or set pretrained = "
            "false for fresh ones"
        )
    unused = set(found["unexpected_keys"])
    with torch.no_grad():
        for key, tensor in loaded.state_dict().items():
            if key not in fresh:
                own[key].copy_(tensor)
    parts = []
    if fresh:
        parts.append(f"begins with fresh weights in {_listed(fresh)}")
    if unused:
        parts.append(f"has no part for {_listed(unused)} of the folder")
    if parts:
        _log.warning("model = %r %s", name, ", and ".join(parts))


def _listed(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:_LONGEST_LIST])
    rest = len(names) - _LONGEST_LIST
    return f"{first} and {rest} more" if rest > 0 else first


def tokenizer_identity(model: str, folder: Path) -> str:
    """Return a text that is equal for folders whose tokenizer files have the same content.

    Raises
    ------
    UsageError
        If there are none, or they cannot be read.
    """
    if not _matching(folder, _TOKENIZER_FILES):
        raise UsageError(
            f"model = {model!r}: the folder has no tokenizer; save it there: "
            "tokenizer.save_pretrained(FOLDER)"
        )
    digest = hashlib.sha256()
    for path in _matching(folder, _READ_FOR_TOKENIZER):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"model = {model!r}: {path.name} cannot be read ({error.strerror})"
            ) from None
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return f"files {digest.hexdigest()[:16]}"


def folder_tokenizer(model: str, folder: Path) -> Any:
    """Return the tokenizer of a folder as one of the library `tokenizers`.

    Code that a folder brings along is never run.

    Raises
    ------
    UsageError
        If transformers cannot make a fast tokenizer of it.
    """
    transformers = import_transformers(f"model = {model!r}", "text")
    try:
        with quiet():
            made = transformers.AutoTokenizer.from_pretrained(
                folder, use_fast=True, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:
        raise UsageError(
            f"model = {model!r}: its tokenizer cannot be read ({first_line(error)})"
        ) from None
    tokenizer = getattr(made, "backend_tokenizer", None)
    if tokenizer is None:
        raise UsageError(
            f"model = {model!r}: {type(made).__name__} is no fast tokenizer; save one with "
            "AutoTokenizer"
        )
    return tokenizer


def _matching(folder: Path, patterns: Collection[str]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())
