"""Several orders at once, on copies of one model: one batched step instead of a step of each."""

import contextlib
import copy
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..errors import UsageError
from ..protocol import MOMENTUM, TrainOrder, TrainReport
from .batches import Samples, batch_source
from .gate import gate_of
from .local_sgd import Augment, SampleLoss, cross_entropy
from .micro_batches import added, check_micro_batches, in_pieces, pieces_of
from .precision import check_precision, use_precision
from .replica_state import (
    same_layout,
    stack_models,
    stack_momentum,
    unstack_models,
    unstack_momentum,
)
from .replica_updates import Stacked, StackedOptimizer
from .waiting import synchronize

Work = tuple[TrainOrder, RecordDict | None]
"""An order, and the state of its worker."""


class CannotBatchError(Exception):
    """A model, a loss or a data set that cannot be computed for several workers at once."""


class ReplicaSGD:
    """Runs the orders of several workers as one: the models are stacked and step together.

    Each worker gets what `LocalSGD` would give it, to rounding: its own weights, momentum,
    statistics of BatchNorm and losses. Augmentation draws exactly what it draws there. What the
    model itself draws, as dropout does, is other numbers than there, a pure function of the
    orders' seeds: it differs between workers, and repeats if the same orders come together.

    It pays where one worker's step leaves a device mostly idle: a small model, small batches. The
    memory is that of all workers' steps at once; where it is too short, that too is refused.

    The models share what is no part of the state dict. A model, a loss or a data set that
    `torch.func.vmap` cannot take is refused with `CannotBatchError` at its first step, before
    anything was changed: those that read a value out of a tensor, for example, or inputs that are
    no tensors.

    Parameters
    ----------
    model : torch.nn.Module
        Copied to the device; its weights do not matter.
    dataset, loss, device, optimizer, momentum, nesterov, weight_decay, augment
        As of `LocalSGD`.
    precision : {"float32", "tf32"} (default: "float32")
        Likewise.
    micro_batch_size : int (default: 0)
        Likewise: the most samples of each worker that are computed at once.

    Raises
    ------
    UsageError
        If the precision is ``"bfloat16"``, or the model does not allow pieces.
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
        augment: Augment | None = None,
        precision: str = "float32",
        micro_batch_size: int = 0,
    ) -> None:
        self.device = torch.device(device)
        if precision == "bfloat16":
            raise UsageError(
                'replicas = "batched" does not go with precision = "bfloat16": autocast does not '
                'see through vmap, so losses and norms would be rounded too; use "tf32"'
            )
        self._precision = check_precision(precision, self.device)
        check_micro_batches(model, micro_batch_size)
        self._micro_batch_size = micro_batch_size
        self._model = copy.deepcopy(model).to(self.device).train()
        self._source = batch_source(dataset, self.device)
        self._loss = loss
        self._augment = augment
        self._optimizer = StackedOptimizer(
            optimizer, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )
        self._losses = vmap(self._losses_of_one, randomness="different")
        self._worked = False

    def fits(self, order: TrainOrder, state: RecordDict | None) -> bool:
        """Return whether an order can be computed with others of its steps and batch size.

        One with a deadline cannot, nor one whose momentum would have to stay in an object, nor
        one that is wrong: `LocalSGD` says what is wrong with it.
        """
        return (
            order.deadline_seconds == 0
            and (state is not None or order.momentum_policy != "keep")
            and len(order.indices) > 0
            and int(order.indices.min()) >= 0
            and int(order.indices.max()) < len(self._source)
            and same_layout(self._model, order.arrays)
        )

    def run(self, works: Sequence[Work]) -> list[TrainReport]:
        """Do the steps of several orders that fit and have equal steps and batch sizes.

        Parameters
        ----------
        works : sequence of (TrainOrder, RecordDict or None)
            At least one; learning rates, momentum policies and seeds may differ. Momentum is kept
            in each worker's state.

        Returns
        -------
        list of TrainReport
            One for each order. All have the same times: those of computing all of them.

        Raises
        ------
        CannotBatchError
            If the first orders of all cannot be computed this way, or memory is too short for it.
        Exception
            Whatever a step raises later: all orders fail. The states are as before, in any case.
        """
        orders = [order for order, _ in works]
        use_precision(self._precision, self.device)
        refusal = ""
        try:
            with gate_of(self.device).computing(), self._randomness(orders):
                parameters, buffers, kept, losses, started_at, seconds = self._steps(works)
        except Exception as error:
            if self._worked and not isinstance(error, torch.OutOfMemoryError):
                raise
            refusal = _in_one_line(error)
        if refusal:  # only now: an error that came of the first would keep the step's memory
            raise CannotBatchError(refusal)
        self._worked = True
        with gate_of(self.device).computing():
            models = unstack_models(self._model, parameters, buffers)
            momenta = unstack_momentum(self._model, kept, len(works))
            rows = losses.cpu().numpy()
        return [
            TrainReport(
                completed_steps=order.local_steps,
                batch_size=order.batch_size,
                compute_seconds=seconds,
                started_at=started_at,
                ended_at=started_at + seconds,
                losses=row,
                arrays=model,
                momentum=_hand_over(momentum, order, state),
            )
            for (order, state), row, model, momentum in zip(
                works, rows, models, momenta, strict=True
            )
        ]

    def _steps(
        self, works: Sequence[Work]
    ) -> tuple[Stacked, Stacked, dict[str, Stacked], Tensor, float, float]:
        orders = [order for order, _ in works]
        parameters, buffers = stack_models(self._model, [order.arrays for order in orders])
        kept = stack_momentum(
            self._model, self._optimizer.slots, [_momentum_before(*work) for work in works]
        )
        rates = np.array([order.learning_rate for order in orders], np.float64)
        generators = [
            torch.Generator(self.device).manual_seed(order.seed)
            for order in orders
            if self._augment is not None
        ]
        indices = torch.from_numpy(np.stack([o.indices for o in orders]).astype(np.int64))
        if self._source.on_device:
            indices = indices.to(self.device)
        losses = torch.empty(indices.shape, device=self.device)
        size = orders[0].batch_size
        synchronize(self.device)
        started_at, start = time.time(), time.perf_counter()
        for first in range(0, indices.shape[1], size):
            batch = indices[:, first : first + size]
            step_losses, buffers = self._step(batch, parameters, buffers, kept, rates, generators)
            losses[:, first : first + size] = step_losses
        synchronize(self.device)
        return parameters, buffers, kept, losses, started_at, time.perf_counter() - start

    def _step(
        self,
        indices: Tensor,
        parameters: Stacked,
        buffers: Stacked,
        kept: dict[str, Stacked],
        rates: np.ndarray[Any, np.dtype[np.float64]],
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, Stacked]:
        inputs, targets = self._batch(indices, generators)
        names = [name for name, tensor in parameters.items() if tensor.requires_grad]
        trained = [parameters[name] for name in names]
        size = indices.shape[1]
        # The models do not depend on one another, so the gradient of the sum is that of each.
        if in_pieces(size, self._micro_batch_size):
            gradients: Sequence[Tensor | None] = [None] * len(trained)
            parts = []
            for piece, wanted in pieces_of(inputs, targets, self._micro_batch_size, dim=1):
                losses, buffers = self._losses(parameters, buffers, piece, wanted)
                share = torch.autograd.grad(losses.sum() / size, trained, allow_unused=True)
                gradients = added(gradients, share)
                buffers = {name: buffer.detach() for name, buffer in buffers.items()}
                parts.append(losses.detach())
                del losses
            detached = torch.cat(parts, dim=1)
        else:
            losses, buffers = self._losses(parameters, buffers, inputs, targets)
            mean = losses.mean(dim=1).sum()
            gradients = torch.autograd.grad(mean, trained, allow_unused=True)
            buffers = {name: buffer.detach() for name, buffer in buffers.items()}
            detached = losses.detach()
        self._optimizer.step(parameters, dict(zip(names, gradients, strict=True)), kept, rates)
        return detached, buffers

    def _batch(
        self, indices: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of shape (R, batch_size, ...)."""
        inputs, targets = self._source.batch(indices.flatten())
        if not isinstance(inputs, Tensor):
            raise TypeError(f"the inputs are {type(inputs).__name__}, not one tensor")
        inputs = inputs.view(*indices.shape, *inputs.shape[1:])
        if self._augment is not None:
            augmented = [self._augment(*part) for part in zip(inputs, generators, strict=True)]
            inputs = torch.stack(augmented)
        return inputs, targets.view(*indices.shape, *targets.shape[1:])

    def _losses_of_one(
        self, parameters: Stacked, buffers: Stacked, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Stacked]:
        """Return the losses of one model's batch, and its buffers afterwards."""
        tensors = {**parameters, **buffers}
        losses = self._loss(functional_call(self._model, tensors, (inputs,)), targets)
        if losses.shape != inputs.shape[:1]:
            raise ValueError(
                f"the loss must return one value per sample, shape ({len(inputs)},), not "
                f"{tuple(losses.shape)}"
            )
        # A buffer that the model replaced is in the dictionary now.
        return losses, {name: tensors[name] for name in buffers}

    @contextlib.contextmanager
    def _randomness(self, orders: Sequence[TrainOrder]) -> Iterator[None]:
        cards = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices=cards, device_type=cards[0].type if cards else "cuda"):
            torch.manual_seed(_common_seed(orders))
            yield


def _momentum_before(order: TrainOrder, state: RecordDict | None) -> ArrayRecord | None:
    if order.momentum_policy == "keep" and state is not None:
        return state.array_records.get(MOMENTUM)
    return order.momentum if order.momentum_policy == "average" else None


def _hand_over(
    momentum: ArrayRecord, order: TrainOrder, state: RecordDict | None
) -> ArrayRecord | None:
    """Put momentum where the order's policy has it, and return what the report holds of it."""
    if order.momentum_policy == "keep" and state is not None and momentum:
        state[MOMENTUM] = momentum
    return momentum if order.momentum_policy == "average" else None


def _common_seed(orders: Sequence[TrainOrder]) -> int:
    seeds = repr([order.seed for order in orders]).encode()
    return int.from_bytes(hashlib.sha256(seeds).digest()[:7])


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
