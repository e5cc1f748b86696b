"""Call the library that reads data sets: quietly, and with its errors told in a line."""

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)

_SAID_OF_A_FULL_DISK = "Not enough disk space"
"""How the library's own look at the free room begins; it has no error number."""


@contextlib.contextmanager
def quiet(datasets: Any, progress: bool) -> Iterator[None]:
    """Let the library say nothing: what is wrong is told once, by us."""
    level, bars = datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def full_disk(error: BaseException | None) -> OSError | None:
    """Return the full disk behind an error, if it is one."""
    for each in _behind(error):
        if isinstance(each, OSError) and (
            each.errno in _FULL or str(each).startswith(_SAID_OF_A_FULL_DISK)
        ):
            return each
    return None


def closed_disk(error: BaseException | None) -> OSError | None:
    """Return the file that may not be written behind an error, if there is one.

    A network that is closed has the same numbers, but names no file.
    """
    for each in _behind(error):
        if isinstance(each, OSError) and each.errno in _CLOSED and each.filename:
            return each
    return None


def odd_name(error: BaseException | None) -> str | None:
    """Return the name that is not UTF-8 behind an error, if there is one."""
    found = (each.object for each in _behind(error) if isinstance(each, UnicodeEncodeError))
    return next(found, None)


def reason(error: BaseException) -> str:
    """Return the first line of what was wrong at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
