"""Two ends of a channel in one process, for the tests that need no process."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from flower_blsgd.engines.local.shared_memory import Block, BufferPool, Channel, pack

SHARED_NAME = "memfd:blsgd"


class Side:
    """An end, and the pool of its process."""

    def __init__(self, end: Connection, views: bool) -> None:
        self.pool = BufferPool()
        self.channel = Channel(end)
        self.channel.views = views

    def send(self, content: object) -> None:
        self.channel.send(pack(content, self.pool))

    def receive(self) -> Any:
        assert wait([self.channel.fileno()], 5), "nothing came"
        return self.channel.receive()


@contextlib.contextmanager
def two_sides(views: bool = True) -> Iterator[tuple[Side, Side]]:
    """A sender of orders, and a receiver that gets views or copies of them."""
    here, there = (
        Side(end, v) for end, v in zip(multiprocessing.Pipe(), (True, views), strict=True)
    )
    try:
        yield here, there
    finally:
        here.channel.close()
        there.channel.close()


def bytes_of(pool: BufferPool) -> int:
    """Return the bytes of all blocks that a pool has made."""
    return sum_of(pool._blocks.values())


def sum_of(blocks: Iterable[Block]) -> int:
    """Return the bytes of blocks that other threads may add to."""
    return sum(block.size for block in list(blocks))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_sizes(pid: int | str = "self") -> list[int]:
    """Return the sizes of the shared blocks that a process has mapped, whoever made them."""
    sizes = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if SHARED_NAME in line:
            first, last = line.split()[0].split("-")
            sizes.append(int(last, 16) - int(first, 16))
    return sorted(sizes)
