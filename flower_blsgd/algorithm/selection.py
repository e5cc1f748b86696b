"""Choose which samples an epoch has; a sampler then deals these, and no others, to the workers.

A selection goes with every sampler but `UnifiedSampler`, and with every step policy. To add one,
subclass `Selection`; a built-in one is a row of ``SELECTIONS`` in ``catalog.py``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .sampling import FloatArray, IntArray, LossTable, generator


@dataclass(frozen=True)
class SelectionRequest:
    """The epoch that samples are selected for.

    Parameters
    ----------
    seed : int
        The run's seed.
    epoch : int
        Counted from 1.
    budget_share : float
        Share of the budget that is used when the epoch begins, in [0, 1].
    """

    seed: int
    epoch: int
    budget_share: float


@dataclass(frozen=True)
class Selected:
    """The samples of one epoch.

    Parameters
    ----------
    indices : numpy.ndarray
        int32 of shape (M,) with 1 <= M <= N, ascending, each once.
    weights : numpy.ndarray, optional
        float32 of shape (N,), >= 0: factor of each sample's loss in the mean of its batch; None
        where all are 1.
    """

    indices: IntArray
    weights: FloatArray | None = None


class Selection(Protocol):
    """Chooses the samples that an epoch has. Subclass it and write `select`."""

    uses_losses: bool = True
    """Whether its choice depends on the recorded losses."""

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples, a pure function of the arguments; None for all of them."""
        ...


@dataclass(frozen=True)
class InfoBatch(Selection):
    """Half of the samples with a loss below the mean are left out, the other half weighs twice.

    So the expected sum of gradients is that of all samples. At the end of the budget all are
    trained on, with weight 1 (Qin et al., ICLR 2024, arXiv 2303.04947; its numbers are the
    defaults).

    Parameters
    ----------
    prune_ratio : float (default: 0.5)
        r: share of the samples below the mean that is left out, drawn anew in each epoch, in
        [0, 1). The others weigh 1 / (1 - r).
    full_from : float (default: 0.875)
        From this share of the budget on nothing is left out.
    """

    prune_ratio: float = 0.5
    full_from: float = 0.875

    def __post_init__(self) -> None:
        if not 0 <= self.prune_ratio < 1:
            raise ValueError(f"prune_ratio = {self.prune_ratio} must lie in [0, 1)")

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples; None at the end, and where no loss is below the mean."""
        losses = table.ranking_losses()
        seen = losses[np.isfinite(losses)]
        if request.budget_share >= self.full_from or not len(seen):
            return None
        low = np.flatnonzero(losses < seen.mean(dtype=np.float64))
        rng = generator(request.seed, "infobatch", request.epoch)
        out = rng.choice(low, int(self.prune_ratio * len(low) + 0.5), replace=False, shuffle=False)
        if not len(out):
            return None
        weights = np.ones(len(losses), np.float32)
        weights[low] = 1 / (1 - self.prune_ratio)
        return Selected(_all_but(out, len(losses)), weights)


@dataclass(frozen=True)
class RandomSubset(Selection):
    """Each epoch has a random subset of the samples: what a selection by loss has to beat.

    Okanovic et al., ICLR 2024, arXiv 2305.18424 (RS2).

    Parameters
    ----------
    share : float (default: 0.7)
        Of all samples, in (0, 1]; about what InfoBatch leaves.
    """

    uses_losses = False

    share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must lie in (0, 1]")

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples."""
        rng = generator(request.seed, "random-subset", request.epoch)
        count = max(1, int(self.share * len(table) + 0.5))
        chosen = rng.choice(len(table), count, replace=False, shuffle=False)
        return Selected(np.sort(chosen).astype(np.int32))


def _all_but(left_out: npt.NDArray[np.integer[Any]], num_samples: int) -> IntArray:
    kept = np.ones(num_samples, np.bool_)
    kept[left_out] = False
    return np.flatnonzero(kept).astype(np.int32)


def permuted(recorded: LossTable, seed: int, epoch: int) -> LossTable:
    """Return a table with the recorded losses exchanged at random among their samples.

    This control has the same draws as the recorded table, but they follow no sample's own loss.

    Parameters
    ----------
    recorded : LossTable
        Stays as it is. Samples that were never seen keep their rank above every number.
    seed, epoch : int
        As in `SelectionRequest`.
    """
    table = LossTable(len(recorded))
    table.losses, table.rounds = recorded.ranking_losses().copy(), recorded.rounds
    finite = np.flatnonzero(np.isfinite(table.losses))
    rng = generator(seed, "loss-ranking", epoch)
    table.losses[finite] = table.losses[rng.permutation(finite)]
    return table
