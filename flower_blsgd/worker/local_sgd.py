"""The steps of one order on given samples, with the loss of every sample."""

import contextlib
import time
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from ..protocol import MOMENTUM, TrainOrder, TrainReport
from .batches import Samples, batch_source
from .device_path import device_path
from .gate import gate_of
from .model_state import load_momentum, momentum_record, zero_momentum
from .model_transfer import ModelTransfer
from .optimizers import begin_state, make_optimizer, set_learning_rate
from .out_of_memory import too_large
from .precision import use_precision
from .slowdown import Slowdown
from .steps import Augment, SampleLoss
from .waiting import synchronize

__all__ = ["Augment", "LocalSGD", "SampleLoss", "cross_entropy"]


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
    precision : {"float32", "tf32", "bfloat16"} (default: "float32")
        Of matrix products and convolutions; weights and losses stay float32. On CUDA it says for
        the whole process whether float32 may be TF32.
    channels_last : bool (default: False)
        Keep images and filters with their channels next to each other: mostly faster for
        convolutions, the same results up to rounding.
    compile : bool (default: False)
        Compile the model with torch.compile. Where that fails, one line in the log says so, and
        it is trained as it is.
    cuda_graph : bool (default: True)
        On CUDA, record a step as a graph and replay it; see `GraphedSteps` for what a step must
        not do. Where it cannot be recorded, and on other devices, it is done eagerly.
    name : str (default: the device)
        How errors and the log call this worker.
    micro_batch_size : int (default: 0)
        Above 0: a step computes its batch in pieces of at most so many samples, for a device on
        which the whole does not fit. The batch is read and augmented as a whole, and model,
        losses and momentum are those of the whole, to rounding; what the model itself draws, as
        dropout does, may be other numbers.

    Raises
    ------
    UsageError
        If the device cannot compute with this precision, or the batch is to be cut though the
        model's samples depend on each other (BatchNorm).
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
        precision: str = "float32",
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = True,
        name: str = "",
        micro_batch_size: int = 0,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self._name = name or str(self.device)
        self._slowdown = Slowdown(slowdown)
        self._source = batch_source(dataset, self.device)
        self._path = device_path(
            self.model,
            self._source,
            self.device,
            precision=precision,
            channels_last=channels_last,
            compile=compile,
            cuda_graph=cuda_graph,
            name=self._name,
            micro_batch_size=micro_batch_size,
        )
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._transfer = ModelTransfer(self.model, self.device)
        self._optimizer = make_optimizer(
            optimizer,
            self.model.parameters(),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            learning_rate=self._path.learning_rate,
            fused=self._path.fused or None,
        )
        if self._path.state_stays:
            begin_state(self._optimizer)
        self._steps = self._path.steps(self.model, self._source, loss, augment, self._optimizer)

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
        UsageError
            If the device has too little memory for a step: one line with this worker, its batch,
            and what fits.
        """
        try:
            return self._run(order, state)
        except torch.OutOfMemoryError:
            pass  # only the end of this handler frees what the failed step held
        with gate_of(self.device).recording():  # memory is given back, which recording forbids
            refusal = too_large(self._steps, order.indices, order.batch_size, self._name)
        raise refusal

    def forget_momentum(self) -> None:
        """Begin with zero again, where momentum stays in this object."""
        load_momentum(self.model, self._optimizer, None, in_place=self._path.state_stays)

    def _run(self, order: TrainOrder, state: RecordDict | None) -> TrainReport:
        use_precision(self._path.precision, self.device)
        with gate_of(self.device).computing():
            self._transfer.load(order.arrays)
            self._prepare_momentum(order, state)
            set_learning_rate(self._optimizer, order.learning_rate)
        self.model.train()
        try:
            completed, losses, started_at, seconds = self._do(order)
        except BaseException:
            zero_momentum(self.model, self._optimizer)
            raise
        with gate_of(self.device).computing():
            momentum = self._hand_over_momentum(order, state)
            arrays = self._transfer.record(order.arrays)
        return TrainReport(
            completed_steps=completed,
            batch_size=order.batch_size,
            compute_seconds=seconds,
            started_at=started_at,
            ended_at=started_at + seconds,
            losses=losses,
            arrays=arrays,
            momentum=momentum,
        )

    def _prepare_momentum(self, order: TrainOrder, state: RecordDict | None) -> None:
        stays = self._path.state_stays
        if order.momentum_policy == "reset":
            self.forget_momentum()
        elif order.momentum_policy == "average":
            load_momentum(self.model, self._optimizer, order.momentum, in_place=stays)
        elif state is not None:
            kept = state.array_records.get(MOMENTUM)
            load_momentum(self.model, self._optimizer, kept, copy=False, in_place=stays)

    def _hand_over_momentum(
        self, order: TrainOrder, state: RecordDict | None
    ) -> ArrayRecord | None:
        """Put momentum where the order's policy has it, and return what the report holds of it."""
        if order.momentum_policy == "average":
            return momentum_record(self.model, self._optimizer)
        if order.momentum_policy == "keep" and state is not None:
            kept = momentum_record(self.model, self._optimizer, copy=self._path.state_stays)
            if kept:
                state[MOMENTUM] = kept
        return None

    def _do(self, order: TrainOrder) -> tuple[int, np.ndarray[Any, Any], float, float]:
        if len(order.indices) and int(order.indices.max()) >= len(self._source):
            raise IndexError(
                f"the order names sample {int(order.indices.max())}, but this worker's data set "
                f"has {len(self._source)}; all workers must see the same data"
            )
        if not self._steps.is_ready(order.batch_size):
            with gate_of(self.device).recording():
                self._steps.prepare(self._indices(order)[: order.batch_size])
        with gate_of(self.device).computing(), self._own_randomness():
            indices = self._indices(order)
            self._steps.prepare(indices[: order.batch_size])
            torch.manual_seed(order.seed)
            self._steps.seed(order.seed)
            return self._timed(indices, order)

    def _indices(self, order: TrainOrder) -> Tensor:
        indices = torch.from_numpy(order.indices.astype(np.int64))
        return indices.to(self.device) if self._source.on_device else indices

    def _own_randomness(self) -> contextlib.AbstractContextManager[None]:
        cards = [] if self.device.type == "cpu" else [self.device]
        return torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda")

    def _timed(
        self, indices: Tensor, order: TrainOrder
    ) -> tuple[int, np.ndarray[Any, Any], float, float]:
        size = order.batch_size
        losses = torch.empty(len(indices), device=self.device)
        completed = 0
        synchronize(self.device)
        started_at, start = time.time(), time.perf_counter()
        for first in range(0, len(indices), size):
            losses[first : first + size] = self._steps(indices[first : first + size])
            completed += 1
            if order.deadline_seconds > 0:
                synchronize(self.device)  # else the host would run ahead of the device
                elapsed = time.perf_counter() - start
                if self._slowdown.seconds(elapsed, completed) >= order.deadline_seconds:
                    break
        synchronize(self.device)
        self._slowdown.sleep(start, completed)
        seconds = time.perf_counter() - start
        return completed, losses[: completed * size].cpu().numpy(), started_at, seconds
