"""What is prepared once: what it is named by, and how it is written, with a memory of how far."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .source import DataSource

PROGRESS_FILES = ("progress.json", ".progress.json.new")
"""How far a preparation is; gone when it is whole."""


@dataclass(frozen=True)
class Contents:
    """What a preparation has written.

    Parameters
    ----------
    inputs : str
        Names the arrays of inputs: ``{train,test}_{inputs}.npy``, beside
        ``{train,test}_labels.npy``.
    class_names : tuple of str
        One for each label.
    skipped : mapping
        How many samples of each split were left out.
    facts : mapping
        Whatever else a task wants to know of the data; can be written as JSON.
    """

    inputs: str
    class_names: tuple[str, ...]
    skipped: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)


class OnItems(Protocol):
    """What a preparation tells of how far it is."""

    def begin(self, total: int, done: int = 0) -> None:
        """Say how many items there are, and how many were done before; once, at the start."""

    def __call__(self, number: int) -> None:
        """Say that so many more are done."""


class Preparation(Protocol):
    """Data that become arrays on disk."""

    @property
    def name(self) -> str:
        """The task, such as ``"cifar10"``; entries of the cache begin with it."""

    @property
    def source(self) -> DataSource:
        """Where the data come from."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What changes the outcome, as JSON writes it."""

    @property
    def noun(self) -> str:
        """What is prepared, such as ``"images"``."""

    def write(self, part: Path, on_items: OnItems) -> Contents:
        """Write arrays into a folder, going on from what is there.

        Parameters
        ----------
        part : Path
            Empty, or as an earlier call with the same name, source and options left it when it
            was interrupted or killed; whatever else is there must be written over.
        on_items : OnItems
            Told how far it is.

        Raises
        ------
        UsageError
            If the data cannot be used.
        OSError
            If the folder cannot be written.
        """


def scratch_folder(part: Path) -> Path:
    """Return where libraries may keep what they make of the source; gone when all is whole."""
    return part / "source"


def read_progress(part: Path) -> dict[str, Any]:
    """Return what was recorded last; empty if there is nothing that can be read."""
    try:
        progress = json.loads((part / PROGRESS_FILES[0]).read_text())
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}


def record_progress(part: Path, progress: Mapping[str, Any]) -> None:
    """Record how far it is, at once or not at all; what it speaks of must be flushed before.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    told, fresh = (part / name for name in PROGRESS_FILES)
    with fresh.open("w") as file:
        json.dump(progress, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(told)


def forget_progress(part: Path) -> None:
    """Remove what was recorded."""
    for name in PROGRESS_FILES:
        (part / name).unlink(missing_ok=True)
