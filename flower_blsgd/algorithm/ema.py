"""An exponential moving average of the global model over the run."""

from collections.abc import Mapping

import numpy as np

from .tensor_sum import AnyArray


class ModelEma:
    """Exponential moving average of the models of all rounds, beside the model that is trained.

    After a round in which a share s of the budget went by, with the half-life h::

        ema <- x + 2^(-s / h) (ema - x)

    It begins as the model of the first round (https://arxiv.org/abs/2502.06761). Integers and
    booleans, such as BatchNorm's counters, are those of the last model. BatchNorm's statistics are
    averaged like all floating tensors, but belong to other weights: recompute them.

    Parameters
    ----------
    half_life : float
        Share of the budget after which a model counts half, > 0.

    Attributes
    ----------
    kept : dict of str to ndarray
        The average by name, in float32 or the tensor's wider dtype; empty before the first update.
    budget_share : float
        Share of the budget that was used up at the last update.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.kept: dict[str, AnyArray] = {}
        self.budget_share = 0.0

    def update(self, model: Mapping[str, AnyArray], budget_share: float) -> None:
        """Take the model of a round, which is not kept.

        A budget that became larger meanwhile has a smaller share: then the model counts nothing.
        """
        spent = max(0.0, budget_share - self.budget_share)
        self.budget_share = budget_share
        if not self.kept:
            self.kept = {name: tensor.astype(wide(tensor)) for name, tensor in model.items()}
            return
        new_share = 1.0 - 0.5 ** (spent / self.half_life)
        for name, tensor in model.items():
            kept = self.kept[name]
            if kept.dtype.kind in "fc":
                kept += new_share * (tensor - kept)
            else:
                kept[...] = tensor

    def model(self, like: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Return a copy of the average in the dtypes of a model; that model before the first."""
        return {name: self.kept.get(name, of).astype(of.dtype) for name, of in like.items()}


def wide(tensor: AnyArray) -> "np.dtype[np.generic]":
    """Return the dtype in which a tensor is averaged."""
    dtype: np.dtype[np.generic] = tensor.dtype
    return np.result_type(dtype, np.float32) if dtype.kind in "fc" else dtype
