"""Random numbers of a run: each draw is a pure function of the seed, a purpose and counters."""

import functools
import zlib

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the generator of one draw.

    Every random draw is a pure function of the seed, a purpose and a few counters. A resumed run, a
    second run and another engine draw the same numbers, and a new draw for one purpose does not
    change the draws for others.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    purpose : str
        Name of the draw, such as ``"fast-samples"``; each purpose has a separate stream.
    *counters : int
        Epoch, round or worker index, each >= 0.

    Returns
    -------
    numpy.random.Generator
        A new generator; equal arguments give equal sequences.
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, counters)))


@functools.lru_cache(maxsize=1024)
def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a seed in [0, 2**63) for a library that needs a number, such as torch."""
    state = _sequence(seed, purpose, counters).generate_state(1, np.uint64)
    return int(state[0]) & (2**63 - 1)


def _sequence(seed: int, purpose: str, counters: tuple[int, ...]) -> np.random.SeedSequence:
    # As a spawn key, because entropy is padded with zeros: (), (0,) and (0, 0) would be equal.
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))
