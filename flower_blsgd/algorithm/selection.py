"""Choose which samples an epoch has; a sampler then deals these, and no others, to the workers.

A selection goes with every sampler but `UnifiedSampler`, and with every step policy. To add one,
subclass `Selection`; a built-in one is a row of ``SELECTIONS`` in ``catalog.py``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from .loss_table import FloatArray, IntArray, LossTable
from .randomness import generator


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
class ImportanceSampling(Selection):
    """Samples are drawn the more likely the higher their loss, and weigh as much less.

    So the expected gradient of a step is that of all samples, if the sampler chooses by no loss.
    This is the sampling by loss that Katharopoulos and Fleuret compare with (ICML 2018, arXiv
    1803.00942; their own score bounds the gradient's norm and needs a forward pass), here without
    replacement: of N samples M are drawn, sample n with probability M p_n, at most 1, where p_n is
    in proportion to its loss plus the mean loss. It weighs 1 / (N p_n), which is at most 2.

    Parameters
    ----------
    share : float (default: 0.7)
        M / N, in (0, 1]; the default is about what InfoBatch keeps.
    """

    unbiased: ClassVar[bool] = True
    """Whether the weights undo the choice."""

    share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must lie in (0, 1]")

    def scores(self, losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return what recorded losses are worth, >= 0: themselves, and 0 if they are below."""
        return np.maximum(losses, 0)

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples; all while no loss is recorded. Unseen have the top score."""
        losses = table.ranking_losses().astype(np.float64)
        seen = np.isfinite(losses)
        if not seen.any():
            return None
        scores = np.empty_like(losses)
        scores[seen] = self.scores(losses[seen])
        scores[~seen] = scores[seen].max()
        count = max(1, int(self.share * len(table) + 0.5))
        chances = inclusion_probabilities(scores + (scores.mean() or 1.0), count)
        rng = generator(request.seed, type(self).__name__, request.epoch)
        order = rng.permutation(len(chances))
        # Systematic sampling: each whole number that the running sum passes draws a sample.
        passed = np.floor(np.cumsum(chances[order]).round(9) + rng.random())
        chosen = order[np.diff(passed, prepend=0.0) > 0]
        weights = (count / len(chances) / chances).astype(np.float32)
        return Selected(np.sort(chosen).astype(np.int32), weights if self.unbiased else None)


@dataclass(frozen=True)
class ActiveBias(ImportanceSampling):
    """Samples are drawn the more likely the less certain the model is of them; all weigh 1.

    "Threshold closeness" of Chang, Learned-Miller and McCallum (NeurIPS 2017, arXiv 1704.07433):
    instead of the loss p (1 - p) counts, where p is the probability of the correct class, which is
    exp(-loss) of a cross entropy. Theirs is the mean p of all epochs, ours that of the last record;
    their other score, the variance of p, needs a history that is not kept.
    """

    unbiased = False

    def scores(self, losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return p (1 - p)."""
        chance: npt.NDArray[np.float64] = np.exp(-np.maximum(losses, 0))
        return chance * (1 - chance)


def inclusion_probabilities(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Return probabilities in proportion to scores above 0, at most 1, that add up to `count`.

    >>> inclusion_probabilities(np.array([6.0, 1.0, 1.0]), 2)
    array([1. , 0.5, 0.5])
    """
    certain = np.zeros(len(scores), np.bool_)
    while True:
        chances = np.ones(len(scores))
        rest = scores[~certain]
        chances[~certain] = (count - np.count_nonzero(certain)) * rest / rest.sum()
        if not (over := chances > 1).any():
            return chances
        certain |= over


def _all_but(left_out: npt.NDArray[np.integer[Any]], num_samples: int) -> IntArray:
    kept = np.ones(num_samples, np.bool_)
    kept[left_out] = False
    return np.flatnonzero(kept).astype(np.int32)
