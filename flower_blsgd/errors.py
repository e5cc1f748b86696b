"""Errors that the user can correct, and helpers for their one-line messages."""

import difflib
import errno
from collections.abc import Iterable


class UsageError(ValueError):
    """Invalid setting, file or argument: one line that names the key, the value and the fix.

    The command line exits with code 2.
    """


def nearest(word: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """Return a hint with the known words nearest to `word`: ``"did you mean a or b?"``.

    If none is near, it lists the known words, or those that are `listed`.
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    same_letter = [name for name in known if name[:1] == word[:1]]
    close = close or difflib.get_close_matches(word, same_letter, n=2, cutoff=0.6)
    return (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"known: {', '.join(sorted(listed) or known)}"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the host or a device ran out of memory.

    torch raises `torch.OutOfMemoryError`, a RuntimeError, on CUDA and XPU. On MPS and CPUs, and in
    CUDA outside its own allocator, it raises a plain RuntimeError.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    told = ("out of memory", "allocate memory", "_ALLOC_FAILED", "ALLOCATION_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in told)


def printable(text: str) -> str:
    r"""Return a text from another machine with control characters, such as of colors, written out.

    Ends of lines and tabs stay.

    >>> printable("a\x1b[2Jb\n")
    'a\\x1b[2Jb\n'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def pip_install(extra: str) -> str:
    """Return the command that installs one of our extras."""
    return f"in a clone of flower-blsgd: pip install -c constraints.txt -e '.[{extra}]'"
