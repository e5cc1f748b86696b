"""The optimizers of the local steps, by name."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..protocol import COUNTERS, SLOTS


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    learning_rate: float | Tensor = 1.0,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer; every order brings its learning rate, see `set_learning_rate`.

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

    learning_rate : float or torch.Tensor (default: 1.0)
        A tensor for steps that are recorded: a number would be recorded with them.
    fused : bool, optional
        One kernel for all parameters; None leaves it to torch.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            fused=fused,
        )
    if name == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=learning_rate,
            betas=(0.9, 0.999),
            weight_decay=weight_decay,
            fused=fused,
        )
    raise ValueError(f"optimizer = {name!r} must be one of {', '.join(map(repr, SLOTS))}")


def can_fuse(model: nn.Module, device: torch.device) -> bool:
    """Return whether one kernel may update all parameters there.

    On a CPU it is no faster, and another rounding.
    """
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return (
        device.type == "cuda"
        and not sparse
        and all(parameter.is_floating_point() for parameter in model.parameters())
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set it for all parameters; one that is a tensor stays where it is."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Make all that the optimizer keeps of trainable parameters, as zeros.

    It would make them in the first step, one by one as gradients come. A recorded step needs them
    at their addresses before, and torch's fused SGD needs those of all parameters or none.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    slot: torch.zeros(
                        (), dtype=torch.float32, device=state_device(optimizer, parameter, slot)
                    )
                    if slot in COUNTERS
                    else torch.zeros_like(parameter, requires_grad=False)
                    for slot in slots_of(optimizer)
                }


def state_device(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str
) -> torch.device:
    """Return where the optimizer keeps this of a parameter.

    Counters are on the CPU unless it is fused, all else is beside the parameter.
    """
    fused = any(group["fused"] for group in optimizer.param_groups)
    return torch.device("cpu") if slot in COUNTERS and not fused else parameter.device


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return what an optimizer keeps of each parameter."""
    return SLOTS["adamw" if isinstance(optimizer, torch.optim.AdamW) else "sgd"]
