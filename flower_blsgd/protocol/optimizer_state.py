"""What the optimizers keep from step to step, and the names that it has in a record."""

from collections.abc import Mapping

SLOTS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
}
"""What each optimizer keeps of a parameter, as torch names it in ``optimizer.state``."""

COUNTERS = frozenset({"step"})
"""Slots that are one float32, on the CPU; all others have the parameter's shape and dtype."""


def state_name(slot: str, parameter: str) -> str:
    """Return the name in a record.

    Examples
    --------
    >>> state_name("momentum_buffer", "layer.weight")
    'layer.weight'
    >>> state_name("exp_avg", "layer.weight")
    'exp_avg/layer.weight'
    """
    return parameter if slot == "momentum_buffer" else f"{slot}/{parameter}"


def state_copies(optimizer: str, momentum: float) -> int:
    """Return how many tensors of its own size an optimizer keeps of each parameter.

    Parameters
    ----------
    optimizer : {"sgd", "adamw"}
        Its name.
    momentum : float
        Of SGD, which keeps nothing without it.
    """
    if optimizer == "sgd" and momentum == 0:
        return 0
    return len(set(SLOTS[optimizer]) - COUNTERS)
