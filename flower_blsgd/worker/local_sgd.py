"""Execution of training orders on one model and one device, with the loss of every sample."""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, RecordDict
from rich import filesize
from torch import Tensor, nn

from ..errors import UsageError, is_out_of_memory
from ..flower.array_records import view_record
from ..protocol import GRAD_SCALER, ProtocolError, TrainOrder, TrainReport
from .batches import BatchSource, Collate, Samples, free_bytes_on
from .local_step import LocalStep
from .losses import cross_entropy
from .model_io import FrozenTensors, SentTensors, check_model, sent_tensors
from .optimizer import (
    MakeOptimizer,
    OptimizerState,
    can_fuse,
    custom_optimizer,
    make_optimizer,
    set_learning_rate,
)
from .overlap import FirstStep
from .step import (
    Augment,
    SampleLoss,
    batch_dependent_module,
    check_micro_batches,
    check_precision,
    fork_rng,
    use_precision,
)
from .timing import StepClock

__all__ = ["Augment", "LocalSGD", "SampleLoss", "cross_entropy"]

SMALLEST_BATCH = 2
"""Smallest batch size: BatchNorm has no variance of one sample."""

_LOG = logging.getLogger(__name__)

_STEPS = "local steps"


class LocalSGD:
    """Executor of training orders on one model and one device.

    Use it in any Flower ClientApp::

        @app.train()
        def train(message, context):
            order = TrainOrder.from_message(message)
            sgd = LocalSGD(model, dataset, device="cuda:0")
            return sgd.run(order, state=context.state).to_reply(message)

    If a step raises an exception, `run` raises it too. The whole order fails, Flower reports this
    to the strategy, and the models of the other workers are averaged. The next order then starts
    with zero momentum. An invalid order, for example with unknown sample indices, is rejected
    before anything changes.

    Momentum here means the whole state that an optimizer keeps between steps. If it is not finite
    at the end of an order, for example after an overflow, it is set to zero and not sent. The
    report records this.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is moved to the device; every order overwrites its weights.
    dataset : tuple of tensors, TensorDataset, map-style Dataset or BatchSource
        All N training samples; orders contain indices into them. Several `LocalSGD` on one
        accelerator can share a `BatchSource` and its copy of the samples.
    loss : callable (default: cross entropy)
        ``(outputs, targets) -> losses`` of shape (batch_size,): one loss per sample, not the mean.
        Or ``(model, batch) -> losses`` for batches of any structure: the first parameter must be
        called ``model``.
    device : str or torch.device (default: "cpu")
        Device to compute on.
    optimizer : {"sgd", "adamw"} or callable (default: "sgd")
        Optimizer of the local steps. AdamW has the betas (0.9, 0.999) and twice the state of SGD. A
        function ``(model) -> torch.optim.Optimizer`` sets parameter groups and learning rates; the
        settings of SGD and AdamW are then ignored. Its state must consist of tensors.
    momentum : float (default: 0.9)
        Momentum of SGD; ignored by AdamW.
    nesterov : bool (default: False)
        Nesterov momentum of SGD.
    weight_decay : float (default: 0.0)
        L2 penalty of SGD; decoupled weight decay of AdamW.
    clip_norm : float (default: 0.0)
        Largest norm of a step's gradient over all parameters; 0: no clipping.
    slowdown : float (default: 1.0)
        Factor >= 1 by which to emulate a slower device; see `throttle`. The wait counts as
        computing. With a deadline, it includes the whole last step, as on a slower device.
    augment : callable, optional
        ``(inputs, generator) -> inputs`` for a training batch, on the device, before each step; if
        the batch is not a pair, ``(batch, generator) -> batch``.
    precision : {"float32", "ieee", "tf32", "bfloat16", "float16"} (default: "float32")
        Precision of matrix products and convolutions; weights and losses stay float32. On CUDA,
        ``"tf32"`` allows TF32 for the whole process, ``"ieee"`` forbids it, and the others leave
        torch's flags alone. With float16, the loss is scaled as in torch's GradScaler. A step whose
        gradients overflow is skipped, counted, and repeated with a smaller scale.
    channels_last : bool (default: False)
        Use the channels-last memory format: usually faster for convolutions, same results up to
        rounding.
    compile : bool (default: False)
        Use torch.compile, on CUDA with its CUDA graphs unless there are micro-batches. If it fails,
        one line is logged and the model runs eagerly. It has not been run on a GPU yet.
    name : str (default: the device)
        Name of this worker in errors and log lines.
    micro_batch_size : int (default: 0)
        Largest number of samples per forward pass, for a device without enough memory for a whole
        batch; 0: the whole batch. The batch is read and augmented as a whole. Model, losses and
        momentum equal those of the whole batch up to rounding, but the model's own random numbers
        (dropout) may differ.
    peak_learning_rate : float (default: 1.0)
        Peak of the run's schedule, for an `optimizer` that is a function: its learning rates are
        used at this peak and scaled in proportion at other learning rates.
    collate, loader_workers
        Arguments of the `BatchSource` that is made from `dataset`.

    Raises
    ------
    UsageError
        If the device does not support the precision, the model has no trainable parameters or has
        tensors that cannot be sent, or micro-batches are used with a model whose samples depend on
        each other (BatchNorm).
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Samples | BatchSource,
        loss: SampleLoss = cross_entropy,
        device: str | torch.device = "cpu",
        *,
        optimizer: str | MakeOptimizer = "sgd",
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        slowdown: float = 1.0,
        augment: Augment | None = None,
        precision: str = "float32",
        channels_last: bool = False,
        compile: bool = False,
        name: str = "",
        micro_batch_size: int = 0,
        peak_learning_rate: float = 1.0,
        collate: Collate | None = None,
        loader_workers: int = 0,
    ) -> None:
        check_micro_batches(model, micro_batch_size)
        check_model(model)
        self.device = torch.device(device)
        self.model = model.to(self.device)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
        self._name = name or str(self.device)
        self._slowdown = slowdown
        self._phase = ""
        self._source = (
            dataset
            if isinstance(dataset, BatchSource)
            else BatchSource(dataset, self.device, collate=collate, loader_workers=loader_workers)
        )
        self._peak_learning_rate = peak_learning_rate if callable(optimizer) else 1.0
        fused = False
        if callable(optimizer):
            own = custom_optimizer(optimizer, self.model)
        else:
            fused = can_fuse(self.model, self.device)
            own = make_optimizer(
                optimizer,
                self.model.parameters(),
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                fused=fused or None,
            )
        self._step = LocalStep(
            self.model,
            own,
            loss,
            self.device,
            augment=augment,
            precision=check_precision(precision, self.device),
            clip_norm=clip_norm,
            micro_batch_size=micro_batch_size,
            channels_last=channels_last,
            compile=compile,
            name=self._name,
        )
        self._state = OptimizerState(self.model, own, fused, self._step.scaler)
        self._sent = SentTensors(self.model)
        self._frozen = FrozenTensors(self.model)
        self._kept_round = -1
        self._first: FirstStep | None = None
        self._next: TrainOrder | None = None
        self.forget_momentum()  # a fused optimizer begins with zeros

    def run(self, order: TrainOrder, state: RecordDict | None = None) -> TrainReport:
        """Run the steps of an order.

        Parameters
        ----------
        order : TrainOrder
            The global model, the samples and the settings.
        state : RecordDict, optional
            Storage for momentum between orders: ``context.state`` of a Flower client. On Flower's
            engines it survives the process; on the local grid it does not. Without `state`,
            momentum stays in this object.

        Returns
        -------
        TrainReport
            The trained model, the number of completed steps, one loss per sample, and the times.

        Raises
        ------
        ValueError
            If the tensors of the model and the order differ, or the loss has the wrong shape.
        IndexError
            If the order names a sample index that the data set does not have.
        UsageError
            If the steps change a tensor that is not sent, or a shape, or the optimizer's state
            cannot be kept. If the device has too little memory: one line with the worker and what
            it was doing. For a step, it also has the batch size, and a size that fits.
        """
        self._phase = ""
        try:
            return self._run(order, state)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The memory of the failed step is freed when this handler ends.
        raise self._too_large(order) if self._phase == _STEPS else self._no_room()

    def work_ahead(self, state: RecordDict | None = None) -> None:
        """Do the first step of the next round, if the last order has `next_indices`.

        Call it with the `state` of `run`, after the reply was sent. Otherwise the next order does
        this step, with the same result. After an error, it begins from the global model.
        """
        order, self._next = self._next, None
        if order is None:
            return
        try:
            self._first = self._do_first_step(order, state)
        except Exception as error:
            _LOG.warning("worker %s: first step of round %d: %s", self._name, order.round, error)

    def own_model(self) -> ArrayRecord:
        """Return this worker's own model after the last order; empty if it has none."""
        return self._sent.record() if self._kept_round > 0 else ArrayRecord()

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return len(self._source)

    def forget_momentum(self) -> None:
        """Set the momentum in this object to zero."""
        self._state.load(None)

    def _run(self, order: TrainOrder, state: RecordDict | None) -> TrainReport:
        for index in (order.indices.min(initial=0), order.indices.max(initial=0)):
            if not 0 <= index < self.num_samples:
                raise IndexError(
                    f"the order names sample {index}, but this worker's data set has "
                    f"{self.num_samples}; all workers must see the same data"
                )
        use_precision(self._step.precision, self.device)
        first = self._first_step(order, state)
        done = 0 if first is None else 1
        self._phase = "loading the global model"
        indices = self._as_tensor(order.indices[done * order.batch_size :])
        # Processes of a DataLoader read the first batches while the model is loaded.
        batches = self._source.batches(indices, order.batch_size, order.seed + done)
        with contextlib.closing(batches):
            return self._train(order, state, batches, first)

    def _first_step(self, order: TrainOrder, state: RecordDict | None) -> FirstStep | None:
        """Return the first step on the worker's own model, which is done now if it was not before.

        None if all steps begin from the global model.
        """
        first, self._first, self._next = self._first, None, None
        if not order.overlap:
            if first is not None:  # the last round failed, so the step began with its result
                self._state.zero()
            return None
        if first is not None and first.round == order.round:
            return first
        if order.own_model is not None:
            self._sent.load(order.own_model)
        elif self._kept_round != order.round - 1:
            return None
        self._frozen.begin(order.arrays)
        size, weights = order.batch_size, order.sample_weights
        weights = None if weights is None else weights[:size]
        rate = order.last_learning_rate
        only = _one_step(order, order.indices[:size], weights, learning_rate=rate)
        return self._do_first_step(only, state)

    def _do_first_step(self, order: TrainOrder, state: RecordDict | None) -> FirstStep:
        """Do the only step of an order on the worker's own model."""
        self._kept_round = -1
        first = FirstStep(self.model, order.round)
        self._phase = "loading the optimizer's state"
        self._state.begin(order.momentum_policy, order.momentum, state)
        self.model.train()
        self._step.skipped = 0
        self._phase = _STEPS
        indices = self._as_tensor(order.indices)
        batches = self._source.batches(indices, order.batch_size, order.seed)
        try:
            with contextlib.closing(batches):
                first.losses, (seconds, _, _) = self._do_steps(order, batches)
        except BaseException:
            self._state.zero()
            raise
        first.end(seconds)
        return first

    def _train(
        self,
        order: TrainOrder,
        state: RecordDict | None,
        batches: Iterator[Any],
        first: FirstStep | None,
    ) -> TrainReport:
        self._begin(order, state, first)
        if not all(module.training for module in self._sent.modules):
            self.model.train()
        if first is None:
            self._step.skipped = 0
        self._phase = _STEPS
        try:
            losses, times = self._do_steps(order, batches, first)
            self._phase = "sending the model"
            arrays, momentum, is_zeroed = self._end(order, state)
            self._kept_round = order.round
        except BaseException:
            self._state.zero()
            raise
        if order.next_indices is not None:
            changes = {"round": order.round + 1, "seed": order.next_seed, "momentum": None}
            self._next = _one_step(order, order.next_indices, order.next_weights, **changes)
        return TrainReport(
            len(losses) // order.batch_size,
            order.batch_size,
            *times,
            losses=losses.cpu().numpy(),
            arrays=arrays,
            momentum=momentum,
            momentum_zeroed=int(is_zeroed),
            skipped_steps=self._step.skipped,
            samples=int(not order.local_steps),
            learning_rate=order.learning_rate,
        )

    def _begin(self, order: TrainOrder, state: RecordDict | None, first: FirstStep | None) -> None:
        """Load what the order brings: a model, or an averaged gradient for the model kept here."""
        kept, self._kept_round = self._kept_round, -1
        if first is not None:
            self._sent.load(order.arrays)
            first.add()
        elif order.brings == "model":
            self._sent.load(order.arrays)
            self._frozen.begin(order.arrays)
            self._phase = "loading the optimizer's state"
            self._state.begin(order.momentum_policy, order.momentum, state)
        elif kept != order.round - 1:
            raise ProtocolError(f"this worker has not kept the model before round {order.round}")
        else:
            self._sent.load_gradients(order.arrays)

    def _end(
        self, order: TrainOrder, state: RecordDict | None
    ) -> tuple[ArrayRecord, ArrayRecord | None, bool]:
        """Return what the order asks for, and `OptimizerState.end`."""
        if order.returns == "gradient":
            return self._sent.gradients(like=order.arrays), None, False
        self._frozen.check(order.round)
        for group in self._step.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # the copies need their memory
        momentum, is_zeroed = self._state.end(order.momentum_policy, state)
        if momentum is not None and self._step.scaler is not None and order.brings != "model":
            scale = {GRAD_SCALER: self._step.scaler.state}
            momentum[GRAD_SCALER] = view_record(scale)[GRAD_SCALER]
        return self._sent.record(like=order.arrays), momentum, is_zeroed

    def _do_steps(
        self, order: TrainOrder, batches: Iterator[Any], first: FirstStep | None = None
    ) -> tuple[Tensor, tuple[float, float, float]]:
        """Return the losses, and the times of `StepClock.end`; `first` is a step that is done."""
        size, completed = order.batch_size, 0
        weights = None
        if order.sample_weights is not None:
            weights = torch.from_numpy(order.sample_weights.copy()).to(self.device)
        losses = torch.empty(len(order.indices), device=self.device)
        if first is not None:
            losses[:size], completed = first.losses, 1
        with fork_rng(self.device):
            if order.brings == "model":  # a trial would remove the averaged gradient
                self._step.compile_for(size, lambda: self._batch_of(order.indices[:size]))
            self._step.seed(order.seed + completed)
            clock = StepClock(self.device, self._slowdown, first.seconds if first else 0.0)
            if order.brings == "gradient":
                self._step.update()  # at the rate of the last order
            set_learning_rate(self._step.optimizer, order.learning_rate / self._peak_learning_rate)
            step = self._step.gradient if order.returns == "gradient" else self._step.run
            if completed and clock.is_over(order.deadline_seconds):
                batches = iter(())
            for batch in batches:
                rows = slice(completed * size, (completed + 1) * size)
                losses[rows] = step(batch, size, None if weights is None else weights[rows])
                completed += 1
                if clock.is_over(order.deadline_seconds):
                    break
            return losses[: completed * size], clock.end()

    def _as_tensor(self, indices: npt.NDArray[np.int32]) -> Tensor:
        samples = torch.from_numpy(indices.astype(np.int64))
        return samples.to(self.device) if self._source.on_device else samples

    def _batch_of(self, indices: npt.NDArray[np.int32]) -> Any:
        return self._source.batch(self._as_tensor(indices))

    # --- too little memory

    def _no_room(self) -> UsageError:
        """Return a one-line error about memory outside of steps: the worker, phase and bytes."""
        sizes = filesize.decimal(sum(t.nbytes for t in sent_tensors(self.model).values()))
        if (free := free_bytes_on(self.device)) is not None:
            sizes += f", {filesize.decimal(free)} free"
        return UsageError(
            f"worker {self._name}: out of memory on {self.device} while {self._phase} ({sizes}); "
            "end other programs on this device, name fewer workers for it, or use a smaller model"
        )

    def _too_large(self, order: TrainOrder) -> UsageError:
        """Return a one-line error: this worker, the size that did not fit, and one that does.

        Tries half of the size that did not fit, a quarter, and so on: micro-batches of the same
        batch, which give the same result, or smaller batches if the model's samples depend on each
        other. The trial steps run eagerly on the device, and the training state is restored.
        """
        size, can_cut = order.batch_size, not batch_dependent_module(self.model)
        message = f"worker {self._name}: too little memory for its batch of {size}"
        if 0 < self._step.micro_batch_size < size:
            size = self._step.micro_batch_size
            message += f" in micro-batches of {size}"
        smallest, fits = 1 if can_cut else SMALLEST_BATCH, False
        while size > smallest and not fits:
            size = max(size // 2, smallest)
            fits = self._fits(order.indices[: order.batch_size if can_cut else size], size)
        if not fits:
            fix = "no smaller size fits; use another device or model"
        elif can_cut:
            fix = (
                f"micro-batches of {size} fit: set micro-batch-size = {size}, which gives the "
                "same result"
            )
        else:  # a worker's batch may differ from the setting, but is proportional to it
            times = math.ceil(order.batch_size / size)
            fix = (
                f"a batch of {size} fits: set batch={size} for this worker, or divide "
                f"batch-size by {times} or more"
            )
        return UsageError(f"{message}; {fix}")

    def _fits(self, indices: npt.NDArray[np.int32], micro_batch_size: int) -> bool:
        """Return whether an eager step fits into memory, after freeing the gradients."""
        self._step.optimizer.zero_grad()
        try:
            self._step.try_eagerly(self._batch_of(indices), len(indices), micro_batch_size)
        except Exception:  # of any kind: the user gets the error about memory
            return False
        return True


def _one_step(order: TrainOrder, indices: Any, sample_weights: Any, **changes: Any) -> TrainOrder:
    """Return an order of one step, without models, whose memory the server needs."""
    none = {"arrays": ArrayRecord(), "own_model": None, "deadline_seconds": 0.0}
    return replace(order, indices=indices, sample_weights=sample_weights, **(none | changes))
