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
    accumulate : int (default: 1)
        Batches per optimizer step of DDP.
    times_steps : float (default: 1.0)
        Factor of the local steps of `ours`.
    late : bool (default: False)
        Whether the other workers' part of an average is applied one round late, and a round costs
        nothing next to computing; only on the counted clock.
    own_batch : bool (default: False)
        Whether the slow device does as many steps as the fast one, with batches that are smaller by
        the gap; only on the counted clock.
    """

    kind: Literal["loop", "ddp", "ours"]
    batch: int = 32
    settings: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    times_steps: float = 1.0
    late: bool = False
    own_batch: bool = False

    @property
    def both(self) -> bool:
        """Whether the slow device takes part."""
        return self.kind != "loop"


ARMS: Mapping[str, Arm] = {
    **{f"fast-{batch}": Arm("loop", batch) for batch in (16, 32, 48)},
    "ddp": Arm("ddp", 16),
    "ddp-accumulate-4": Arm("ddp", 16, accumulate=4),
    "load": Arm("ours", 16, {"weights": "load"}),
    "per-sample": Arm("ours", 16, {"weights": "per-sample"}),
    "separated": Arm("ours", 16, {"weights": "per-sample", "sampler": "separated"}),
    "averaged-momentum": Arm("ours", 16, {"weights": "per-sample", "momentum-buffers": "average"}),
    "short-rounds": Arm("ours", 16, {"weights": "per-sample"}, times_steps=0.5),
    "long-rounds": Arm("ours", 16, {"weights": "per-sample"}, times_steps=2.0),
    "small-batches": Arm("ours", 16, {"weights": "per-sample"}, own_batch=True),
    "one-round-late": Arm("ours", 16, {"weights": "per-sample"}, late=True),
    "outer-rate": Arm(
        "ours",
        16,
        {
            "weights": "per-sample",
            "outer-optimizer": "sgd",
            "outer-learning-rate": 1.5,
            "outer-momentum": 0.0,
        },
    ),
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
