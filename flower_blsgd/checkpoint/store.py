"""Checkpoints on disk: written atomically by a background thread, and checked when read.

A checkpoint is one safetensors file, with its checksum in the name and its values as JSON in the
header.
"""

import hashlib
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from safetensors import safe_open

from ..errors import UsageError, first_line
from ..files import flush_to_disk, temporary_path
from ..flower.array_records import AnyArray, tensors_of
from ..results.folder import BEST_MODEL, CHECKPOINTS, save_tensors

_LOG = logging.getLogger(__name__)

FORMAT_VERSION = 1

_NAME = re.compile(r"round-([0-9]{9,10})\.([0-9a-f]{64})\.safetensors")


@dataclass
class Checkpoint:
    """State of a run after a round: JSON values without nan and infinity, and arrays by name.

    The arrays must not change. `source` is the path of its file, for errors.
    """

    values: dict[str, Any]
    tensors: dict[str, AnyArray]
    source: str = "this checkpoint"


class CheckpointStore:
    """Checkpoints of a run, in ``checkpoint/`` of its folder, and its best model.

    A background thread writes them. If the disk is slow, a newer checkpoint replaces one that
    waits. If writing fails, a warning is logged and the last complete checkpoint is kept. The
    newest `keep` checkpoints are kept; with 0 nothing is written. `saved_round` is the round of the
    last checkpoint that was written; 0 before the first.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._run_folder, self._folder, self._keep = folder, folder / CHECKPOINTS, keep
        self._writer = ThreadPoolExecutor(1)  # starts its thread with the first task
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Callable[..., None], *tuple[Any, ...]]] = {}
        """What the thread writes next: of each kind one, which a newer one replaces."""
        self._failing = False
        self.saved_round = 0

    def save(self, checkpoint: Checkpoint, server_round: int) -> None:
        """Write a checkpoint in the background."""
        if self._keep:
            self._hand_over(CHECKPOINTS, self._write, checkpoint, server_round)

    def save_best(self, arrays: ArrayRecord, server_round: int, value: float) -> None:
        """Write the best model so far to ``best_model.safetensors`` in the background.

        `value` is the figure of its metric.
        """
        about = {"round": str(server_round), "value": repr(value)}
        if self._keep:
            self._hand_over(BEST_MODEL, self._write_best, arrays, about)

    def close(self) -> None:
        """Wait until everything is written; may be called twice."""
        self._writer.shutdown()

    def newest(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; None without checkpoints.

        UsageError if all are damaged, or one has another format version.
        """
        reason = ""
        for server_round, path in self._found():
            try:
                return _read(path, server_round)
            except UsageError:
                raise
            except Exception as error:  # a damaged file may raise anything
                reason = f"{path} is damaged: {first_line(error)}"
                _LOG.warning("%s; the checkpoint before it is used", reason)
        if reason:
            raise UsageError(f"no checkpoint can be read ({reason}); start a new run")
        return None

    def _hand_over(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            is_due = bool(self._waiting)
            self._waiting[what] = (write, *arguments)
        if not is_due:
            self._writer.submit(self._write_waiting)

    def _write_waiting(self) -> None:
        """Write what waits, first the best model, which the checkpoint names."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for what in (BEST_MODEL, CHECKPOINTS):
            if what in waiting:
                self._try(*waiting.pop(what))

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
            self._failing = False
        except Exception as error:  # training does not depend on the disk
            if not self._failing:
                failed = "cannot write to %s (%s); training continues"
                _LOG.warning(failed, self._folder, first_line(error))
            self._failing = True

    def _write(self, checkpoint: Checkpoint, server_round: int) -> None:
        about = {
            "format_version": str(FORMAT_VERSION),
            "round": str(server_round),
            "values": json.dumps(checkpoint.values, allow_nan=False),
        }
        self._folder.mkdir(exist_ok=True)
        with temporary_path(self._folder) as part:
            digest = _write_tensors(part, checkpoint.tensors, about)
            path = part.replace(self._folder / f"round-{server_round:09d}.{digest}.safetensors")
        flush_to_disk(self._folder)
        self.saved_round = server_round
        # Checkpoints of later rounds are damaged, because the run was resumed from an earlier one.
        found = self._found()
        before = [other for other_round, other in found if other_round < server_round]
        for _, other in found:
            if other not in (path, *before[: self._keep - 1]):
                other.unlink(missing_ok=True)

    def _write_best(self, arrays: ArrayRecord, about: dict[str, str]) -> None:
        self._folder.mkdir(exist_ok=True)
        with temporary_path(self._folder) as part:
            _write_tensors(part, tensors_of(arrays), about)
            part.replace(self._run_folder / BEST_MODEL)
        flush_to_disk(self._run_folder)

    def _found(self) -> list[tuple[int, Path]]:
        """Return the rounds and paths of all checkpoints, newest first."""
        paths = sorted(self._folder.glob("round-*"), reverse=True)
        named = [(_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(name[1]), path) for name, path in named if name]


def _write_tensors(path: Path, tensors: Mapping[str, AnyArray], about: dict[str, str]) -> str:
    """Write a safetensors file, wait until it is on disk, and return its SHA-256."""
    save_tensors(path, tensors, about)
    flush_to_disk(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, server_round: int) -> Checkpoint:
    """Read and check a checkpoint; a damaged one may raise anything.

    UsageError if it has another format version.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > memory:
            raise ValueError("it is not a regular file, or larger than memory")
        if f".{hashlib.file_digest(file, 'sha256').hexdigest()}." not in path.name:
            raise ValueError("its checksum is wrong")
    with safe_open(path, "numpy") as tensors:
        about = tensors.metadata()
        if (of_file := about["format_version"]) != str(FORMAT_VERSION):
            raise UsageError(
                f"{path} has format version {of_file[:20]}, and this flower-blsgd reads "
                f"{FORMAT_VERSION}; resume with the version that wrote it, or start a new run"
            )
        if about["round"] != str(server_round):
            raise ValueError("its round does not match its name")
        values = dict(json.loads(about["values"]))
        found = {name: tensors.get_tensor(name) for name in tensors.offset_keys()}
        return Checkpoint(values, found, str(path))
