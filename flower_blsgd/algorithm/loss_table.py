"""Table of the last recorded loss of each sample."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

UNSEEN = np.float32(np.inf)
"""Loss of a sample that was never seen; it ranks above every number."""

_MOST_FAILURES = 2
"""After this many failed orders, a sample without a recorded loss gets the median loss."""


class LossTable:
    """The last recorded training loss of each of N samples, and its round.

    Losses come from the training forward pass (train mode, before the step), so they cost nothing.
    A sample that is not drawn keeps its loss.

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
    failures : numpy.ndarray
        uint8 of shape (N,); failed orders of a sample that was never seen, at most 2.
    """

    def __init__(self, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples = {num_samples} must be at least 1")
        self.losses: FloatArray = np.full(num_samples, UNSEEN, np.float32)
        self.rounds: IntArray = np.zeros(num_samples, np.int32)
        self.failures: npt.NDArray[np.uint8] = np.zeros(num_samples, np.uint8)

    def __len__(self) -> int:
        return len(self.losses)

    def record(self, indices: IntArray, losses: FloatArray, server_round: int) -> None:
        """Record one worker's losses of one round.

        Call it in descending worker order: if two workers had the same sample, the loss of the
        lower index is kept. If one worker had it twice, the later loss is kept. Losses that are not
        finite are ignored.
        """
        finite = np.isfinite(losses)
        indices, losses = indices[finite], losses[finite]
        self.losses[indices] = losses
        self.rounds[indices] = server_round

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the three arrays by name."""
        return {name: getattr(self, name).copy() for name in ("losses", "rounds", "failures")}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the arrays; ValueError if one has another shape or dtype."""
        for name, own in self.state_dict().items():
            if (state[name].shape, state[name].dtype) != (own.shape, own.dtype):
                raise ValueError(f"its loss table is not for {len(self)} samples")
            setattr(self, name, state[name].copy())

    def record_failure(self, indices: IntArray) -> None:
        """Count a failed order for those of its samples that were never seen."""
        unseen = indices[self.rounds[indices] == 0]
        self.failures[unseen] = np.minimum(self.failures[unseen] + 1, _MOST_FAILURES)

    def ranking_losses(self) -> FloatArray:
        """Return the losses that rank the samples; do not change them.

        These are the recorded losses, and infinity for samples that were never seen. If the orders
        of such a sample failed twice, the sample may be the cause; it then has the median loss, so
        that it is not first in every epoch.
        """
        failed = (self.failures == _MOST_FAILURES) & (self.rounds == 0)
        recorded = self.losses[self.rounds > 0] if failed.any() else ()
        if not len(recorded):
            return self.losses
        return np.where(failed, np.float32(np.median(recorded)), self.losses)

    def subset(self, indices: IntArray) -> "LossTable":
        """Return a copy of the table with only these samples."""
        part = LossTable(len(indices))
        part.losses, part.rounds = self.losses[indices], self.rounds[indices]
        part.failures = self.failures[indices]
        return part

    def mean_age_rounds(self, server_round: int) -> float:
        """Return the mean age of the recorded losses in rounds; nan without any."""
        num_seen = int(np.count_nonzero(self.rounds))
        if not num_seen:
            return float("nan")
        return server_round - int(self.rounds.sum(dtype=np.int64)) / num_seen
