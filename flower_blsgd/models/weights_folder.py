"""Find the files of a published model: in a folder, or downloaded from the hub."""

import json
from pathlib import Path

from ..errors import UsageError
from ..hub import hub_answers, offline

_CONFIG = "config.json"
_WEIGHTS = "*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DESCRIPTIONS = ("*.json", "*.txt")
_BELOW = "*/*"
"""Of the hub's repositories only the files at the top: further down are other formats."""


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
        If it is not complete.
    """
    folder = Path(model).expanduser()
    check_folder(model, folder, weights)
    return folder.resolve()


def check_folder(model: str, folder: Path, weights: bool) -> None:
    """Refuse a folder that lacks config.json or weights as safetensors.

    Raises
    ------
    UsageError
        If it does; a folder of pickles is told how to become another.
    """
    expected = "a Hugging Face folder with config.json, model.safetensors and its tokenizer"
    try:
        described = isinstance(json.loads((folder / _CONFIG).read_text()), dict)
    except FileNotFoundError:
        raise UsageError(
            f"model = {model!r}: the folder has no {_CONFIG}; name {expected}"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"model = {model!r}: its {_CONFIG} cannot be read ({reason})") from None
    if not described:
        raise UsageError(f"model = {model!r}: its {_CONFIG} is no description of a model")
    if not weights or any(folder.glob(_WEIGHTS)):
        return
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


def hub_folder(model: str, hub_name: str, weights: bool = True) -> Path:
    """Return the folder of a repository of the hub, as it was downloaded.

    Parameters
    ----------
    model : str
        The setting, for messages.
    hub_name : str
        The repository, such as ``"distilbert/distilbert-base-uncased"``. What was downloaded
        before is not downloaded again, and found without a network too. Never a pickle.
    weights : bool (default: True)
        False where config and tokenizer are enough.

    Raises
    ------
    UsageError
        If the hub is out of reach, or refuses it.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"model = {model!r} needs huggingface_hub; pip install 'flower-blsgd[text]'"
        ) from None
    answers = hub_answers()
    why = "refused it" if answers else "is out of reach"
    try:
        with offline(not answers):
            folder = Path(
                snapshot_download(
                    hub_name,
                    allow_patterns=[*_DESCRIPTIONS, *([_WEIGHTS] if weights else [])],
                    ignore_patterns=_BELOW,
                    local_files_only=not answers,
                )
            )
        found = (folder / _CONFIG).is_file() and (not weights or any(folder.glob(_WEIGHTS)))
    except Exception as error:
        found = False
        if answers:
            why = f"refused it ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
    if not found:
        raise UsageError(
            f"model = {model!r}: the hub with {hub_name} {why}; give model=<folder> that holds "
            "config.json, model.safetensors and what belongs to them, or set pretrained = false "
            "for fresh weights"
        )
    return folder
