"""How many files a process may have open: shared memory is files."""

import contextlib
import resource


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as the system lets us.

    Processes that are started inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
