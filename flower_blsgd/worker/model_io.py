"""Conversion of model weights and optimizer state to and from Flower records.

The optimizer's state is called momentum, like its record, because SGD has no other state.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from ..errors import UsageError
from ..grids.array_records import Layout, flat_like, flat_of, flat_record, view_record
from ..protocol import COUNTERS, SLOTS, state_name

# --- weights


def check_model(model: nn.Module) -> None:
    """Raise UsageError if a model has no trainable parameters, or tensors that cannot be sent."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("model: no parameter has requires_grad = True; there is nothing to train")
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or name.rpartition(".")[2] == "_extra_state":
            reason = "comes from get_extra_state, which cannot be averaged; use a buffer instead"
        elif is_lazy(tensor):
            reason = "has no shape yet; give its layer all sizes, as in nn.Linear(64, 10)"
        elif (dtype := str(tensor.dtype).removeprefix("torch.")) not in np.sctypeDict:
            reason = f'is {dtype}, which numpy lacks; use float32 with precision = "bfloat16"'
        else:
            continue
        raise UsageError(f"model: {name!r} {reason}")


def load_state(model: nn.Module, arrays: ArrayRecord) -> None:
    """Overwrite every tensor of the model's state dict.

    A record in one buffer moves to an accelerator in one copy, where it is split into tensors.

    ValueError if names or shapes differ; the message gives the first difference.
    """
    own = model.state_dict()
    ours = {name: tuple(tensor.shape) for name, tensor in own.items()}
    theirs = {name: tuple(array.shape) for name, array in arrays.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if (there := theirs.get(name, "none")) != (here := ours.get(name, "none")):
            raise ValueError(
                f"tensor {name!r} has shape {there} in the global model, {here} in this worker's"
            )
    flat = flat_of(arrays) if copied_whole(own) else None
    if flat is None:
        sources = {name: tensor_on(array.numpy()) for name, array in arrays.items()}
    else:  # returns only when this memory, which is not page-locked, may be reused
        sources = _cut(tensor_on(flat.bytes).to(_device_of(own)), flat.layout)
    if own:
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), [sources[name] for name in own])


def state_record(model: nn.Module, like: ArrayRecord | None = None) -> ArrayRecord:
    """Return a copy of every tensor of the model's state dict, in one buffer.

    With `like`, the buffer is of the same kind as this record's, see `flat_like`. From an
    accelerator, it is filled in one copy.
    """
    own = model.state_dict()
    layout = Layout.of(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in own.items()
    )
    record = flat_record(layout) if like is None else flat_like(like, layout)
    with torch.no_grad():
        if copied_whole(own):
            flat = flat_of(record)
            assert flat is not None
            whole = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=_device_of(own))
            torch._foreach_copy_(list(_cut(whole, layout).values()), list(own.values()))
            torch.from_numpy(flat.bytes).copy_(whole)
        elif own:
            targets = [torch.from_numpy(array.numpy()) for array in record.values()]
            torch._foreach_copy_(targets, list(own.values()))
    return record


def copied_whole(state: Mapping[str, Tensor]) -> bool:
    """Return whether a model moves between host and device as one buffer."""
    return bool(state) and _device_of(state).type != "cpu"


def _device_of(state: Mapping[str, Tensor]) -> torch.device:
    return next(iter(state.values())).device


def _cut(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a layout by name, as views of a buffer."""
    return {
        name: buffer[offset : offset + dtype.itemsize * math.prod(shape)]
        .view(getattr(torch, dtype_name))
        .view(shape)
        for name, dtype_name, dtype, shape, offset in layout.places
    }


def model_fingerprint(model: nn.Module) -> str:
    """Return a string that is equal for models with the same tensor names, shapes and dtypes."""
    layout = [(n, tuple(t.shape), str(t.dtype)) for n, t in sorted(model.state_dict().items())]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


def tensor_on(array: npt.NDArray[Any]) -> Tensor:
    """Return a tensor that shares an array's memory; a copy if the array is read-only.

    torch warns about read-only arrays, such as some views of shared memory.
    """
    return torch.from_numpy(np.require(array, requirements="W"))


# --- momentum


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state of all trainable parameters, as zeros.

    Otherwise torch creates it in the first step. A captured step needs the addresses before that,
    and torch's fused SGD needs the state of all parameters or none.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    slot: torch.zeros(
                        (), dtype=torch.float32, device=_slot_device(optimizer, parameter, slot)
                    )
                    if slot in COUNTERS
                    else torch.zeros_like(parameter, requires_grad=False)
                    for slot in slots_of(optimizer)
                }


def momentum_record(
    model: nn.Module, optimizer: torch.optim.Optimizer, copy: bool = True
) -> ArrayRecord:
    """Return the optimizer's state by `state_name`; empty before the first step.

    Without `copy`, CPU tensors are views that the next step changes.
    """
    tensors = {}
    for name, parameter, slot, tensor in _state(model, optimizer):
        # A counter on the CPU must match the copy of the moments on an accelerator.
        if not copy and parameter.device.type == "cpu":
            copied = tensor.detach()
        else:
            copied = tensor.detach().to(
                "cpu",
                torch.float32 if slot in COUNTERS else tensor.dtype,  # torch may use float64
                copy=True,
                memory_format=torch.contiguous_format,  # also with channels_last
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

    A parameter whose state is missing or incomplete in the record begins with zero. Without `copy`,
    the optimizer uses the record's memory where possible. With `in_place`, the state's tensors keep
    their addresses and are overwritten.
    """
    if in_place:
        zero_momentum(model, optimizer)
    for name, parameter in model.named_parameters():
        names = {slot: state_name(slot, name) for slot in slots_of(optimizer)}
        if record is None or not all(key in record for key in names.values()):
            if not in_place:
                optimizer.state.pop(parameter, None)
            continue
        kept = {slot: tensor_on(record[key].numpy()) for slot, key in names.items()}
        if in_place:
            for slot, tensor in optimizer.state.get(parameter, {}).items():
                tensor.copy_(kept[slot])
        else:
            copied = copy or parameter.device.type != "cpu"
            optimizer.state[parameter] = {
                slot: tensor.to(_slot_device(optimizer, parameter, slot), copy=copied)
                for slot, tensor in kept.items()
            }


def zero_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set the optimizer's state to zero, in place."""
    for _, _, _, tensor in _state(model, optimizer):
        tensor.zero_()


def momentum_is_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's state is finite, with one synchronization of the device."""
    tensors = [t._values() if t.is_sparse else t for *_, t in _state(model, optimizer)]
    if not tensors or get_total_norm(tensors).isfinite():
        return True
    return all(tensor.isfinite().all() for tensor in tensors)  # only the sum of squares overflowed


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that an optimizer keeps for each parameter."""
    return SLOTS["adamw" if isinstance(optimizer, torch.optim.AdamW) else "sgd"]


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, str, Tensor]]:
    """Yield name, parameter, slot and tensor of the optimizer's whole state."""
    for name, parameter in model.named_parameters():
        kept = optimizer.state.get(parameter, {})
        for slot in slots_of(optimizer):
            tensor = kept.get(slot)
            if tensor is not None:
                yield name, parameter, slot, tensor


def _slot_device(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str
) -> torch.device:
    """Return the device of a slot: the CPU for counters unless fused, else the parameter's."""
    fused = any(group["fused"] for group in optimizer.param_groups)
    return torch.device("cpu") if slot in COUNTERS and not fused else parameter.device
