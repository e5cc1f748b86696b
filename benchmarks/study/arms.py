"""The arms of the second study, their local steps, and the shapes of its device sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FAST_CORE, SLOW_CORE = 0, 1


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Parameters
    ----------
    kind : {"loop", "ddp", "ours"}
        A PyTorch loop on the fast device alone, DistributedDataParallel with batches in
        proportion to speed, or this project.
    batch : int (default: 32)
        Samples per step of the fast device.
    settings : mapping
        Run config of `ours`, on top of ``weighted-local-sgd``.
    """

    kind: Literal["loop", "ddp", "ours"]
    batch: int = 32
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def both(self) -> bool:
        """Whether the slow device takes part."""
        return self.kind != "loop"


ARMS: Mapping[str, Arm] = {
    **{f"fast-{batch}": Arm("loop", batch) for batch in (16, 32, 48)},
    "ddp": Arm("ddp", 16),
    "load": Arm("ours", 16, {"weights": "load"}),
    "per-sample": Arm("ours", 16, {"weights": "per-sample"}),
    "separated": Arm("ours", 16, {"weights": "per-sample", "sampler": "separated"}),
    "shipped": Arm("ours", settings={"algorithm": "recommended"}),
}
"""``shipped`` chooses its own steps."""

FAST_ALONE = ("fast-16", "fast-32", "fast-48")


@dataclass(frozen=True)
class Shape:
    """A fast and a slow device: how many times slower it is, and the local steps of both."""

    gap: float
    steps: tuple[int, int]


SHAPES: Mapping[str, Shape] = {
    "gap-2": Shape(2.0, (8, 4)),
    "gap-4": Shape(4.0, (8, 2)),
    "gap-16": Shape(16.0, (32, 2)),
}
