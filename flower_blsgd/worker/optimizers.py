"""The optimizers of the local steps, and what they keep from order to order.

The optimizer's state is called momentum, as its record is: SGD keeps nothing else.
"""

from collections.abc import Iterable, Iterator

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..array_records import view_record
from ..protocol import COUNTERS, SLOTS, state_name
from .model_io import tensor_on


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

    `LocalSGD` explains the settings. A `learning_rate` in a tensor is for steps that are captured:
    a number would be captured with them. `fused` steps take one kernel for all parameters; None
    leaves it to torch.

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

    It would make them in the first step, one by one as gradients come. A captured step needs them
    at their addresses before, and torch's fused SGD needs those of all parameters or none.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    slot: torch.zeros(
                        (), dtype=torch.float32, device=_device(optimizer, parameter, slot)
                    )
                    if slot in COUNTERS
                    else torch.zeros_like(parameter, requires_grad=False)
                    for slot in slots_of(optimizer)
                }


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return what an optimizer keeps of each parameter."""
    return SLOTS["adamw" if isinstance(optimizer, torch.optim.AdamW) else "sgd"]


# --- to and from records


def momentum_record(
    model: nn.Module, optimizer: torch.optim.Optimizer, copy: bool = True
) -> ArrayRecord:
    """Return the optimizer's state by `state_name`; empty before the first step.

    Without `copy` that of a CPU are views: the next step changes them.
    """
    tensors = {}
    for name, parameter, slot, tensor in _state(model, optimizer):
        # A counter on the CPU must not run ahead of a copy of what is on an accelerator.
        if not copy and parameter.device.type == "cpu":
            copied = tensor.detach()
        else:
            copied = tensor.detach().to(
                "cpu",
                torch.float32 if slot in COUNTERS else tensor.dtype,  # where torch's is float64
                copy=True,
                memory_format=torch.contiguous_format,  # also of a model whose channels are last
            )
        tensors[state_name(slot, name)] = copied.numpy()
    return view_record(tensors)


def load_momentum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    record: ArrayRecord | None,
    copy: bool = True,
    in_place: bool = False,
) -> None:
    """Set the optimizer's state from a record; None sets it to zero.

    A parameter of which the record has nothing, or not all, begins with zero. Without `copy` the
    optimizer takes the record's memory over, where it can: momentum that is kept in shared memory
    stays there. With `in_place` the state's tensors stay where they are, and are written to.
    """
    for name, parameter in model.named_parameters():
        names = {slot: state_name(slot, name) for slot in slots_of(optimizer)}
        known = record is not None and all(key in record for key in names.values())
        if in_place:
            for slot, tensor in optimizer.state.get(parameter, {}).items():
                if record is not None and known:
                    tensor.copy_(tensor_on(record[names[slot]].numpy()))
                else:
                    tensor.zero_()
        elif record is None or not known:
            optimizer.state.pop(parameter, None)
        else:
            copied = copy or parameter.device.type != "cpu"
            optimizer.state[parameter] = {
                slot: tensor_on(record[key].numpy()).to(
                    _device(optimizer, parameter, slot), copy=copied
                )
                for slot, key in names.items()
            }


def zero_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Zero the optimizer's state where it is: a step that failed left it half changed."""
    for _, _, _, tensor in _state(model, optimizer):
        tensor.zero_()


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, str, Tensor]]:
    """Yield name, parameter, slot and tensor of all that the optimizer keeps."""
    for name, parameter in model.named_parameters():
        kept = optimizer.state.get(parameter, {})
        for slot in slots_of(optimizer):
            tensor = kept.get(slot)
            if tensor is not None:
                yield name, parameter, slot, tensor


def _device(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str) -> torch.device:
    """Return where it keeps this: counters on the CPU unless it is fused, else by the parameter."""
    fused = any(group["fused"] for group in optimizer.param_groups)
    return torch.device("cpu") if slot in COUNTERS and not fused else parameter.device
