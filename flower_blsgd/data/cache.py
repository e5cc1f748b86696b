"""Data prepared once per machine: folders of arrays that all processes map into their memory.

A cache entry is written into a folder with a temporary name and renamed when it is complete, so
that whatever has an entry's name was written to its end. An interrupted preparation leaves
nothing that is used: it begins anew. One process prepares, under a lock that the kernel releases
if its owner dies; others wait for it and use what it made.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from numpy.lib.format import open_memmap

from ..errors import UsageError
from .source import DataSource

_log = logging.getLogger(__name__)

FORMAT = 4
"""Version of what an entry looks like; changes when an older one must not be read any more."""

MANIFEST = "meta.json"
"""The file that says what an entry is, named as in all formats, so that others are recognised."""

SCRATCH = "source"
"""Folder within an unfinished entry for what libraries write; removed when all is done."""

Pair = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Inputs and labels."""

OnItems = Callable[[int, int], None]
"""Called with the number of samples that were just prepared, and with how many there are."""


@dataclass(frozen=True)
class Contents:
    """What a preparation has written.

    Parameters
    ----------
    inputs : str
        Names the arrays of inputs, ``{train,test}_{inputs}.npy``, which lie beside
        ``{train,test}_labels.npy``.
    class_names : tuple of str
        One for each label.
    skipped : mapping
        How many samples of each split were left out.
    facts : mapping
        Whatever else a task wants to know of the data, as JSON writes it.
    """

    inputs: str
    class_names: tuple[str, ...]
    skipped: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparation:
    """How data become arrays on disk.

    Parameters
    ----------
    name : str
        The task, such as ``"cifar10"``; cache entries begin with it.
    source : DataSource
        Where the data come from.
    options : mapping
        All that changes the outcome, as JSON writes it.
    write : callable
        ``(folder, on_items) -> Contents``: writes the arrays into an empty folder. Raises
        UsageError if the data cannot be used, OSError if the folder cannot be written.
    """

    name: str
    source: DataSource
    options: Mapping[str, Any]
    write: Callable[[Path, OnItems], Contents]


@dataclass(frozen=True)
class Prepared:
    """Data that are ready for training.

    The arrays are memory maps: all processes share their pages, and what one writes into them
    stays its own.

    Parameters
    ----------
    train, test : pair of numpy.ndarray
        Inputs, of images uint8 of shape (N, 3, side, side), and labels, int64 of shape (N,).
    class_names : tuple of str
        One for each label.
    fingerprint : str
        16 hex digits of the content of `train`.
    folder : Path
        The cache entry.
    skipped : mapping
        How many samples of each split were left out.
    facts : mapping
        What else was noted when they were prepared.
    noun : str
        What they are, such as ``"images"``.
    """

    train: Pair
    test: Pair
    class_names: tuple[str, ...]
    fingerprint: str
    folder: Path
    skipped: Mapping[str, int]
    facts: Mapping[str, Any]
    noun: str


class UnusableError(Exception):
    """A cache entry is damaged, as the message says."""


def prepared(preparation: Preparation, again: bool = False) -> Prepared:
    """Return the arrays of a preparation, preparing them if that was not done yet.

    Files of a folder that changed count as another source: they are prepared anew, and what was
    made of them before stays, since a run may use it.

    Parameters
    ----------
    preparation : Preparation
        What to prepare.
    again : bool (default: False)
        Prepare it even if that was done.

    Raises
    ------
    UsageError
        If there are no such data, or the cache cannot be read or written.
    """
    source, cache = preparation.source, cache_folder()
    if source.folder is not None and cache.resolve().is_relative_to(source.folder):
        raise UsageError(
            f"{source.setting}: the cache {cache} lies inside it; set BLSGD_CACHE to another folder"
        )
    entry = cache / _entry_name(preparation)
    try:
        if not again:
            with contextlib.suppress(FileNotFoundError, UnusableError):
                return open_entry(entry)
        with _locked(cache, preparation):
            if not again:
                try:
                    return open_entry(entry)  # another process has made it meanwhile
                except FileNotFoundError:
                    pass
                except UnusableError as error:
                    _log.warning("%s is damaged (%s); preparing it again", entry, error)
            _prepare(preparation, entry)
            return open_entry(entry)
    except (OSError, NotImplementedError) as error:  # the latter: a disk without locks
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the cache {cache} cannot be written ({reason}); make room, or set BLSGD_CACHE to "
            "another folder"
        ) from None


