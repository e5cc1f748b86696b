"""Try a task on two samples, so that a mistake in it is told before a run starts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..errors import UsageError
from ..worker.batches import IndexedSamples, Samples, num_samples, tensor_parts
from ..worker.micro_batches import check_micro_batches
from .task import Task

_LONGEST_REASON = 200


def check_task(task: Task, name: str = "", micro_batch_size: int = 0) -> None:
    """Run model, loss, metric and augmentation once on two training samples, on the CPU.

    Torch's generator is as before afterwards.

    Parameters
    ----------
    task : Task
        The task.
    name : str (default: "")
        What the user calls it.
    micro_batch_size : int (default: 0)
        The most samples of a piece of a batch; 0: it stays whole.

    Raises
    ------
    UsageError
        If one of the task's functions raises, or returns something of the wrong shape, or the
        model does not allow pieces. What a function itself raises as such comes out as it is.
    """
    title = _title(name)
    tried = partial(_tried, title)
    inputs, targets = tried("reading train", _two_samples, task.train)
    with torch.no_grad():
        model = tried("model()", task.fresh_model, 0)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{title}: model() returned {_what(model)}, expected a torch.nn.Module"
            )
        check_micro_batches(model, micro_batch_size)
        model = model.cpu().eval()
        if task.augment is not None:
            augmented = tried(
                "augment(inputs, generator)", task.augment, inputs.clone(), _generator()
            )
            if not isinstance(augmented, Tensor) or augmented.shape[:1] != inputs.shape[:1]:
                raise UsageError(
                    f"{title}: augment(inputs, generator) returned {_what(augmented)}, expected a "
                    f"tensor of the whole batch, like the inputs' shape {tuple(inputs.shape)}"
                )
            tried("model(augment(inputs, generator))", model, augmented)
        outputs = tried("model(inputs)", model, inputs)
        losses = tried("loss(outputs, targets)", task.loss, outputs, targets)
        _check_per_sample(f"{title}: loss", losses, 'a torch loss does with reduction="none"')
        values = tried("metric(outputs, targets)", task.metric, outputs, targets)
        _check_per_sample(f"{title}: metric", values, "return it before taking the mean")


def checked_initial_model(task: Task, name: str, seed: int) -> nn.Module:
    """Return `Task.initial_model`.

    Parameters
    ----------
    task : Task
        The task.
    name : str
        What the user calls it.
    seed : int
        What the weights are a function of.

    Raises
    ------
    UsageError
        If pretrained weights cannot be had, or the task's function for them raises.
    """
    call = "model()" if task.pretrained is None else "pretrained(model)"
    model: nn.Module = _tried(_title(name), call, task.initial_model, seed)
    return model


def _title(name: str) -> str:
    return f"task = {name!r}" if name else "task"


def _tried(title: str, call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UsageError:  # it is one line for the user already
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise UsageError(f"{title}: {call} raised {type(error).__name__}: {reason}") from error


def _two_samples(samples: Samples) -> tuple[Any, Any]:
    """Return a batch of the first two samples; of a single sample twice that one."""
    indices = [0, min(1, num_samples(samples) - 1)]
    if isinstance(samples, IndexedSamples):
        indices, samples = [int(samples.indices[i]) for i in indices], samples.samples
    parts = tensor_parts(samples)
    if parts is None:
        parts = default_collate([samples[i] for i in indices])
        inputs, targets = parts
        return inputs, targets
    return parts[0][indices], parts[1][indices]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _check_per_sample(function: str, values: Any, hint: str) -> None:
    if not isinstance(values, Tensor) or values.shape != (2,):
        raise UsageError(
            f"{function}(outputs, targets) returned {_what(values)} for 2 samples, expected shape "
            f"(2,): one value per sample; {hint}"
        )


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
