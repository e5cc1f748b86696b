"""Files that are written whole or not at all, locks, and output streams that may end early.

CIFS, FUSE and WSL may have no modes, no locks, or no `fsync` of a folder. The reader of the output
may end before a run, whose lines are in ``run.log``.
"""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename it when everything is written.

    The file is whole or unchanged, even after a kill, and two processes may write it concurrently.
    """
    part = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
        flush_to_disk(part)  # else a power failure may leave an empty file of this name


@contextlib.contextmanager
def temporary_path(folder: Path) -> Iterator[Path]:
    """Yield a path to write and then rename; only one process may do so in a folder at a time.

    It is in its own folder: a process that is killed within safetensors also leaves a
    temporary file of the library. What such a process left is removed first.
    """
    own_folder = folder / ".part"
    shutil.rmtree(own_folder, ignore_errors=True)
    own_folder.mkdir(exist_ok=True)
    try:
        yield own_folder / "tensors"
    finally:
        shutil.rmtree(own_folder, ignore_errors=True)


def append(path: Path, text: str) -> None:
    """Append a text, whole or not at all; OSError if it cannot be written."""
    data = text.encode(errors="backslashreplace")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)  # faster than `open`
    try:
        before = os.lseek(file, 0, os.SEEK_END)
        if os.write(file, data) < len(data):  # the disk became full in the middle
            os.ftruncate(file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


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


lost_output: list[OSError] = []
"""Why a standard stream was lost first, after `outlast_readers`; empty if none was."""


class _Outlasting(io.FileIO):
    """Standard stream that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes; return how many were written or dropped."""
        try:
            return super().write(data)
        except OSError as error:
            if not lost_output:
                lost_output.append(error)
            return len(data)


def outlast_readers() -> None:
    """Let this process survive the loss of its output, and encodings that lack a character."""
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        text = getattr(sys, name)
        if isinstance(text, io.TextIOWrapper) and text is getattr(sys, f"__{name}__"):
            raw = _Outlasting(text.fileno(), "wb", closefd=False)
            buffer: Any = raw if text.write_through else io.BufferedWriter(raw)
            flags = text.line_buffering, text.write_through
            setattr(sys, name, io.TextIOWrapper(buffer, text.encoding, errors, None, *flags))
