"""Training orders on one model and one device, with the loss of every sample."""

import logging
import math
import statistics
import time

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from ..protocol import MOMENTUM, TrainOrder, TrainReport
from .batches import BatchSource, Samples, batch_source
from .cuda_graph import Capture, GraphedSteps
from .memory import too_large
from .model_io import ModelTransfer, state_record
from .optimizers import (
    begin_state,
    can_fuse,
    load_momentum,
    make_optimizer,
    momentum_record,
    set_learning_rate,
    zero_momentum,
)
from .step import (
    Augment,
    CompiledSteps,
    SampleLoss,
    Step,
    Steps,
    check_micro_batches,
    check_precision,
    use_precision,
)

__all__ = ["Augment", "LocalSGD", "SampleLoss", "cross_entropy"]

_LOG = logging.getLogger(__name__)

_LONGEST_SLEEP_SECONDS = 0.5
"""A handler must notice a signal soon, so it never blocks longer in one call."""

_PROBE_STEPS = 3
_MEASUREMENTS = 3


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
    An order that does not fit, as it names samples that are not there, is refused before anything
    changes.

    Momentum here means all that an optimizer keeps from step to step.

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
        On CUDA, capture a step as a graph and replay it; see `GraphedSteps` for what a step must
        not do. Where it cannot be captured, and on other devices, it is done eagerly.
    name : str (default: the device)
        How errors and the log call this worker.
    micro_batch_size : int (default: 0)
        Above 0: a step computes its batch in micro-batches of at most so many samples, for a
        device on which the whole does not fit. The batch is read and augmented as a whole, and
        model, losses and momentum are those of the whole, to rounding; what the model itself
        draws, as dropout does, may be other numbers.

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
        self._precision = check_precision(precision, self.device)
        check_micro_batches(self.model, micro_batch_size)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._transfer = ModelTransfer(self.model, self.device)
        fused = can_fuse(self.model, self.device)
        capture = capture_for(self.device, self._source, fused, self._name) if cuda_graph else None
        self._optimizer = make_optimizer(
            optimizer,
            self.model.parameters(),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            # A captured step reads it from a tensor.
            learning_rate=torch.tensor(1.0, device=self.device) if capture else 1.0,
            fused=fused or None,
        )
        # Whether the optimizer's state is made beforehand, and never moves.
        self._state_stays = fused or capture is not None
        if self._state_stays:
            begin_state(self._optimizer)
        step = Step(
            self.model,
            self.model,
            self._source,
            loss,
            self._optimizer,
            self.device,
            augment,
            self._precision,
            channels_last,
            micro_batch_size,
        )
        eager = CompiledSteps(step, self._name) if compile else Steps(step)
        self._steps = GraphedSteps(eager, capture, self._name) if capture else eager

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
            If the order names a sample that the data set does not have.
        UsageError
            If the device has too little memory for a step: one line with this worker, its batch,
            and what fits.
        """
        try:
            return self._run(order, state)
        except torch.OutOfMemoryError:
            pass  # only the end of this handler frees what the failed step held
        raise too_large(self._steps, order.indices, order.batch_size, self._name)

    def forget_momentum(self) -> None:
        """Begin with zero again, where momentum stays in this object."""
        load_momentum(self.model, self._optimizer, None, in_place=self._state_stays)

    def _run(self, order: TrainOrder, state: RecordDict | None) -> TrainReport:
        for index in (order.indices.min(initial=0), order.indices.max(initial=0)):
            if not 0 <= index < len(self._source):
                raise IndexError(
                    f"the order names sample {index}, but this worker's data set has "
                    f"{len(self._source)}; all workers must see the same data"
                )
        use_precision(self._precision, self.device)
        self._transfer.load(order.arrays)
        self._prepare_momentum(order, state)
        set_learning_rate(self._optimizer, order.learning_rate)
        self.model.train()
        try:
            losses, started_at, seconds = self._do_steps(order)
            momentum = self._hand_over_momentum(order, state)
            arrays = self._transfer.record(order.arrays)
        except BaseException:
            zero_momentum(self.model, self._optimizer)
            raise
        return TrainReport(
            completed_steps=len(losses) // order.batch_size,
            batch_size=order.batch_size,
            compute_seconds=seconds,
            started_at=started_at,
            ended_at=started_at + seconds,
            losses=losses.cpu().numpy(),
            arrays=arrays,
            momentum=momentum,
        )

    def _prepare_momentum(self, order: TrainOrder, state: RecordDict | None) -> None:
        stays = self._state_stays
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
            kept = momentum_record(self.model, self._optimizer, copy=self._state_stays)
            if kept:
                state[MOMENTUM] = kept
        return None

    def _do_steps(self, order: TrainOrder) -> tuple[Tensor, float, float]:
        """Return the losses, when the first step started, and the seconds of all steps."""
        size, completed = order.batch_size, 0
        indices = torch.from_numpy(order.indices.astype(np.int64))
        if self._source.on_device:
            indices = indices.to(self.device)
        losses = torch.empty(len(indices), device=self.device)
        cards = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda"):
            self._steps.prepare(indices[:size])
            torch.manual_seed(order.seed)
            self._steps.seed(order.seed)
            _synchronize(self.device)
            started_at, start = time.time(), time.perf_counter()
            for first in range(0, len(indices), size):
                losses[first : first + size] = self._steps(indices[first : first + size])
                completed += 1
                if order.deadline_seconds > 0:
                    _synchronize(self.device)  # else the host would run ahead of the device
                    elapsed = time.perf_counter() - start
                    if self._slowdown.seconds(elapsed, completed) >= order.deadline_seconds:
                        break
            _synchronize(self.device)
            self._slowdown.sleep(start, completed)
            seconds = time.perf_counter() - start
        return losses[: completed * size], started_at, seconds


def capture_for(
    device: torch.device, source: BatchSource, fused: bool, name: str
) -> Capture | None:
    """Return what captures steps on a device; None where they are done eagerly.

    One line in the log tells of a GPU whose steps cannot be captured: those of data that the host
    makes, and of models whose optimizer is not `fused` into one kernel.
    """
    if device.type != "cuda":
        return None
    if source.on_device and fused:
        return Capture(device)
    obstacle = (
        "the model has sparse gradients, or parameters that are not floating point"
        if source.on_device
        else "the host makes every batch; only a pair of tensors, as far as there is memory for "
        "it, is on the GPU"
    )
    _LOG.warning(
        "worker %s: steps are not captured as a CUDA graph: %s (cuda-graph = false says the "
        "same, without this line)",
        name,
        obstacle,
    )
    return None


def seconds_per_step(
    sgd: LocalSGD, batch_size: int, num_samples: int, seconds: float = 1.0
) -> float:
    """Return the seconds of one training step, with everything that slows it on purpose.

    One step to warm up is not counted. Then three steps say how many fit into `seconds`; if
    they alone took that long they are the measurement, else it is the median of three further
    orders that share that time.

    The orders are ordinary ones with made-up samples and a learning rate of 0, so they take
    as long as training does. Nothing that they leave reaches it: every order brings weights and
    buffers, random numbers are an order's own, and momentum is zero afterwards as before the
    first order.

    Parameters
    ----------
    sgd : LocalSGD
        What will train.
    batch_size, num_samples : int
        b_i and N.
    seconds : float (default: 1.0)
        About how long to measure.
    """
    arrays = state_record(sgd.model)
    draw = np.random.default_rng(0)

    def measured(steps: int) -> float:
        order = TrainOrder(
            round=0,
            epoch=0,
            local_steps=steps,
            batch_size=batch_size,
            learning_rate=0.0,
            seed=0,
            deadline_seconds=0.0,
            momentum_policy="reset",
            indices=draw.integers(0, num_samples, steps * batch_size, dtype=np.int32),
            arrays=arrays,
        )
        return sgd.run(order).compute_seconds / steps

    measured(1)
    step_seconds = measured(_PROBE_STEPS)
    if step_seconds * _PROBE_STEPS < seconds:
        steps = max(1, round(seconds / _MEASUREMENTS / step_seconds))
        step_seconds = statistics.median(measured(steps) for _ in range(_MEASUREMENTS))
    sgd.forget_momentum()
    return step_seconds


class Slowdown:
    """Makes the steps of a worker take a multiple of their time.

    The time of a step is the best mean of all orders so far: a core that just slept computes its
    first steps more slowly, and that would count `factor` times.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._best_step_seconds = math.inf

    def seconds(self, elapsed: float, steps: int) -> float:
        """Return how long so many steps take on the slower device, if they took `elapsed` here."""
        if self._factor == 1:
            return elapsed
        self._best_step_seconds = min(self._best_step_seconds, elapsed / steps)
        return max(elapsed, steps * self._best_step_seconds * self._factor)

    def sleep(self, start: float, steps: int) -> None:
        """Sleep until a slower device would have done these steps, begun at `start`."""
        until = self.seconds(time.perf_counter() - start, steps)
        while (left := start + until - time.perf_counter()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP_SECONDS))


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done what this thread launched there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
