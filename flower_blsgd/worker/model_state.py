"""Move a model's weights and its optimizer's state to and from Flower records.

The state is called momentum, as its record is: SGD keeps nothing else.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..array_view import view_record
from ..flat_record import Layout, flat_like, flat_record
from ..protocol import COUNTERS, state_name
from .optimizers import slots_of, state_device


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
    sources = []
    for name, tensor in own.items():
        array = arrays[name]
        if tuple(array.shape) != tuple(tensor.shape):
            raise ValueError(
                f"tensor {name!r} has shape {tuple(array.shape)} in the global model and "
                f"{tuple(tensor.shape)} in this worker's"
            )
        sources.append(_tensor(array.numpy()))
    if own:
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), sources)


def state_record(model: nn.Module, like: ArrayRecord | None = None) -> ArrayRecord:
    """Return a copy of every tensor of the model's state dict, in one piece of memory.

    With `like` it is memory of the kind that this record lies in, see `flat_like`.
    """
    own = model.state_dict()
    layout = layout_of(own)
    record = flat_record(layout) if like is None else flat_like(like, layout)
    if own:
        with torch.no_grad():
            targets = [torch.from_numpy(array.numpy()) for array in record.values()]
            torch._foreach_copy_(targets, list(own.values()))
    return record


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a record that holds these tensors."""
    return Layout.of(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


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
                    tensor.copy_(_tensor(record[names[slot]].numpy()))
                else:
                    tensor.zero_()
        elif record is None or not known:
            optimizer.state.pop(parameter, None)
        else:
            copied = copy or parameter.device.type != "cpu"
            optimizer.state[parameter] = {
                slot: _tensor(record[key].numpy()).to(
                    state_device(optimizer, parameter, slot), copy=copied
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
    plain = torch.contiguous_format  # also of a model whose channels are last
    copied: npt.NDArray[Any] = tensor.detach().to("cpu", copy=True, memory_format=plain).numpy()
    return copied


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    # torch warns of arrays that it may not write to, and views on shared memory may be such.
    return torch.from_numpy(np.require(array, requirements="W"))
