"""The steps of one order on given samples, with the loss of every sample."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from ..protocol import MOMENTUM, TrainOrder, TrainReport
from .batches import Samples, batch_source
from .model_state import (
    load_momentum,
    load_state,
    momentum_record,
    state_record,
    zero_momentum,
)
from .optimizers import make_optimizer

SampleLoss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> one loss per sample, shape (batch_size,)."""

Augment = Callable[[Any, torch.Generator], Any]
"""(inputs of a batch, generator on their device) -> inputs."""

_LONGEST_SLEEP_SECONDS = 0.5
"""A handler must notice a signal soon, so it never blocks longer in one call."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every sample, shape (batch_size,)."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class LocalSGD:
    """Runs training orders on one model and one device.

    Use it in any Flower ClientApp::

        @app.train()
        def train(message, context):
            order = TrainOrder.from_message(message)
            sgd = LocalSGD(model, dataset, device="cuda:0")
            return sgd.run(order, state=context.state).to_reply(message)

    If a step raises, so does `run`: the order fails as a whole, Flower reports it to the
    strategy, and the other workers' models are averaged without this one. Momentum is zero then.

    What is said of momentum holds for all that an optimizer keeps from step to step.

    Parameters
    ----------
    model : torch.nn.Module
        Moved to the device; every order overwrites its weights.
    dataset : tuple of tensors, TensorDataset or map-style Dataset
        All N training samples; orders name them by index.
    loss : callable (default: cross entropy)
        ``(outputs, targets) -> losses`` of shape (batch_size,): one for each sample, not their
        mean.
    device : str or torch.device (default: "cpu")
        Where to compute.
    optimizer : {"sgd", "adamw"} (default: "sgd")
        AdamW has the betas (0.9, 0.999); it pays where SGD needs warm-up and clipping, as with
        transformers, and keeps twice as much from step to step.
    momentum : float (default: 0.9)
        Of SGD; AdamW takes no notice.
    nesterov : bool (default: False)
        Of SGD: Nesterov momentum.
    weight_decay : float (default: 0.0)
        L2 penalty of SGD; decoupled from the gradient with AdamW.
    slowdown : float (default: 1.0)
        Sleep after the steps until they have taken this many times as long, >= 1. The sleep
        counts as computing; under a deadline a slower device's last step is waited for.
    augment : callable, optional
        ``(inputs, generator) -> inputs`` of a training batch, on the device, before each step.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Samples,
        loss: SampleLoss = cross_entropy,
        device: str | torch.device = "cpu",
        *,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        slowdown: float = 1.0,
        augment: Augment | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self._source = batch_source(dataset, self.device)
        self._loss = loss
        self._augment = augment
        self._generator = torch.Generator(self.device)
        self._slowdown = slowdown
        self._best_step_seconds = math.inf
        self._optimizer = make_optimizer(
            optimizer,
            self.model.parameters(),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    def run(self, order: TrainOrder, state: RecordDict | None = None) -> TrainReport:
        """Do the steps of an order.

        Parameters
        ----------
        order : TrainOrder
            The global model, the samples and the settings.
        state : RecordDict, optional
            Where momentum is kept between orders: ``context.state`` of a Flower client, which
            outlives its process. Without it momentum stays in this object.

        Returns
        -------
        TrainReport
            The trained model, the steps completed, a loss per sample, and the times.

        Raises
        ------
        ValueError
            If the model's tensors are not those of the order, or the loss has the wrong shape.
        IndexError
            If the data set has fewer samples than the order names.
        """
        load_state(self.model, order.arrays)
        self._prepare_momentum(order, state)
        for group in self._optimizer.param_groups:
            group["lr"] = order.learning_rate
        cards = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices=cards, device_type=cards[0].type if cards else "cuda"):
            torch.manual_seed(order.seed)
            self._generator.manual_seed(order.seed)
            try:
                completed, losses, started_at, seconds = self._steps(order)
            except BaseException:
                zero_momentum(self.model, self._optimizer)
                raise
        momentum = None
        if order.momentum_policy == "average":
            momentum = momentum_record(self.model, self._optimizer)
        elif order.momentum_policy == "keep" and state is not None:
            kept = momentum_record(self.model, self._optimizer, copy=False)
            if kept:
                state[MOMENTUM] = kept
        return TrainReport(
            completed_steps=completed,
            batch_size=order.batch_size,
            compute_seconds=seconds,
            started_at=started_at,
            ended_at=started_at + seconds,
            losses=losses,
            arrays=state_record(self.model),
            momentum=momentum,
        )

    def _prepare_momentum(self, order: TrainOrder, state: RecordDict | None) -> None:
        if order.momentum_policy == "reset":
            load_momentum(self.model, self._optimizer, None)
        elif order.momentum_policy == "average":
            load_momentum(self.model, self._optimizer, order.momentum)
        elif state is not None:
            kept = state.array_records.get(MOMENTUM)
            load_momentum(self.model, self._optimizer, kept, copy=False)

    def _steps(self, order: TrainOrder) -> tuple[int, np.ndarray[Any, Any], float, float]:
        self.model.train()
        size = order.batch_size
        indices = torch.from_numpy(order.indices.astype(np.int64)).to(self.device)
        if len(indices) and int(order.indices.max()) >= len(self._source):
            raise IndexError(
                f"the order names sample {int(order.indices.max())}, but this worker's data set "
                f"has {len(self._source)}; all workers must see the same data"
            )
        losses = torch.empty(len(indices), device=self.device)
        completed = 0
        self._synchronize()
        started_at, start = time.time(), time.perf_counter()
        for first in range(0, len(indices), size):
            losses[first : first + size] = self._step(indices[first : first + size])
            completed += 1
            if order.deadline_seconds > 0:
                self._synchronize()  # else the host would run ahead of the device
                if self._slowed(start, completed) >= order.deadline_seconds:
                    break
        self._synchronize()
        self._slow_down(start, completed)
        seconds = time.perf_counter() - start
        return completed, losses[: completed * size].cpu().numpy(), started_at, seconds

    def _slowed(self, start: float, steps: int) -> float:
        """Return how long these steps take on a device that is `slowdown` times slower.

        The step time is the best mean of all orders so far: a core that just slept computes its
        first steps more slowly, and that would count `slowdown` times.
        """
        elapsed = time.perf_counter() - start
        if self._slowdown == 1:
            return elapsed
        self._best_step_seconds = min(self._best_step_seconds, elapsed / steps)
        return max(elapsed, steps * self._best_step_seconds * self._slowdown)

    def _slow_down(self, start: float, steps: int) -> None:
        """Sleep until a slower device would have done these steps."""
        until = self._slowed(start, steps)
        while (left := start + until - time.perf_counter()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP_SECONDS))

    def _step(self, indices: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        inputs, targets = self._source.batch(indices)
        if self._augment is not None:
            inputs = self._augment(inputs, self._generator)
        losses = self._loss(self.model(inputs), targets)
        if losses.shape != indices.shape:
            raise ValueError(
                f"the loss must return one value per sample, shape ({len(indices)},), not "
                f'{tuple(losses.shape)}; a torch loss does with reduction="none"'
            )
        losses.mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return losses.detach()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
