"""Data prepared once per machine: folders of arrays that all processes map into their memory.

A cache entry is written to a folder with a temporary name and renamed when it is complete. An
interrupted preparation is therefore never used and starts again. One process prepares the data
under a lock that the kernel releases if the process dies. Others wait for it and use its result.
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
from rich.console import Console

from ..errors import UsageError, first_line
from ..files import flush_to_disk, locked
from .source import DataSource

_LOG = logging.getLogger(__name__)

_FORMAT = 6
"""Format version of an entry; entries of other versions are not read."""

_MANIFEST = "manifest.json"
_KINDS = ("inputs", "labels")

Pair = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Inputs and labels."""

Write = Callable[[Path, Path], Mapping[str, Any]]
"""``(folder, scratch) -> facts``: writes ``{train,test}_{inputs,labels}.npy`` into an empty folder.

The test part may be missing. Libraries may write to `scratch`, which is removed. The facts are
``num_classes``, ``skipped`` and, for texts, ``vocabulary``, see `Prepared`. Raises UsageError if
the data are invalid, OSError if the folder cannot be written.
"""


@dataclass(frozen=True)
class Prepared:
    """Data that are ready for training.

    The arrays are copy-on-write memory maps, whose pages all processes share. Images are uint8 of
    shape (N, 3, side, side), texts int32 of shape (N, longest text), and labels int64 of shape
    (N,). Without a test split, `train` and `test` are equal.

    `folder` is the cache entry, `noun` the kind of samples, such as ``"images"``, and `fingerprint`
    16 hex digits that depend on the content of `train`. `skipped` counts the skipped samples of
    each part. `vocabulary` is that of the tokenizer, for texts.
    """

    train: Pair
    test: Pair
    folder: Path
    noun: str
    fingerprint: str
    num_classes: int
    skipped: Mapping[str, int]
    vocabulary: int = 0

    @property
    def has_test(self) -> bool:
        """Whether the data set has a test split."""
        return "test" in self.skipped


class UnusableError(Exception):
    """Damaged cache entry."""


def prepared(
    source: DataSource, options: Mapping[str, Any], write: Write, again: bool = False
) -> Prepared:
    """Return the arrays of a data set, and prepare them if necessary, or if asked `again`.

    A folder whose files have changed is a different source; the old entry is kept, because a run
    may be using it. `options` are everything else that affects the result, serializable as JSON.
    UsageError if the data are not available, or the cache cannot be read or written.
    """
    cache = cache_folder()
    if source.folder is not None and cache.resolve().is_relative_to(source.folder):
        raise UsageError(  # every preparation would change the source
            f"{source.setting}: the cache {cache} lies inside it; set BLSGD_CACHE to another folder"
        )
    identity = f"{_FORMAT} {json.dumps(options, sort_keys=True)} {source.state()}"
    digest = hashlib.sha256(identity.encode(errors="surrogateescape"))  # like file names
    entry = cache / f"{source.name}-{digest.hexdigest()[:16]}"
    try:
        if entry.exists() and not again:
            with contextlib.suppress(UnusableError):
                return open_entry(entry)
        cache.mkdir(parents=True, exist_ok=True)
        lock = cache / f".{source.name}.lock"
        with contextlib.ExitStack() as stack:
            try:
                alone = stack.enter_context(locked(lock, wait=False))
            except BlockingIOError:
                _LOG.warning("waiting for another process that prepares %s", source.name)
                alone = stack.enter_context(locked(lock, wait=True))
            if entry.exists() and not again:
                try:
                    return open_entry(entry)  # made by another process
                except UnusableError as error:
                    _LOG.warning("%s is damaged (%s); preparing it again", entry, error)
            _prepare(entry, source, write, alone)
            return open_entry(entry)
    except OSError as error:
        raise UsageError(
            f"the cache {cache} cannot be used ({error}); free some space, or set BLSGD_CACHE to "
            "another folder"
        ) from None


def cache_folder() -> Path:
    """Return ``$BLSGD_CACHE``, else ``flower-blsgd`` in the user's cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("BLSGD_CACHE") or f"{caches}/flower-blsgd"
    return Path(os.path.expanduser(folder)).absolute()


def open_entry(entry: Path, content: bool = False) -> Prepared:
    """Open a cache entry and compare its files with the manifest, by size or by checksum.

    UnusableError if a file is missing or has changed.
    """
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        files = manifest["files"]
        for name, file in files.items():
            path = entry / name
            same = path.stat().st_size == file["bytes"]
            if not same or (content and _sha256(path) != file["sha256"]):
                raise UnusableError(f"{name}: size or checksum mismatch")
        train, test = (
            # Copy-on-write, because torch warns about read-only arrays.
            tuple(np.load(entry / f"{part}_{kind}.npy", mmap_mode="c") for kind in _KINDS)
            for part in ("train", "test" if "test_labels.npy" in files else "train")
        )
        hashes = "".join(files[f"train_{kind}.npy"]["sha256"] for kind in _KINDS)
        fingerprint = hashlib.sha256(hashes.encode()).hexdigest()[:16]
        return Prepared(train, test, entry, manifest["noun"], fingerprint, **manifest["facts"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(first_line(error)) from None
    except OSError as error:
        raise UsageError(
            f"the cache entry {entry} cannot be read ({error}) and was left unchanged; repair "
            "it, or set BLSGD_CACHE to another folder"
        ) from None


def _prepare(entry: Path, source: DataSource, write: Write, alone: bool) -> None:
    """Write an entry; if the caller is `alone`, remove what dead processes have left."""
    for leftover in entry.parent.glob(f".part.{source.name}.*") if alone else ():
        shutil.rmtree(leftover, ignore_errors=True)
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)
    console.print(f"preparing the {source.noun} of {source} (once) in {entry}")
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
            flush_to_disk(path)  # runs compare sizes only
        if entry.exists():
            entry.rename(Path(temporary) / "old")  # open arrays stay readable
        new.rename(entry)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
