"""Move a model's weights and its optimizer's momentum to and from Flower records."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..array_view import view_record

_BUFFER = "momentum_buffer"


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


def momentum_record(
    model: nn.Module, optimizer: torch.optim.Optimizer, copy: bool = True
) -> ArrayRecord:
    """Return the momentum buffers by parameter name; empty before the first step.

    Without `copy` those of a CPU are views: the next step changes them.
    """
    buffers = {}
    for name, parameter in model.named_parameters():
        buffer = optimizer.state.get(parameter, {}).get(_BUFFER)
        if buffer is not None:
            buffers[name] = _copy(buffer) if copy else buffer.detach().cpu().numpy()
    return view_record(buffers)


def load_momentum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    record: ArrayRecord | None,
    copy: bool = True,
) -> None:
    """Set the momentum buffers from a record; None sets them to zero.

    Without `copy` the optimizer takes the record's memory over, where it can: momentum that is
    kept in shared memory stays there.
    """
    for name, parameter in model.named_parameters():
        if record is None or name not in record:
            optimizer.state.pop(parameter, None)
        else:
            buffer = _tensor(record[name].numpy()).to(parameter.device, copy=copy)
            optimizer.state[parameter] = {_BUFFER: buffer}


def zero_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Zero the momentum buffers where they are: a step that failed left them half changed."""
    for parameter in model.parameters():
        buffer = optimizer.state.get(parameter, {}).get(_BUFFER)
        if buffer is not None:
            buffer.zero_()


def _copy(tensor: Tensor) -> npt.NDArray[Any]:
    copied: npt.NDArray[Any] = tensor.detach().to("cpu", copy=True).numpy()
    return copied


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    # torch warns of arrays that it may not write to, and views on shared memory may be such.
    return torch.from_numpy(np.require(array, requirements="W"))
