"""The files of a folder of data: which there are, and which split they belong to."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_PATTERN_SIGNS = ("*", "::", "?", "[", "]")

_CARD = "README.md"
_CARD_BEGINS = "---"

_DIRECTORIES = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"""What the directory of a split may be called; the first that is there counts."""


def pattern_signs(folder: Path) -> str:
    """Return what in a path the library that reads it takes for a pattern."""
    return "".join(sign for sign in _PATTERN_SIGNS if sign in str(folder))


def files_below(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield path, size and time of every file; hidden ones are not data.

    Raises
    ------
    OSError
        If one cannot be looked at.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = f"{prefix}{entry.name}"
            if entry.is_dir():
                yield from files_below(Path(entry.path), f"{path}/")
            else:
                status = entry.stat()
                yield f"{path} {status.st_size} {status.st_mtime_ns}"


def files_of_splits(folder: Path) -> dict[str, str] | None:
    """Return the pattern of each split's files, if a folder has directories of splits.

    The library alone looks for the names of splits at any depth: a class that is called
    ``train`` would belong to two splits. None where it is to look itself: there are less than two
    such directories, or a data set card that tells the files.
    """
    if _has_card(folder):
        return None
    found = {
        split: next((name for name in names if (folder / name).is_dir()), None)
        for split, names in _DIRECTORIES.items()
    }
    patterns = {split: f"{name}/**" for split, name in found.items() if name is not None}
    return patterns if len(patterns) > 1 else None


def shared_file(files: Mapping[str, Iterable[str]]) -> tuple[str, str, str] | None:
    """Return a file of two splits and the names of both; None if there is none."""
    owners: dict[str, str] = {}
    for split, paths in files.items():
        for path in paths:
            if owners.setdefault(path, split) != split:
                return path, owners[path], split
    return None


def _has_card(folder: Path) -> bool:
    card = folder / _CARD
    if not card.is_file():
        return False
    return card.read_text(errors="replace").lstrip("\ufeff").startswith(_CARD_BEGINS)
