"""Check the model and the functions of a task with two samples before it trains."""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..worker.batches import (
    BatchSource,
    Samples,
    inputs_and_targets,
    map_tensors,
    micro_batches,
    num_samples,
)
from ..worker.evaluation import EvaluateReport, named_values
from ..worker.model_io import check_model
from ..worker.optimizer import OptimizerState, custom_optimizer
from ..worker.step import Augment, augmented, check_micro_batches, takes_model
from .task import Task, call_user, refuse_lightning


def check_task(task: Task, name: str = "", micro_batch_size: int = 0) -> None:
    """Check model, loss, metric and augmentation with two samples, on the CPU.

    `name` is for messages; a `micro_batch_size` of 0 means none.
    """
    title = f"task = {name!r}" if name else "task"
    call = partial(call_user, title)
    train = call("reading train", _two_samples, task, task.train)
    test = call("reading test", _two_samples, task, task.test)
    if micro_batch_size > 0:
        for _ in micro_batches(train, 2, 1):
            pass
    with torch.no_grad():
        model = call("model()", task.fresh_model, 0)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{title}: model() returned {_what(model)}, expected a torch.nn.Module"
            )
        refuse_lightning(f"{title}: model() returned", model)
        check_micro_batches(model, micro_batch_size)
        check_model(model)
        model = model.cpu().eval()
        if task.optimizer is not None:
            optimizer = call("optimizer(model)", custom_optimizer, task.optimizer, model)
            _check_state(model, optimizer)
        if task.augment is not None:
            train = _checked_augment(title, task.augment, train)
        _check_functions(title, task, model, train, test)


def _check_functions(title: str, task: Task, model: nn.Module, train: Any, test: Any) -> None:
    """Check loss and metric on a batch of two training samples and one of two test samples."""
    call = partial(call_user, title)
    changed = "augment(inputs, generator)" if task.augment else "inputs"
    loss = {"loss": task.loss}
    both = loss if task.metric_name == "loss" else {**loss, "metric": task.metric}
    for of, given, batch, functions in (
        ("", changed, train, loss),
        (" of test", "inputs", test, both),
    ):
        outputs: Any = None
        if not all(map(takes_model, functions.values())):
            inputs, targets = inputs_and_targets(batch)
            outputs = call(f"model({given}){of}", model, inputs)
        for kind, function in functions.items():
            if takes_model(function):
                described = f"{kind}(model, batch){of}"
                values = call(described, function, model, batch)
            else:
                described = f"{kind}(outputs, targets){of}"
                values = call(described, function, outputs, targets)
            named = named_values(values, kind) if kind == "metric" else {kind: values}
            for value in named.values():
                if not isinstance(value, Tensor) or value.shape != (2,):
                    raise UsageError(
                        f"{title}: {described} returned {_what(value)} for 2 samples, expected "
                        "shape (2,): one value per sample; for a torch loss, set "
                        'reduction="none"'
                    )
    sums = {k: float(v.sum()) for k, v in named_values(values, task.metric_name).items()}
    task.figure(EvaluateReport(0, 2, [0.0], list(sums.values()), list(sums)))


def _check_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if the optimizer's state after a step of one parameter cannot be kept."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    smallest = min(parameters, key=Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    with contextlib.suppress(Exception):  # it may need all gradients
        optimizer.step()
    OptimizerState(model, optimizer).record(copy=False)


def _checked_augment(title: str, augment: Augment, batch: Any) -> Any:
    seeded, copied = torch.Generator().manual_seed(0), map_tensors(batch, Tensor.clone)
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    before = batch[0] if is_pair else batch
    is_tensor = isinstance(before, Tensor)
    described = "augment(inputs, generator)"
    described += "" if is_tensor else f" of inputs that are {_what(before)}"
    found = call_user(title, described, augmented, augment, copied, seeded)
    after = found[0] if is_pair else found
    if is_tensor and not (isinstance(after, Tensor) and after.shape[:1] == before.shape[:1]):
        raise UsageError(
            f"{title}: {described} returned {_what(after)}, expected a tensor of the whole batch, "
            f"like the inputs' shape {tuple(before.shape)}"
        )
    return found


def _two_samples(task: Task, samples: Samples) -> Any:
    """Return a batch of the first and the last sample, which may be the same one."""
    indices = torch.tensor([0, num_samples(samples) - 1])
    return BatchSource(samples, torch.device("cpu"), collate=task.collate).batch(indices)


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
