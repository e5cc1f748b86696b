"""Select the samples of an epoch; the sampler then distributes only these to the workers.

A selection works with every step policy, and with every sampler except `UnifiedSampler` and those
of the released code. To add one, subclass `Selection`. Built-in selections are rows of
``SELECTIONS`` in ``catalog.py``.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

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
        Used share of the budget at the start of the epoch, in [0, 1].
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
        int32 of shape (M,) with 1 <= M <= N, ascending, without repetitions.
    weights : numpy.ndarray, optional
        float32 of shape (N,), >= 0: factor of each sample's loss in the mean of its batch. None if
        all are 1.
    """

    indices: IntArray
    weights: FloatArray | None = None


class Selection(Protocol):
    """Rule that selects the samples of an epoch. Subclass it and implement `select`."""

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples, as a pure function of the arguments; None for all."""
        ...


@dataclass(frozen=True)
class InfoBatch(Selection):
    """Random pruning of half of the samples with a loss below the mean (InfoBatch).

    The other half has weight 2, so the expected sum of gradients is that of all samples. At the end
    of the budget all samples are used, with weight 1. Source: Qin et al., ICLR 2024, arXiv
    2303.04947; the defaults are theirs.

    Parameters
    ----------
    prune_ratio : float (default: 0.5)
        r: share of the samples below the mean that is pruned, in [0, 1), redrawn in each epoch. The
        others weigh 1 / (1 - r).
    full_from : float (default: 0.875)
        Share of the budget after which nothing is pruned.
    """

    prune_ratio: float = 0.5
    full_from: float = 0.875

    def __post_init__(self) -> None:
        if not 0 <= self.prune_ratio < 1:
            raise ValueError(f"prune_ratio = {self.prune_ratio} must lie in [0, 1)")

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples; None at the end, or if no sample would be pruned."""
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
        return Selected(np.delete(np.arange(len(losses), dtype=np.int32), out), weights)


@dataclass(frozen=True)
class ImportanceSampling(Selection):
    """Sampling by loss, with weights that keep the expected gradient.

    M of N samples are drawn without replacement. Sample n is drawn with probability M p_n, at most
    1, and weighs 1 / (N p_n), at most 2; p_n is proportional to its loss plus the mean loss. The
    expected gradient of a step is that of all samples, unless the sampler also chooses by loss.
    Source: the baseline of Katharopoulos and Fleuret (ICML 2018, arXiv 1803.00942). Their own score
    bounds the norm of the gradient and needs a forward pass.

    Parameters
    ----------
    share : float (default: 0.7)
        M / N, in (0, 1]. With the default, an epoch has about as many samples as with `InfoBatch`.
    """

    unbiased: ClassVar[bool] = True
    """Whether weights correct for the choice."""

    share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must lie in (0, 1]")

    def scores(self, losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores of recorded losses, >= 0: the losses, negative ones as 0."""
        return np.maximum(losses, 0)

    def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
        """Return the epoch's samples; None without records. Unseen samples have the top score."""
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
        # Systematic sampling: a sample is drawn when the running sum passes a whole number.
        passed = np.floor(np.cumsum(chances[order]).round(9) + rng.random())
        chosen = order[np.diff(passed, prepend=0.0) > 0]
        weights = (count / len(chances) / chances).astype(np.float32)
        return Selected(np.sort(chosen).astype(np.int32), weights if self.unbiased else None)


@dataclass(frozen=True)
class ActiveBias(ImportanceSampling):
    """Sampling by the uncertainty of the model, without weights.

    "Threshold closeness" of Chang, Learned-Miller and McCallum (NeurIPS 2017, arXiv 1704.07433):
    the score is p (1 - p), where p = exp(-loss) is the probability of the correct class with cross
    entropy. The paper uses the mean p of all epochs; here, p is that of the last recorded loss. The
    paper's other score, the variance of p, would need a history of losses.
    """

    unbiased = False

    def scores(self, losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return p (1 - p)."""
        chance: npt.NDArray[np.float64] = np.exp(-np.maximum(losses, 0))
        return chance * (1 - chance)


def inclusion_probabilities(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Return probabilities proportional to scores above 0, at most 1, with the sum `count`.

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
