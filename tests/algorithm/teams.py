"""Teams of workers and the hypothesis settings that the tests of the algorithm share."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from hypothesis import settings

from flower_blsgd.algorithm import block_draws
from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.algorithm.loss_table import LossTable

QUICK = settings(max_examples=40, deadline=None)


def team(num_fast: int, num_slow: int, batch_size: int = 32) -> tuple[Participant, ...]:
    """Fast workers first, as the worker index ranks them."""
    fast = (Participant(True, batch_size),) * num_fast
    return fast + (Participant(False, batch_size),) * num_slow


def table_of(losses: object) -> LossTable:
    """A loss table with these losses recorded in round 1; infinity: never seen."""
    values = np.asarray(losses, np.float32)
    table = LossTable(len(values))
    table.record(np.arange(len(values), dtype=np.int32), values, 1)
    return table


def distinct_losses(num_samples: int, seed: int = 0) -> np.ndarray:
    """A random order of the losses 0, 1, ..., N - 1, so that top-k is unique."""
    return np.random.default_rng(seed).permutation(num_samples).astype(np.float32)


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Blocks so small that a few samples are many of them."""
    with mock.patch.object(block_draws, "BLOCK_SAMPLES", size):
        yield
