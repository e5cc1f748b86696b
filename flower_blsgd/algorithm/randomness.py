"""Random numbers of a run: each draw is a pure function of the seed, a purpose and counters."""

import zlib

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the generator of one draw.

    Every random draw is a pure function of the seed, a purpose and a few counters: a resumed run, a
    second run and another engine draw the same numbers, and adding a draw for one purpose moves
    no draw for another.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    purpose : str
        What is drawn, such as ``"fast-samples"``; each purpose has a stream of its own.
    *counters : int
        Epoch, round or worker index, each >= 0.

    Returns
    -------
    numpy.random.Generator
        A fresh generator; equal arguments give an equal sequence.
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, counters)))


def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a seed in [0, 2**63) for a library that wants a number, such as torch."""
    state = _sequence(seed, purpose, counters).generate_state(1, np.uint64)
    return int(state[0]) & (2**63 - 1)


def _sequence(seed: int, purpose: str, counters: tuple[int, ...]) -> np.random.SeedSequence:
    # As a spawn key, not as entropy: entropy is padded with zeros, so that (0,) and (0, 0) and
    # () would be the same draw.
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))
