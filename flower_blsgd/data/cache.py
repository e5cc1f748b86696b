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
    OtherFormatError,
    Prepared,
    UnusableError,
    open_entry,
    read_meta,
    source_of_another_format,
)
from .preparation import Preparation, forget_progress, scratch_folder
from .preparation_view import preparation_told
from .seal import seal_entry, sync

_log = logging.getLogger(__name__)


def prepared(preparation: Preparation, again: bool = False) -> Prepared:
    """Return the arrays of a preparation, preparing them if that was not done yet.

    Files of a folder that changed count as another source: they are prepared anew, and what was
    made of them before is named in the log and stays, since others may use it. A preparation that
    was interrupted goes on where it stopped.

    Parameters
    ----------
    preparation : Preparation
        What to prepare.
    again : bool (default: False)
        Prepare it even if that was done, from the beginning.

    Raises
    ------
    UsageError
        If there are no such data, or the cache cannot be read or written.
    """
    source, cache = preparation.source, cache_folder()
    if source.folder is not None and cache.resolve().is_relative_to(source.folder):
        raise UsageError(
            f"{source.said}: the cache {cache} lies inside it; set BLSGD_CACHE to another folder"
        )
    first = cache / _name(preparation)
    if not again:
        with contextlib.suppress(UnusableError, OtherFormatError):
            return open_entry(_own_place(first))
    key = first.name.removeprefix(f"{preparation.name}-")
    part = cache / f".part.{preparation.name}.{key}"
    try:
        with _locked(cache, preparation):
            entry = _own_place(first)  # another process was faster, of this version or another
            if not again:
                try:
                    return open_entry(entry)
                except UnusableError as error:
                    if str(error):
                        _log.warning("%s is damaged (%s); preparing it again", entry, error)
            _tell_of_other_formats(preparation, entry)
            _remove_leftovers(preparation, part, again)
            _prepare(preparation, part, entry)
            _tell_of_older(preparation, entry)
            return open_entry(entry)
    except (OSError, NotImplementedError) as error:  # the latter: a disk without locks
        reason = getattr(error, "strerror", None) or error
        kept = "" if again or not part.is_dir() else "; the next start goes on with what is done"
        raise UsageError(
            f"the cache {cache} cannot be written ({reason}); make room, or set "
            f"BLSGD_CACHE to another folder{kept}"
        ) from None


def cache_folder() -> Path:
    """Return ``$BLSGD_CACHE``, else ``flower-blsgd`` where caches are kept.

    Raises
    ------
    UsageError
        If there is no such home.
    """
    own = os.environ.get("BLSGD_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(own) if own else Path(caches) / "flower-blsgd"
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        why = str(error).rstrip(".")
        raise UsageError(
            f"the cache {folder} has no place ({why}); set BLSGD_CACHE to another folder"
        ) from None


def _name(preparation: Preparation) -> str:
    """Return what the entry of a preparation is called."""
    options = json.dumps(dict(preparation.options), sort_keys=True)
    told = f"{FORMAT} {options} {preparation.source.state()}"
    digest = hashlib.sha256(told.encode(errors="surrogateescape"))  # as names of files are
    return f"{preparation.name}-{digest.hexdigest()[:16]}"


def _own_place(entry: Path) -> Path:
    """Return where an entry belongs; what another version left there keeps its place."""
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
        _place(preparation, part, entry)
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


def _tell_of_older(preparation: Preparation, entry: Path) -> None:
    """Name what was made of other states of the files: another machine may see them so."""
    ours, older = read_meta(entry), []
    for other in sorted(entry.parent.glob(f"{preparation.name}-*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            meta = read_meta(other)
            if (meta["source"], meta["options"]) == (ours["source"], ours["options"]):
                older.append(str(other))
    if others := [each for each in older if each != str(entry)]:
        _log.warning(
            "%s has changed; what was made of it before may be removed when no run uses it: %s",
            preparation.source,
            ", ".join(others),
        )


def _place(preparation: Preparation, part: Path, entry: Path) -> None:
    """Give a whole folder its name; what has the name loses it only to that."""
    old = None
    if os.path.lexists(entry):
        old = entry.rename(entry.with_name(f".part.{preparation.name}.{uuid.uuid4().hex}"))
    try:
        part.rename(entry)
    except BaseException:
        if old is not None:
            old.rename(entry)
        raise
    sync(entry.parent)
    if old is not None:
        _remove(old)


def _remove_leftovers(preparation: Preparation, part: Path, again: bool) -> None:
    """Remove what others left; only under the lock is nobody writing them."""
    for other in part.parent.glob(f".part.{preparation.name}.*"):
        if again or other != part or not part.is_dir() or part.is_symlink():
            _remove(other)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        _log.warning("%s is left over and cannot be removed (%s)", path, error.strerror or error)
