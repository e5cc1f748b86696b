"""Operations on files that some file systems refuse although all bytes are safe.

CIFS, FUSE and WSL may have no modes, no locks, or no `fsync` of a folder.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNSUPPORTED = {errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}


@contextlib.contextmanager
def unless_unsupported() -> Iterator[None]:
    """Continue if the file system does not have an operation; raise other errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    with unless_unsupported():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(part: Path, path: Path) -> None:
    """Rename a complete file; copy it if the file system cannot rename."""
    with unless_unsupported():
        part.replace(path)
    if part.exists():
        shutil.copyfile(part, path)


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Lock a file until the context or the process ends; yield False without locks.

    BlockingIOError if another process has locked it, unless this shall `wait`. OSError if the file
    cannot be made.
    """
    held = False
    with path.open("ab") as file:
        with unless_unsupported():
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        yield held
