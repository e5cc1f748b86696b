"""Move a model's weights and its optimizer's state to and from Flower records.

The state is called momentum, as its record is: SGD keeps nothing else.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..array_view import view_record
from ..protocol import COUNTERS, state_name
from .optimizers import slots_of


def load_state(model: nn.Module, arrays: ArrayRecord) -> None:
    """Overwrite every tensor of the model's state dict.

    Raises
    ------
    ValueError
        If names or shapes differ: the message names the first that does.
    """
    own = model.state_dict()
    differing = sorted(set(own) ^ set(arrays))
    if differing:
        raise ValueError(
            f"the global model and this worker's model differ: tensor {differing[0]!r} is only "
            f"in {'the worker' if differing[0] in own else 'the global model'}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            array = arrays[name]
            if tuple(array.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"tensor {name!r} has shape {tuple(array.shape)} in the global model and "
                    f"{tuple(tensor.shape)} in this worker's"
                )
            tensor.copy_(_tensor(array.numpy()))


def state_record(model: nn.Module) -> ArrayRecord:
    """Return a copy of every tensor of the model's state dict."""
    return view_record({name: _copy(tensor) for name, tensor in model.state_dict().items()})


def model_fingerprint(model: nn.Module) -> str:
    """Return a text that is equal for models whose tensors have the same names, shapes, dtypes."""
    layout = [(n, tuple(t.shape), str(t.dtype)) for n, t in sorted(model.state_dict().items())]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


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
            array = tensor.detach().numpy()
        elif slot in COUNTERS:  # float64 where that is torch's default
            array = _copy(tensor.float())
        else:
            array = _copy(tensor)
        tensors[state_name(slot, name)] = array
    return view_record(tensors)


def load_momentum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    record: ArrayRecord | None,
    copy: bool = True,
) -> None:
    """Set the optimizer's state from a record; None sets it to zero.

    A parameter of which the record has nothing, or not all, begins with zero. Without `copy` the
    optimizer takes the record's memory over, where it can: momentum that is kept in shared memory
    stays there.
    """
    for name, parameter in model.named_parameters():
        names = {slot: state_name(slot, name) for slot in slots_of(optimizer)}
        if record is None or not all(key in record for key in names.values()):
            optimizer.state.pop(parameter, None)
            continue
        copied = copy or parameter.device.type != "cpu"
        optimizer.state[parameter] = {
            slot: _tensor(record[key].numpy()).to(
                "cpu" if slot in COUNTERS else parameter.device, copy=copied
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


def _copy(tensor: Tensor) -> npt.NDArray[Any]:
    copied: npt.NDArray[Any] = tensor.detach().to("cpu", copy=True).numpy()
    return copied


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    # torch warns of arrays that it may not write to, and views on shared memory may be such.
    return torch.from_numpy(np.require(array, requirements="W"))
