"""How much memory the processes take that this one starts: looked at all the while they run."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

INTERVAL_SECONDS = 0.25

_PROC = Path("/proc")


@dataclass
class Peak:
    """The most that was seen at once.

    Parameters
    ----------
    host_bytes : int (default: 0)
        Of all processes together; a page that several of them share counts once. 0 where the
        system does not tell (it is no Linux).
    card_bytes : int (default: 0)
        On the CUDA device on which it grew most, beyond what was taken before: with the context
        of each process, and what torch keeps for later.
    """

    host_bytes: int = 0
    card_bytes: int = 0


@contextlib.contextmanager
def memory_watched(root: int) -> Iterator[Peak]:
    """Look at the memory of a process's descendants until the block ends.

    Parameters
    ----------
    root : int
        The process id; its own memory does not count.
    """
    peak, before, over = Peak(), _taken_on_cards(), threading.Event()

    def look() -> None:
        while True:
            peak.host_bytes = max(peak.host_bytes, memory_below(root))
            grown = [now - then for now, then in zip(_taken_on_cards(), before, strict=True)]
            peak.card_bytes = max([peak.card_bytes, *grown])
            if over.wait(INTERVAL_SECONDS):
                return

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield peak
    finally:
        over.set()
        looking.join()


def memory_below(root: int) -> int:
    """Return the bytes of memory of all descendants of a process, each shared page once (PSS)."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # The name stands in brackets and may hold anything; the parent is second behind it.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, total = list(children.get(root, ())), 0
    while found:
        process = found.pop()
        total += _proportional_bytes(process)
        found += children.get(process, ())
    return total


def _proportional_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _taken_on_cards() -> list[int]:
    cards = [torch.cuda.mem_get_info(card) for card in range(torch.cuda.device_count())]
    return [total - free for free, total in cards]
