"""The last recorded training loss of every sample."""

import numpy as np
import numpy.typing as npt

from .block_draws import blocks, share_out
from .order_statistics import values_at

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

UNSEEN = np.float32(np.inf)
"""What a sample without a recorded loss counts as: it ranks above every number."""


class LossTable:
    """Last loss of each of N samples, and the round that produced it.

    The losses are those of the training forward pass (train mode, before the step), so they
    cost nothing; a sample that is not drawn keeps its old one.

    Parameters
    ----------
    num_samples : int
        N, >= 1.

    Attributes
    ----------
    losses : numpy.ndarray
        float32 of shape (N,); infinity for a sample that was never seen.
    rounds : numpy.ndarray
        int32 of shape (N,); the round of the record, 0 for a sample that was never seen.
    """

    def __init__(self, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples = {num_samples} must be at least 1")
        self.losses: FloatArray = np.full(num_samples, UNSEEN, np.float32)
        self.rounds: IntArray = np.zeros(num_samples, np.int32)

    def __len__(self) -> int:
        return len(self.losses)

    def record(self, indices: IntArray, losses: FloatArray, server_round: int) -> None:
        """Write one worker's losses of one round.

        Call it in descending worker order: where two workers had the same sample, the lowest
        worker index is written last and wins. Where one worker had it twice, its later loss
        wins. Losses that are not finite are left out.
        """
        finite = np.isfinite(losses)
        indices, losses = indices[finite], losses[finite]
        self.losses[indices] = losses
        self.rounds[indices] = server_round

    def mean_age_rounds(self, server_round: int) -> float:
        """Return the mean age, in rounds, of the losses that are recorded; nan without any."""
        num_seen = int(np.count_nonzero(self.rounds))
        if not num_seen:
            return float("nan")
        return server_round - int(self.rounds.sum(dtype=np.int64)) / num_seen


def highest_losses(
    losses: FloatArray, count: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Mark the `count` highest losses; ties are broken at random.

    The cost is linear in N; the mask is all the memory that grows with N.

    Parameters
    ----------
    losses : numpy.ndarray
        float32 of shape (N,), no nan; infinity ranks highest.
    count : int
        How many to mark, in [0, N].
    rng : numpy.random.Generator
        Breaks the ties.

    Returns
    -------
    numpy.ndarray
        bool of shape (N,) with exactly `count` True.
    """
    num_samples = len(losses)
    if not 0 <= count <= num_samples:
        raise ValueError(f"count = {count} must lie in [0, {num_samples}]")
    if count == 0:
        return np.zeros(num_samples, np.bool_)
    (threshold,) = values_at(losses, [num_samples - count])
    marked: npt.NDArray[np.bool_] = losses > threshold
    missing = count - int(np.count_nonzero(marked))
    parts = blocks(num_samples)
    tied = np.array([np.count_nonzero(losses[part] == threshold) for part in parts])
    for part, number in zip(parts, share_out(tied, missing, rng).tolist(), strict=True):
        if number:
            ties = np.flatnonzero(losses[part] == threshold)
            marked[part][rng.choice(ties, number, replace=False, shuffle=False)] = True
    return marked
