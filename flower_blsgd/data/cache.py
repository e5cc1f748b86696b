"""Data prepared once per machine, as arrays that every process maps into its memory.

A preparation writes into a folder whose name begins with ``.part.`` and renames it when it is
whole, so that what has the right name is never half of something. Of many processes one
prepares, under a lock that the kernel gives back when its owner dies; the next one goes on with
what it left.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UsageError
from .entry import (
    FORMAT,
    Prepared,
    UnusableError,
    open_entry,
    read_meta,
    seal_entry,
    source_of_another_format,
    sync,
)
from .preparation import Preparation, forget_progress, scratch_folder
from .preparation_view import preparation_told

_log = logging.getLogger(__name__)


def prepared(preparation: Preparation, again: bool = False) -> Prepared:
    """Return the arrays of a preparation, preparing them if that was not done yet.

    Files of a folder that changed count as another source: they are prepared anew, and what was
    made of them before is removed. A preparation that was interrupted goes on where it stopped.

    Parameters
    ----------
    preparation : Preparation
        What to prepare.
    again : bool (default: False)
        Prepare it even if that was done.

    Raises
    ------
    UsageError
        If there are no such data, or the cache cannot be written.
    """
    source, cache = preparation.source, cache_folder()
    if source.folder is not None and cache.resolve().is_relative_to(source.folder):
        raise UsageError(
            f"{source.said}: the cache {cache} lies inside it; set BLSGD_CACHE to another folder"
        )
    entry = _entry(cache, preparation)
    if not again:
        with contextlib.suppress(UnusableError):
            return open_entry(entry)
    try:
        with _locked(cache, preparation):
            if not again:
                try:
                    return open_entry(entry)  # another process was faster
                except UnusableError as error:
                    if str(error):
                        _log.warning("%s is damaged (%s); preparing it again", entry, error)
            _tell_of_other_formats(preparation, entry)
            key = entry.name.removeprefix(f"{preparation.name}-")
            part = entry.with_name(f".part.{preparation.name}.{key}")
            _remove_leftovers(preparation, part)
            _prepare(preparation, part, entry)
            _remove_stale(preparation, entry)
        return open_entry(entry)
    except (OSError, NotImplementedError) as error:  # the latter: a disk without locks
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the cache {cache} cannot be written ({reason}); make room, or set "
            "BLSGD_CACHE to another folder"
        ) from None


def cache_folder() -> Path:
    """Return ``$BLSGD_CACHE``, else ``flower-blsgd`` where caches are kept."""
    if own := os.environ.get("BLSGD_CACHE"):
        return Path(own).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "flower-blsgd"


def _entry(cache: Path, preparation: Preparation) -> Path:
    """Return where a preparation belongs; what another version left there keeps its place."""
    options = json.dumps(dict(preparation.options), sort_keys=True)
    told = f"{FORMAT} {options} {preparation.source.state()}"
    entry = cache / f"{preparation.name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    while source_of_another_format(entry) is not None:
        entry = entry.with_name(f"{entry.name}-format-{FORMAT}")
    return entry


@contextlib.contextmanager
def _locked(cache: Path, preparation: Preparation) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    name = preparation.name
    lock = FileLock(cache / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning(
            "waiting for another process that prepares the %s of %s", preparation.noun, name
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare(preparation: Preparation, part: Path, entry: Path) -> None:
    part.mkdir(exist_ok=True)
    try:
        with preparation_told(preparation.noun, str(preparation.source), str(entry)) as told:
            contents = preparation.write(part, told)
        shutil.rmtree(scratch_folder(part), ignore_errors=True)
        seal_entry(part, preparation, contents)
        forget_progress(part)
        _discard(preparation, entry)
        part.rename(entry)
        sync(entry.parent)
    except OSError:
        raise  # a full disk, most likely: the next one goes on, as after an interruption
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _tell_of_other_formats(preparation: Preparation, entry: Path) -> None:
    for other in sorted(entry.parent.glob(f"{preparation.name}-*")):
        source = source_of_another_format(other)
        if source is not None and (
            source == str(preparation.source) or entry.name.startswith(f"{other.name}-")
        ):
            _log.warning(
                "%s was prepared by another version of flower-blsgd and stays as it is; preparing "
                "%s anew in %s",
                other,
                preparation.source,
                entry,
            )


def _remove_stale(preparation: Preparation, entry: Path) -> None:
    ours = read_meta(entry)
    for other in entry.parent.glob(f"{preparation.name}-*"):
        if other == entry:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            meta = read_meta(other)
            if (meta["source"], meta["options"]) == (ours["source"], ours["options"]):
                _discard(preparation, other)
                _log.warning(
                    "%s has changed; removed what was made of it before, %s",
                    preparation.source,
                    other,
                )


def _discard(preparation: Preparation, entry: Path) -> None:
    """Remove an entry; it loses its name at once."""
    if os.path.lexists(entry):
        part = entry.with_name(f".part.{preparation.name}.{uuid.uuid4().hex}")
        entry.rename(part)
        _remove(part)


def _remove_leftovers(preparation: Preparation, part: Path) -> None:
    """Remove what others left; only under the lock is nobody writing them."""
    for other in part.parent.glob(f".part.{preparation.name}.*"):
        if other != part or not part.is_dir() or part.is_symlink():
            _remove(other)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
