"""The tokenizer of a Hugging Face folder, read by transformers."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .hugging_face import import_transformers, quiet

_FILES = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_TOLD_BY = ("config.json", "*.model")
"""What else transformers looks at to make it."""


def tokenizer_state(model: str, folder: Path) -> str:
    """Return a text that is equal for folders whose tokenizer files have the same content.

    Raises
    ------
    UsageError
        If there are none, or they cannot be read.
    """
    if not any(True for _ in _matching(folder, _FILES)):
        raise UsageError(
            f"model = {model!r}: the folder has no tokenizer; save it there: "
            "tokenizer.save_pretrained(FOLDER)"
        )
    digest = hashlib.sha256()
    for path in sorted({*_matching(folder, (*_FILES, *_TOLD_BY))}):
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"model = {model!r}: its tokenizer cannot be read ({reason})") from None
    tokenizer = getattr(made, "backend_tokenizer", None)
    if tokenizer is None:
        raise UsageError(
            f"model = {model!r}: {type(made).__name__} is no fast tokenizer; save one with "
            "AutoTokenizer"
        )
    return tokenizer


def _matching(folder: Path, signs: tuple[str, ...]) -> Iterator[Path]:
    for sign in signs:
        yield from (path for path in folder.glob(sign) if path.is_file())
