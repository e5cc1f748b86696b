"""Training orders on one model and one device, with the loss of every sample."""

import logging
import math
import statistics
import time

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from ..errors import UsageError
from ..protocol import MOMENTUM, TrainOrder, TrainReport
from .batches import BatchSource, Samples
from .cuda_graph import GraphedSteps, Step, capture_for
from .model_io import (
    begin_state,
    check_model,
    load_momentum,
    load_state,
    momentum_is_finite,
    momentum_record,
    state_record,
    zero_momentum,
)
from .step import (
    Augment,
    SampleLoss,
    autocast,
    batch_dependent_module,
    can_fuse,
    check_micro_batches,
    check_precision,
    first_cause,
    make_optimizer,
    micro_batches,
    set_learning_rate,
    undone,
    use_precision,
)

__all__ = ["Augment", "LocalSGD", "SampleLoss", "cross_entropy"]

_LOG = logging.getLogger(__name__)

_SPIN_SECONDS, _LEAST_SHARE, _SHARED_TIMES, _SLEEP_SECONDS = 0.005, 0.8, 3, 0.1
"""Another process needs the core if a slowdown gets less than this share of it, in so many seconds,
three times in a row: then it sleeps for a while.
"""

SMALLEST_BATCH = 2
"""As of the setting, and of whoever shares it out: of one sample BatchNorm has no variance."""

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

    Momentum here means all that an optimizer keeps from step to step. If it is not finite at the
    end of an order, as after an overflow, it becomes zero and is not sent; the report says so.

    Parameters
    ----------
    model : torch.nn.Module
        Moved to the device; every order overwrites its weights.
    dataset : tuple of tensors, TensorDataset, map-style Dataset or BatchSource
        All N training samples; orders name them by index. Several that compute on one accelerator
        can share a source, and with it one copy of the samples there.
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
    clip_norm : float (default: 0.0)
        Above 0: scale the gradient of a step down to at most this norm over all parameters.
    slowdown : float (default: 1.0)
        Wait after the steps until they have taken this many times as long, >= 1; see `sleep_out`.
        The wait counts as computing; under a deadline a slower device's last step is waited for.
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
    cuda_graph : bool (default: False)
        On CUDA, capture a step as a graph and replay it; see `GraphedSteps` for what a step must
        not do. Where it cannot be captured, and on other devices, it is done eagerly. It has not
        run on hardware yet.
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
        If the device cannot compute with this precision, the model has nothing to train or tensors
        that cannot be sent, or the batch is to be cut though the model's samples depend on each
        other (BatchNorm).
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Samples | BatchSource,
        loss: SampleLoss = cross_entropy,
        device: str | torch.device = "cpu",
        *,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        slowdown: float = 1.0,
        augment: Augment | None = None,
        precision: str = "float32",
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
        name: str = "",
        micro_batch_size: int = 0,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self._name = name or str(self.device)
        self._clip_norm, self._slowdown = clip_norm, slowdown
        shared = isinstance(dataset, BatchSource)
        self._source = dataset if shared else BatchSource(dataset, self.device)
        self._loss, self._augment = loss, augment
        self._precision = check_precision(precision, self.device)
        check_micro_batches(self.model, micro_batch_size)
        check_model(self.model)
        self._micro_batch_size = micro_batch_size
        self._channels_last = channels_last
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._forward = torch.compile(self.model) if compile else self.model
        self._compiled_sizes: set[int] = set()
        self._generator = torch.Generator(self.device)
        fused = can_fuse(self.model, self.device)
        capture = None
        if cuda_graph:
            capture = capture_for(self.device, self._source.on_device, fused, self._name)
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
        self._has_zeroed = False
        self._graphs: GraphedSteps | None = None
        if capture:
            self._graphs = GraphedSteps(
                self._step, self.model, self._optimizer, capture, self._name
            )

    def run(self, order: TrainOrder, state: RecordDict | None = None) -> TrainReport:
        """Do the steps of an order.

        Parameters
        ----------
        order : TrainOrder
            The global model, the samples and the settings.
        state : RecordDict, optional
            Where momentum is kept between orders: ``context.state`` of a Flower client. On
            Flower's engines it outlives the process; on the local grid it is lost with it.
            Without `state` momentum stays in this object.

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
        raise self._too_large(order)

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
        load_state(self.model, order.arrays)
        self._prepare_momentum(order, state)
        set_learning_rate(self._optimizer, order.learning_rate)
        self.model.train()
        try:
            losses, started_at, seconds = self._do_steps(order)
            zeroed = order.momentum_policy != "reset" and self._zeroed_momentum(order.round)
            momentum = self._hand_over_momentum(order, state)
            arrays = state_record(self.model, like=order.arrays)
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
            momentum=None if zeroed else momentum,
            momentum_zeroed=int(zeroed),
        )

    def _prepare_momentum(self, order: TrainOrder, state: RecordDict | None) -> None:
        stays = self._state_stays
        if order.momentum_policy == "reset":
            self.forget_momentum()
        elif order.momentum_policy == "average" or order.momentum is not None:
            load_momentum(self.model, self._optimizer, order.momentum, in_place=stays)
        elif state is not None:
            kept = state.array_records.get(MOMENTUM)
            load_momentum(self.model, self._optimizer, kept, copy=False, in_place=stays)

    def _hand_over_momentum(
        self, order: TrainOrder, state: RecordDict | None
    ) -> ArrayRecord | None:
        """Store momentum where the order's policy says; return what of it the report holds."""
        if order.momentum_policy == "average":
            return momentum_record(self.model, self._optimizer)
        if order.momentum_policy == "keep" and state is not None:
            kept = momentum_record(self.model, self._optimizer, copy=self._state_stays)
            if kept:
                state[MOMENTUM] = kept
        return None

    def _zeroed_momentum(self, server_round: int) -> bool:
        """Zero momentum if it is not finite; return whether it was not."""
        if momentum_is_finite(self.model, self._optimizer):
            return False
        zero_momentum(self.model, self._optimizer)
        if not self._has_zeroed:
            _LOG.warning(
                "worker %s: its momentum was not finite after round %d, so it begins with zero "
                "again; summary.json counts how often. A smaller learning rate may help",
                self._name,
                server_round,
            )
        self._has_zeroed = True
        return True

    def _do_steps(self, order: TrainOrder) -> tuple[Tensor, float, float]:
        """Return the losses, when the first step started, and the seconds of all steps."""
        size, completed = order.batch_size, 0
        indices, weights = self._as_tensor(order.indices), None
        if order.sample_weights is not None:
            weights = torch.from_numpy(order.sample_weights.copy()).to(self.device)
        losses = torch.empty(len(indices), device=self.device)
        cards = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda"):
            step = self._prepared_step(indices[:size], order.seed, weights is not None)
            _synchronize(self.device)
            started_at, start = time.time(), time.perf_counter()
            for first in range(0, len(indices), size):
                batch = slice(first, first + size)
                losses[batch] = step(indices[batch], None if weights is None else weights[batch])
                completed += 1
                if order.deadline_seconds > 0:
                    _synchronize(self.device)  # else the host would run ahead of the device
                    elapsed = time.perf_counter() - start
                    if self._slowdown * elapsed >= order.deadline_seconds:
                        break
            _synchronize(self.device)
            sleep_out(start, self._slowdown)
            seconds = time.perf_counter() - start
        return losses[: completed * size], started_at, seconds

    def _as_tensor(self, indices: npt.NDArray[np.int32]) -> Tensor:
        samples = torch.from_numpy(indices.astype(np.int64))
        return samples.to(self.device) if self._source.on_device else samples

    # --- one step

    def _step(
        self,
        indices: Tensor,
        generator: torch.Generator,
        micro_batch_size: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Gather, augment, forward, loss, backward, optimizer.

        The gradient is that of the mean of the losses, each times its weight; not divided by the
        sum of the weights, which would undo what they stand for: samples that were left out.

        Returns
        -------
        torch.Tensor
            The losses before the step, without weights, shape (batch_size,).
        """
        self._optimizer.zero_grad()
        inputs, targets = self._source.batch(indices)
        if self._augment is not None:
            inputs = self._augment(inputs, generator)
        if self._channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        size = len(indices)
        most = self._micro_batch_size if micro_batch_size is None else micro_batch_size
        if 0 < most < size:
            parts, done = [], 0
            for some, their_targets in micro_batches(inputs, targets, most):
                losses = self._losses(some, their_targets, len(some))
                parts.append(losses.detach())
                if weights is not None:
                    losses = losses * weights[done : done + len(some)]
                (losses.sum() / size).backward()  # type: ignore[no-untyped-call]
                done += len(some)
                del losses  # else its graph would be kept beside that of the next micro-batch
            detached = torch.cat(parts)
        else:
            losses = self._losses(inputs, targets, size)
            detached = losses.detach()
            if weights is not None:
                losses = losses * weights
            losses.mean().backward()  # type: ignore[no-untyped-call]
        if self._clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        return detached

    def _losses(self, inputs: object, targets: Tensor, size: int) -> Tensor:
        with autocast(self._precision, self.device):
            losses = self._loss(self._forward(inputs), targets)
        if losses.shape != (size,):
            raise ValueError(
                f"the loss must return one value per sample, shape ({size},), not "
                f'{tuple(losses.shape)}; a torch loss does with reduction="none"'
            )
        return losses.float() if losses.dtype == torch.bfloat16 else losses

    def _prepared_step(self, indices: Tensor, seed: int, weighted: bool) -> Step:
        """Return the step function for batches of this size, its random generators seeded.

        It compiles and captures for this batch size, where that is wanted and not yet done; model,
        momentum and all else stay as they are. The losses that a step returns may be overwritten
        by the next one.
        """
        if self._forward is not self.model:
            self._compile_for(indices)
        captured = self._graphs.prepared(indices, seed, weighted) if self._graphs else None
        # torch.manual_seed looks for all kinds of devices, for half a millisecond.
        on_cpu = self.device.type == "cpu"
        (torch.default_generator if on_cpu else torch).manual_seed(seed)
        if captured is not None:
            return captured
        self._generator.manual_seed(seed)
        return lambda indices, weights: self._step(indices, self._generator, weights=weights)

    def _compile_for(self, indices: Tensor) -> None:
        """Compile the model for this batch size, by a step that is undone, unless it is compiled.

        It fails for many reasons (no compiler, no Triton, a model that torch does not understand),
        and the results are the same without it up to rounding: so that costs one line in the log
        and not the run.
        """
        if len(indices) in self._compiled_sizes:
            return
        self._compiled_sizes.add(len(indices))
        try:
            with undone(self.model, self._optimizer):
                self._step(indices, self._generator)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler's many; a mistake in the model shows up again
            self._forward = self.model
            _LOG.warning(
                "worker %s: compile = true did not work, it goes on without: %s",
                self._name,
                first_cause(error),
            )

    # --- too little memory

    def _too_large(self, order: TrainOrder) -> UsageError:
        """Return an error for the user, in one line: this worker, what did not fit, and what does.

        A half of what did not fit is tried, a quarter, and so on: the same batch in micro-batches,
        which gives the same result, or smaller batches where the model's samples depend on each
        other. That happens on the device, eagerly, and is undone.
        """
        size, can_cut = order.batch_size, not batch_dependent_module(self.model)
        message = f"worker {self._name}: too little memory for its batch of {size}"
        if 0 < self._micro_batch_size < size:
            size = self._micro_batch_size
            message += f" in micro-batches of {size}"
        smallest, fits = 1 if can_cut else SMALLEST_BATCH, False
        while size > smallest and not fits:
            size = max(size // 2, smallest)
            fits = self._fits(order.indices[: order.batch_size if can_cut else size], size)
        if not fits:
            way_out = "nothing smaller fits; take another device or model"
        elif can_cut:
            way_out = (
                f"micro-batches of {size} fit: set micro-batch-size = {size}, which gives the "
                "same result"
            )
        else:  # a worker's batch is not always the setting, but it grows and shrinks with it
            times = math.ceil(order.batch_size / size)
            way_out = (
                f"a batch of {size} fits: write batch={size} behind this worker, or divide "
                f"batch-size by {times} or more"
            )
        return UsageError(f"{message}; {way_out}")

    def _fits(self, indices: npt.NDArray[np.int32], micro_batch_size: int) -> bool:
        """Return whether an eager step fits into memory, once graphs and gradients are given up."""
        self._optimizer.zero_grad()
        if self._graphs:
            self._graphs.release()
        try:
            with undone(self.model, self._optimizer):
                samples = self._as_tensor(indices)
                self._step(samples, self._generator, micro_batch_size=micro_batch_size)
        except Exception:  # not only too little memory: the user still reads of that
            return False  # only the end of this handler frees what the failed step held
        return True


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
        order = TrainOrder.to_measure(steps, batch_size, num_samples, arrays, draw)
        return sgd.run(order).compute_seconds / steps

    measured(1)
    step_seconds = measured(_PROBE_STEPS)
    if step_seconds * _PROBE_STEPS < seconds:
        steps = max(1, round(seconds / _MEASUREMENTS / step_seconds))
        step_seconds = statistics.median(measured(steps) for _ in range(_MEASUREMENTS))
    sgd.forget_momentum()
    return step_seconds


def sleep_out(start: float, slowdown: float) -> None:
    """Wait until steps begun at `start` have taken `slowdown` times as long as they really took.

    That time alone counts, no estimate from other orders: their number of steps and batch size
    may be different. The core stays busy, as that of a device that is really slower: after a sleep
    its next steps took 13 to 54 % longer (ResNet8), which the slowdown multiplied. A core that
    others need is left to them.
    """
    until, times_shared = start + slowdown * (time.perf_counter() - start), 0
    while (began := time.perf_counter()) < until:
        own, spin_until = time.thread_time(), min(until, began + _SPIN_SECONDS)
        while (now := time.perf_counter()) < spin_until:
            pass
        is_shared = time.thread_time() - own < _LEAST_SHARE * (now - began)
        times_shared = times_shared + 1 if is_shared else 0
        if times_shared >= _SHARED_TIMES and now < until:
            time.sleep(min(until - now, _SLEEP_SECONDS))


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done what this thread launched there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
