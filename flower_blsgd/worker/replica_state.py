"""Weights, buffers and momentum of several models: from Flower records into one stack, and back."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..array_view import AnyArray, view_record
from ..protocol import COUNTERS, state_name
from .replica_updates import Stacked


def same_layout(model: nn.Module, arrays: ArrayRecord) -> bool:
    """Return whether a record has the names and shapes of the model's state dict."""
    own = model.state_dict()
    return set(own) == set(arrays) and all(
        tuple(arrays[name].shape) == tuple(tensor.shape) for name, tensor in own.items()
    )


def own_names(model: nn.Module) -> dict[str, str]:
    """Return, for each name in the state dict, that under which the model lists the tensor.

    They differ where a tensor has several names, as tied weights do.
    """
    listed = [*model.named_parameters(), *model.named_buffers()]
    names = {id(tensor): name for name, tensor in listed}
    return {name: names[id(t)] for name, t in model.state_dict(keep_vars=True).items()}


def stack_models(model: nn.Module, records: Sequence[ArrayRecord]) -> tuple[Stacked, Stacked]:
    """Return parameters and buffers of R models, each of shape (R, ...), on the model's devices.

    Parameters are leaves that ask for a gradient where the model's do. Buffers that are no part
    of the state dict are not stacked: all models share those of `model`.
    """
    names = own_names(model)
    stacked: Stacked = {}
    for name, tensor in model.state_dict().items():
        whole = np.stack([record[name].numpy() for record in records])
        stacked[names[name]] = torch.from_numpy(whole).to(tensor.device, tensor.dtype)
    parameters = {
        name: stacked.pop(name).requires_grad_(own.requires_grad)
        for name, own in model.named_parameters()
    }
    return parameters, stacked


def unstack_models(model: nn.Module, parameters: Stacked, buffers: Stacked) -> list[ArrayRecord]:
    """Return the state dict of each model; on a CPU views on the stack."""
    stacked = {**parameters, **buffers}
    return _unstacked({name: stacked[own] for name, own in own_names(model).items()})


def stack_momentum(
    model: nn.Module, slots: Sequence[str], records: Sequence[ArrayRecord | None]
) -> dict[str, Stacked]:
    """Return by slot what optimizers keep of each parameter, of shape (R, ...).

    A model of whose parameter a record has nothing, or not all, begins with zero; where that
    holds for every model the parameter is missing. Counters are float64, on the CPU.
    """
    kept: dict[str, Stacked] = {slot: {} for slot in slots}
    for name, parameter in model.named_parameters():
        keys = {slot: state_name(slot, name) for slot in slots}
        whole = [r if r is not None and set(keys.values()) <= set(r) else None for r in records]
        if not any(record is not None for record in whole):
            continue
        for slot, key in keys.items():
            counts = slot in COUNTERS
            zeros = np.zeros(() if counts else tuple(parameter.shape), np.float32)
            parts = [zeros if record is None else record[key].numpy() for record in whole]
            stack = torch.from_numpy(np.stack(parts))
            kept[slot][name] = (
                stack.double() if counts else stack.to(parameter.device, parameter.dtype)
            )
    return kept


def unstack_momentum(
    model: nn.Module, kept: Mapping[str, Stacked], count: int
) -> list[ArrayRecord]:
    """Return the record of each of `count` models; on a CPU views on the stack."""
    named = {
        state_name(slot, name): stacked[name].float() if slot in COUNTERS else stacked[name]
        for name, _ in model.named_parameters()
        for slot, stacked in kept.items()
        if name in stacked
    }
    return _unstacked(named) if named else [view_record({}) for _ in range(count)]


def _unstacked(stacked: Mapping[str, Tensor]) -> list[ArrayRecord]:
    wholes: dict[str, AnyArray] = {
        name: tensor.detach().cpu().numpy() for name, tensor in stacked.items()
    }
    count = len(next(iter(wholes.values())))
    # The ellipsis keeps what has no dimension an array.
    return [view_record({n: whole[r, ...] for n, whole in wholes.items()}) for r in range(count)]