def cache_folder() -> Path:
    """Return ``$BLSGD_CACHE``, else ``flower-blsgd`` in the user's folder of caches.

    Raises
    ------
    UsageError
        If it is in the home of a user who does not exist.
    """
    own = os.environ.get("BLSGD_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(own) if own else Path(caches) / "flower-blsgd"
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        why = str(error).rstrip(".")
        raise UsageError(
            f"the cache {folder} cannot be found ({why}); set BLSGD_CACHE to another folder"
        ) from None


def open_entry(entry: Path) -> Prepared:
    """Open a cache entry, comparing the sizes of its files with the manifest.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    UnusableError
        If it is not as it was written.
    UsageError
        If it cannot be read, which does not mean that it is damaged.
    """
    if not entry.exists():
        raise FileNotFoundError(entry)
    with _reading(entry):
        manifest = _read_manifest(entry)
        for name, file in manifest["files"].items():
            size = (entry / name).stat().st_size
            if size != file["bytes"]:
                raise UnusableError(f"{name} has {size} bytes instead of {file['bytes']}")
        train, test = (
            # Copy on write: torch warns of arrays that may not be written.
            tuple(
                np.load(entry / f"{split}_{kind}.npy", mmap_mode="c")
                for kind in (manifest["inputs"], "labels")
            )
            for split in ("train", "test")
        )
        return Prepared(
            train,
            test,
            tuple(manifest["class_names"]),
            manifest["fingerprint"],
            entry,
            manifest["skipped"],
            manifest["facts"],
            manifest["noun"],
        )


def check_content(entry: Path) -> None:
    """Read all files of a cache entry, and compare them with the manifest.

    Raises
    ------
    UnusableError
        If one of them has changed.
    UsageError
        If it cannot be read.
    """
    with _reading(entry):
        for name, file in _read_manifest(entry)["files"].items():
            if _sha256(entry / name) != file["sha256"]:
                raise UnusableError(f"{name} has not the content that was written")


def new_array(
    path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> "np.memmap[Any, np.dtype[Any]]":
    """Return a new array on disk, with its space reserved.

    Raises
    ------
    OSError
        If there is no room for it. A memory map that outgrows its disk would kill the process.
    """
    array: np.memmap[Any, np.dtype[Any]] = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _entry_name(preparation: Preparation) -> str:
    """Return what the entry of a preparation is called: a function of format, options, source."""
    options = json.dumps(dict(preparation.options), sort_keys=True)
    identity = f"{FORMAT} {options} {preparation.source.state()}"
    digest = hashlib.sha256(identity.encode(errors="surrogateescape"))  # as names of files are
    return f"{preparation.name}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def _locked(cache: Path, preparation: Preparation) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f".{preparation.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("waiting for another process that prepares %s", preparation.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare(preparation: Preparation, entry: Path) -> None:
    """Write an entry under a temporary name, and rename it when it is complete.

    Only under the lock: whatever else has a temporary name was left by a process that is gone.
    """
    for leftover in entry.parent.glob(f".part.{preparation.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    new, old = (entry.with_name(f".part.{preparation.name}.{uuid.uuid4().hex}") for _ in range(2))
    new.mkdir()
    try:
        with _shown_progress(preparation, entry) as on_items:
            contents = preparation.write(new, on_items)
        shutil.rmtree(new / SCRATCH, ignore_errors=True)
        _write_manifest(new, preparation, contents)
        if entry.exists():
            entry.rename(old)  # arrays that are open stay readable
        new.rename(entry)
        _sync(entry.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write_manifest(entry: Path, preparation: Preparation, contents: Contents) -> None:
    """Write what the files of a folder are, and see all of it onto the disk."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(entry.iterdir())
    }
    train = "".join(
        str(files[f"train_{kind}.npy"]["sha256"]) for kind in (contents.inputs, "labels")
    )
    manifest = {
        "format": FORMAT,
        "source": str(preparation.source),
        "options": dict(preparation.options),
        "noun": preparation.source.noun,
        "inputs": contents.inputs,
        "class_names": list(contents.class_names),
        "skipped": dict(contents.skipped),
        "facts": dict(contents.facts),
        "fingerprint": hashlib.sha256(train.encode()).hexdigest()[:16],
        "files": files,
    }
    (entry / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in (*entry.iterdir(), entry):
        _sync(path)


def _read_manifest(entry: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((entry / MANIFEST).read_text())
    return manifest


@contextlib.contextmanager
def _reading(entry: Path) -> Iterator[None]:
    """Raise what goes wrong while an entry is read as UnusableError or UsageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise UsageError(
            f"{entry} cannot be read ({error.strerror or error}) and stays as it is; repair that, "
            "or set BLSGD_CACHE to another folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(" ".join(str(error).split()) or type(error).__name__) from None


@contextlib.contextmanager
def _shown_progress(preparation: Preparation, entry: Path) -> Iterator[OnItems]:
    """Write on standard error what is prepared; in a terminal also a bar, while it lasts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)
    source = preparation.source
    console.print(f"preparing the {source.noun} of {source}, once, in {entry}")
    progress = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar = progress.add_task("", total=None)

    def on_items(number: int, total: int) -> None:
        progress.start()  # only now: until then libraries may show bars of their own
        progress.update(bar, advance=number, total=total)

    try:
        yield on_items
    finally:
        progress.stop()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
