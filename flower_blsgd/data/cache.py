"""Images decoded once per machine, into arrays that every process maps into its memory.

A preparation writes into a folder whose name begins with ``.part.`` and renames it when it is
whole, so that what has the right name is never half of something. Of many processes one
prepares, under a lock that the kernel gives back when its owner dies.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UsageError
from .entry import FORMAT, Prepared, UnusableError, open_entry, read_meta, seal_entry, sync
from .image_columns import ImageSplit
from .image_decoding import SIZE, Decoded, decode_split
from .preparation_view import preparation_told
from .source import ImageSource, find_source

_log = logging.getLogger(__name__)


def prepared(name: str, data: str, skip_bad: bool, again: bool = False) -> Prepared:
    """Return the decoded images of a task, preparing them if that was not done yet.

    Files of a folder that changed count as another source: they are prepared anew, and what was
    made of them before is removed.

    Parameters
    ----------
    name : str
        The task, such as ``"cifar10"``.
    data : str
        A folder with images; empty for the hub.
    skip_bad : bool
        Leave images out that cannot be decoded.
    again : bool (default: False)
        Prepare them even if that was done.

    Raises
    ------
    UsageError
        If there are no such images, or the cache cannot be written.
    """
    source = find_source(name, data)
    cache = cache_folder()
    if source.folder is not None and cache.resolve().is_relative_to(source.folder):
        raise UsageError(
            f"{source.said}: the cache {cache} lies inside it; set BLSGD_CACHE to another folder"
        )
    key = hashlib.sha256(f"{FORMAT} {skip_bad} {source.state()}".encode()).hexdigest()[:16]
    entry = cache / f"{name}-{key}"
    if not again:
        with contextlib.suppress(UnusableError):
            return open_entry(entry)
    try:
        with _locked(cache, name):
            if not again:
                try:
                    return open_entry(entry)  # another process was faster
                except UnusableError as error:
                    if str(error):
                        _log.warning("%s is damaged (%s); preparing it again", entry, error)
            _remove_leftovers(cache, name)
            _prepare(source, name, skip_bad, entry)
            _remove_stale(source, name, skip_bad, entry)
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


@contextlib.contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("waiting for another process that prepares the images of %s", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare(source: ImageSource, name: str, skip_bad: bool, entry: Path) -> None:
    part = _part(entry.parent, name)
    part.mkdir()
    try:
        scratch = part / "source"
        splits = source.load(scratch)
        total = sum(len(split) for split in splits)
        title = f"preparing {total:,} images of {source}, once, in {entry}"
        with preparation_told(title, total) as on_images:
            decoded = [decode_split(split, part, skip_bad, on_images) for split in splits]
        for split, result in zip(splits, decoded, strict=True):
            _tell(split, result)
        shutil.rmtree(scratch, ignore_errors=True)
        skipped = {s.name: d.skipped for s, d in zip(splits, decoded, strict=True)}
        seal_entry(part, str(source), skip_bad, _class_names(source, splits), skipped)
        _discard(entry, name)
        part.rename(entry)
        sync(entry.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _class_names(source: ImageSource, splits: tuple[ImageSplit, ImageSplit]) -> tuple[str, ...]:
    train, test = splits
    count = 1 + max(int(split.labels.max()) for split in splits)
    names = train.class_names or tuple(str(label) for label in range(count))
    if (train.class_names and test.class_names and test.class_names != names) or count > len(names):
        raise UsageError(
            f"{source.said}: train and test have different classes; both need the same, in the "
            "same order"
        )
    return names


def _tell(split: ImageSplit, decoded: Decoded) -> None:
    if decoded.resized:
        _log.warning("resized %d images of %s to %dx%d", decoded.resized, split.name, SIZE, SIZE)
    if decoded.skipped:
        _log.warning(
            "left out %d of %d images of %s that cannot be decoded",
            decoded.skipped,
            len(split),
            split.name,
        )


def _remove_stale(source: ImageSource, name: str, skip_bad: bool, entry: Path) -> None:
    for other in entry.parent.glob(f"{name}-*"):
        if other == entry:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            meta = read_meta(other)
            if (meta["source"], meta["skip_bad"]) == (str(source), skip_bad):
                _discard(other, name)
                _log.warning(
                    "%s has changed; removed what was made of it before, %s", source, other
                )


def _part(cache: Path, name: str) -> Path:
    return cache / f".part.{name}.{uuid.uuid4().hex}"


def _discard(entry: Path, name: str) -> None:
    """Remove an entry; it loses its name at once."""
    if os.path.lexists(entry):
        part = _part(entry.parent, name)
        entry.rename(part)
        _remove(part)


def _remove_leftovers(cache: Path, name: str) -> None:
    """Remove what killed processes left; only under the lock is nobody writing them."""
    for part in cache.glob(f".part.{name}.*"):
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
