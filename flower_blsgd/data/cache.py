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
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from rich.console import Console

from ..errors import UsageError, first_line
from .source import DataSource

_LOG = logging.getLogger(__name__)

_FORMAT = 5
"""Version of what an entry looks like; changes when an older one must not be read any more."""

_MANIFEST = "manifest.json"
_KINDS = ("inputs", "labels")

Pair = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Inputs and labels."""

Write = Callable[[Path, Path], Mapping[str, Any]]
"""``(folder, scratch) -> facts``: writes ``{train,test}_{inputs,labels}.npy`` into an empty folder.

Libraries may write into `scratch`, which is removed. The facts are ``num_classes``, ``skipped``
and, of texts, ``vocabulary``, as of `Prepared`. Raises UsageError if the data cannot be used,
OSError if the folder cannot be written.
"""


@dataclass(frozen=True)
class Prepared:
    """Data that are ready for training.

    The arrays are memory maps: all processes share their pages, and what one writes into them
    stays its own.

    Parameters
    ----------
    train, test : pair of numpy.ndarray
        Inputs, of images uint8 of shape (N, 3, side, side), of texts int32 of shape
        (N, longest text), and labels, int64 of shape (N,).
    folder : Path
        The cache entry.
    noun : str
        What they are, such as ``"images"``.
    fingerprint : str
        16 hex digits of the content of `train`.
    num_classes : int
        Labels are below it.
    skipped : mapping
        How many samples of each part were left out.
    vocabulary : int (default: 0)
        Of texts: how many tokens their tokenizer knows.
    """

    train: Pair
    test: Pair
    folder: Path
    noun: str
    fingerprint: str
    num_classes: int
    skipped: Mapping[str, int]
    vocabulary: int = 0


class UnusableError(Exception):
    """A cache entry is damaged, as the message says."""


def prepared(
    source: DataSource, options: Mapping[str, Any], write: Write, again: bool = False
) -> Prepared:
    """Return the arrays of a data set, preparing them if that was not done yet.

    Files of a folder that changed count as another source: they are prepared anew, and what was
    made of them before stays, since a run may use it.

    Parameters
    ----------
    source : DataSource
        Where the data come from; cache entries begin with its name.
    options : mapping
        All else that changes the outcome, as JSON writes it.
    write : callable
        Prepares them; see `Write`.
    again : bool (default: False)
        Prepare them even if that was done.

    Raises
    ------
    UsageError
        If there are no such data, or the cache cannot be read or written.
    """
    cache = cache_folder()
    if source.folder is not None and cache.resolve().is_relative_to(source.folder):
        raise UsageError(  # every preparation would make another source of it
            f"{source.setting}: the cache {cache} lies inside it; set BLSGD_CACHE to another folder"
        )
    identity = f"{_FORMAT} {json.dumps(options, sort_keys=True)} {source.state()}"
    digest = hashlib.sha256(identity.encode(errors="surrogateescape"))  # as names of files are
    entry = cache / f"{source.name}-{digest.hexdigest()[:16]}"
    try:
        if entry.exists() and not again:
            with contextlib.suppress(UnusableError):
                return open_entry(entry)
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f".{source.name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            _LOG.warning("waiting for another process that prepares %s", source.name)
            held = lock.acquire()
        with held:
            if entry.exists() and not again:
                try:
                    return open_entry(entry)  # another process has made it meanwhile
                except UnusableError as error:
                    _LOG.warning("%s is damaged (%s); preparing it again", entry, error)
            _prepare(entry, source, write)
            return open_entry(entry)
    except (OSError, NotImplementedError) as error:  # the latter: a disk without locks
        raise UsageError(
            f"the cache {cache} cannot be used ({error}); make room, or set BLSGD_CACHE to "
            "another folder"
        ) from None


def cache_folder() -> Path:
    """Return ``$BLSGD_CACHE``, else ``flower-blsgd`` in the user's folder of caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("BLSGD_CACHE") or f"{caches}/flower-blsgd"
    return Path(os.path.expanduser(folder)).absolute()


def open_entry(entry: Path, content: bool = False) -> Prepared:
    """Open a cache entry, comparing its files with the manifest: their sizes, or their content.

    Raises
    ------
    UnusableError
        If one of them is missing or has changed.
    UsageError
        If one cannot be read, which does not mean that it is damaged.
    """
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        files = manifest["files"]
        for name, file in files.items():
            path = entry / name
            same = path.stat().st_size == file["bytes"]
            if not same or (content and _sha256(path) != file["sha256"]):
                raise UnusableError(f"{name} is not as it was written")
        train, test = (
            # Copy on write: torch warns of arrays that may not be written.
            tuple(np.load(entry / f"{part}_{kind}.npy", mmap_mode="c") for kind in _KINDS)
            for part in ("train", "test")
        )
        hashes = "".join(files[f"train_{kind}.npy"]["sha256"] for kind in _KINDS)
        fingerprint = hashlib.sha256(hashes.encode()).hexdigest()[:16]
        return Prepared(train, test, entry, manifest["noun"], fingerprint, **manifest["facts"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(first_line(error)) from None
    except OSError as error:
        raise UsageError(
            f"the cache entry {entry} cannot be read ({error}) and stays as it is; repair that, or "
            "set BLSGD_CACHE to another folder"
        ) from None


def _prepare(entry: Path, source: DataSource, write: Write) -> None:
    """Write an entry under a temporary name, and rename it when it is complete.

    Only under the lock: whatever else has a temporary name was left by a process that is gone.
    """
    for leftover in entry.parent.glob(f".part.{source.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)
    console.print(f"preparing the {source.noun} of {source}, once, in {entry}")
    with tempfile.TemporaryDirectory(
        prefix=f".part.{source.name}.", dir=entry.parent, ignore_cleanup_errors=True
    ) as temporary:
        new = Path(temporary) / "entry"
        new.mkdir()
        facts = write(new, Path(temporary) / "scratch")
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(new.iterdir())
        }
        manifest = {"source": str(source), "noun": source.noun, "facts": facts, "files": files}
        (new / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file)  # later only sizes are compared
        if entry.exists():
            entry.rename(Path(temporary) / "old")  # arrays that are open stay readable
        new.rename(entry)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
