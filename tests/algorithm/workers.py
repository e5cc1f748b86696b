"""Workers, loss tables, models and figures that the tests of the algorithm share."""

from collections.abc import Mapping

import numpy as np

from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.tensor_sum import AnyArray


def workers(num_fast: int, num_slow: int, batch_size: int = 32) -> tuple[Participant, ...]:
    """Fast workers first, as the worker index ranks them."""
    fast = (Participant(True, batch_size),) * num_fast
    return fast + (Participant(False, batch_size),) * num_slow


def by_speed(batch_size: int, *speed_ratios: float | None) -> list[Participant]:
    """One worker of each speed; above 0.7 it is fast."""
    return [Participant((ratio or 1) > 0.7, batch_size, ratio) for ratio in speed_ratios]


def table_of(losses: object, rounds: object = 1) -> LossTable:
    """A loss table with these losses, recorded in these rounds; infinity: never seen."""
    table = LossTable(np.size(losses))
    table.losses[:] = losses
    table.rounds[:] = np.where(np.isfinite(table.losses), rounds, 0)
    return table


def distinct_losses(num_samples: int, seed: int = 0) -> np.ndarray:
    """A random order of the losses 0, 1, ..., N - 1, so that the highest ones are unique."""
    return np.random.default_rng(seed).permutation(num_samples).astype(np.float32)


def highest(losses: np.ndarray, count: int) -> set[int]:
    """The samples with the highest losses."""
    return set(np.argsort(-losses)[:count].tolist())


def mixed_model(seed: int, size: int = 1000) -> dict[str, AnyArray]:
    """A model of several dtypes, with an empty and a scalar tensor, out of dtype order."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.normal(size=(size, 3)).astype(np.float32),
        "double": rng.normal(size=7),
        "counter": np.array(rng.integers(100), np.int64),
        "small": rng.normal(size=(2, 5)).astype(np.float32),
        "half": rng.normal(size=11).astype(np.float16),
        "spin": (rng.normal(size=7) + 1j * rng.normal(size=7)).astype(np.complex64),
        "scalar": np.array(rng.normal(), np.float32),
        "none": np.empty((0, 3), np.float32),
        "mask": rng.integers(0, 2, 4).astype(np.bool_),
    }


def bits(model: Mapping[str, AnyArray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The dtype, shape and bytes of each tensor."""
    return {name: (str(t.dtype), t.shape, t.tobytes()) for name, t in model.items()}
