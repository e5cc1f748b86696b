"""The optimizers of the local steps, by name."""

from collections.abc import Iterable

import torch
from torch import nn

from ..protocol import SLOTS


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return an optimizer; every order brings its learning rate.

    Parameters
    ----------
    name : {"sgd", "adamw"}
        Which one.
    parameters : iterable of torch.nn.Parameter
        What it moves.
    momentum : float
        Of SGD.
    nesterov : bool
        Of SGD.
    weight_decay : float
        L2 penalty of SGD; of AdamW decoupled from the gradient (Loshchilov and Hutter 2019).

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if name == "sgd":
        return torch.optim.SGD(
            parameters, lr=1.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.999), weight_decay=weight_decay)
    raise ValueError(f"optimizer = {name!r} must be one of {', '.join(map(repr, SLOTS))}")


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return what an optimizer keeps of each parameter."""
    return SLOTS["adamw" if isinstance(optimizer, torch.optim.AdamW) else "sgd"]
