"""A list of pieces of work, done by a few threads."""

import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Piece = TypeVar("Piece")

_MOST_THREADS = 8
"""A few cores saturate the memory that these pieces are about."""

_ONE_THREAD_BYTES = 1 << 25
"""Below this, a millisecond or two, other threads save little, and cost much on a busy machine."""


def num_threads() -> int:
    """Return how many threads to use: the cores of this process, or less if torch was told so."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # Asked only where it is loaded: importing it takes seconds.
    told: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return max(1, min(cores, _MOST_THREADS, told() if told else cores))


def threads_for(num_bytes: int) -> int:
    """Return how many threads are worth it where so many bytes are read and written."""
    return num_threads() if num_bytes >= _ONE_THREAD_BYTES else 1


def share(pieces: Iterable[Piece], work: Callable[[Iterator[Piece]], object], threads: int) -> None:
    """Have every piece taken once, and return when all are done.

    The caller works too, and does everything that no other thread gets to. Pieces should release
    Python's lock for most of their time, and must not depend on one another.

    Parameters
    ----------
    pieces : iterable
        In the order in which they are begun.
    work : callable
        Called once in each thread, with the pieces that fall to it. What it raises ends the work
        of all, and is raised here.
    threads : int
        How many, counting the caller's.
    """
    waiting = deque(pieces)

    def work_on() -> None:
        try:
            work(_taken(waiting))
        except BaseException:
            waiting.clear()
            raise

    helpers = []
    for _ in range(min(threads, _MOST_THREADS, len(waiting)) - 1):
        try:
            helpers.append(_pool(os.getpid()).submit(work_on))
        except RuntimeError:  # no more threads here, or the interpreter ends
            break
    try:
        work_on()
    finally:
        for helper in helpers:
            # One that did not begin has nothing left to do; all others may still be writing.
            if not helper.cancel():
                helper.result()


def _taken(waiting: deque[Piece]) -> Iterator[Piece]:
    while True:
        try:
            piece = waiting.popleft()
        except IndexError:
            return
        yield piece


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's threads; those of a parent do not exist in its fork."""
    return ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix=f"average-{process}")
