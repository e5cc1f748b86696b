"""What processes did on emulated cards: copies, waits, page-locked memory and kernels."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Event:
    """Something that the host or a card did.

    Attributes
    ----------
    kind : str
        "copy to card", "copy to host", "copy on card", "copy between cards", "wait", "pin",
        "kernel", or "race": the host changed memory that a card still read.
    what : str
        The operator or call: "copy_", "item", "synchronize", "aten::addmm".
    num_bytes : int
        Of a copy, or of what was page-locked.
    device : int
        Index of the card.
    pinned : bool
        Whether a copy uses page-locked memory.
    blocking : bool
        Whether the host waits for the card.
    where : str
        The innermost function of the product that caused it, such as "model_io.load_state";
        "elsewhere" without one, as in the threads of the backward pass.
    """

    kind: str
    what: str
    num_bytes: int
    device: int
    pinned: bool
    blocking: bool
    where: str
    line: int = field(default=0, compare=False)


@contextlib.contextmanager
def recorded() -> Iterator[list[Event]]:
    """Return a list to which the events of this process are appended, in their order.

    The test is skipped where cards are not emulated.
    """
    emulation = sys.modules.get("emulated_cuda")
    if emulation is None:
        pytest.skip("only an emulated card records what happens on it")
    events: list[Event] = []
    with emulation.subscribed(lambda report: events.append(Event(*report))):
        yield events


@dataclass(frozen=True)
class ProcessLog:
    """What a process has done by its end, or a second before it was killed.

    `peak_bytes` has the largest memory in use by the card's number in the machine, which
    CUDA_VISIBLE_DEVICES does not change; these are the `device` of the events, too. `counts` has
    the number of equal events, except kernels; their `num_bytes` is the sum.
    """

    arguments: list[str]
    peak_bytes: dict[int, int]
    counts: dict[Event, int]


def process_logs(folder: Path) -> list[ProcessLog]:
    """Read what processes with ``emulated(log=folder)`` wrote; only those that used a card did."""
    logs = []
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text())
        counts = {
            Event(kind, what, num_bytes, card, pinned, blocking, where): count
            for kind, what, card, pinned, blocking, where, num_bytes, count in found["rows"]
        }
        peaks = {int(card): peak for card, peak in found["peak_bytes"].items()}
        logs.append(ProcessLog(found["arguments"], peaks, counts))
    return logs
