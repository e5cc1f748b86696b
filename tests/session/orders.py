"""Orders for a script that has no launcher."""

from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from flower_blsgd.protocol import TrainOrder

BATCH = 4


def order_of(
    round: int, steps: int, arrays: ArrayRecord, batch: int = BATCH, **changes: Any
) -> TrainOrder:
    """Return an order of the run's common stream of samples."""
    settings: dict[str, Any] = {
        "epoch": 1,
        "learning_rate": 0.1,
        "seed": 0,
        "deadline_seconds": 0.0,
        "momentum_policy": "keep",
        "indices": np.arange(steps * batch, dtype=np.int32),
        "stream_start": 0,
        "stream_stride": batch,
    }
    return TrainOrder(
        round=round, local_steps=steps, batch_size=batch, arrays=arrays, **(settings | changes)
    )
