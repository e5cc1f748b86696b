"""Session of a training script: its steps are local steps, and its model is averaged."""

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..algorithm.randomness import derived_seed
from ..errors import UsageError
from ..protocol import TrainOrder
from ..worker.model_io import check_model
from ..worker.optimizer import check_optimizer
from ..worker.timing import synchronize
from .counting import StepCounting
from .evaluation import Evaluation, Figures
from .exchange import HERE, Exchange
from .orders import Orders
from .replica import Replica
from .sampler import SessionSampler

_BATCH_SIZE = 16
"""Default of the setting ``batch-size``."""


def join(model: nn.Module, optimizer: torch.optim.Optimizer) -> "Session":
    """Let a training script train together with other devices.

    Under ``blsgd launch``, this script runs once per worker, and the model is averaged over all
    workers after every round. Without it, the session consists of this script alone and changes
    nothing.

    Only what is trained is sent and averaged: parameters with ``requires_grad`` and floating
    buffers. All workers begin with the model of the main worker. Other tensors must be the same on
    all workers, and steps must not change them; both are checked.

    Parameters
    ----------
    model : torch.nn.Module
        Moved to the session's device.
    optimizer : torch.optim.Optimizer
        Any optimizer of the model's parameters. Its state stays on the worker and in its
        checkpoints.

    Returns
    -------
    Session
        The session. It counts the steps of the optimizer, each of `Session.batch_size` samples. If
        the batches differ, or losses choose the samples, call its `step` after every step.

    Raises
    ------
    UsageError
        If there is a session already, or `check_model` or `check_optimizer` refuses the model or
        the optimizer. Under ``blsgd launch`` also if a tensor is not finite.

    Examples
    --------
    ::

        session = flower_blsgd.join(model, optimizer)
        for batch in loader:
            loss = compute_loss(model, batch.to(session.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.done:
                break
    """
    if HERE.has_joined:
        raise UsageError("join was called twice; a script has one session, so keep the first one")
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    check_model(model, values=HERE.exchange is not None)
    check_optimizer(model, optimizer)
    HERE.has_joined = True
    return Session(model, optimizer, HERE.exchange)


class Session:
    """Part of one script in a run; see `join`, which creates it.

    If the script raises an exception, only the contribution of its worker to the round is lost. The
    worker's process starts again, and its new session continues from the current global model.

    Attributes
    ----------
    device : torch.device
        Device of this worker; without ``blsgd launch`` that of the model.
    batch_size : int
        Samples per step of this worker: ``batch=`` of the worker, or the setting ``batch-size``;
        without ``blsgd launch`` the default of this setting.
    rank : int
        Number of this worker, from 0.
    is_main : bool
        Whether this is the worker that should save and print. It has the first model of the run.
    is_alone : bool
        Whether the script runs without ``blsgd launch``.
    seed : int
        Seed for this script's random numbers, below 2**32; different on each worker.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, exchange: Exchange | None
    ) -> None:
        self.is_alone = exchange is None
        self.is_main = exchange is None or exchange.is_main
        self.rank = 0
        self.batch_size = _BATCH_SIZE
        self.device = next(model.parameters()).device
        self._is_closed = False
        self._hooks: list[RemovableHandle] = []
        self._orders: Orders | None = None
        """None without ``blsgd launch``; then there is no `_replica` and no `_counting`."""
        if exchange is not None:
            self.rank = exchange.rank
            self.batch_size = exchange.worker.batch_size or exchange.batch_size
            self.device = torch.device(exchange.worker.torch_device)
            self._replica = Replica(model, optimizer, self.device)
            self._orders = Orders(exchange, self._replica, optimizer)
            self._counting = StepCounting(self.rank, lambda: self.done)
            if not self._orders.only_evaluates:
                self._counting.start_reminder()
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                self._hooks.append(optimizer.register_step_pre_hook(self._begin_optimizer_step))
                self._hooks.append(optimizer.register_step_post_hook(self._end_optimizer_step))
        seed = derived_seed(exchange.seed if exchange else 0, "session", self.rank)
        self.seed = seed % 2**32

    @property
    def progress(self) -> float:
        """Used share of the run's budget, in [0, 1], at the start of the round."""
        return 0.0 if self._orders is None else self._orders.progress

    @property
    def done(self) -> bool:
        """Whether the run is over. The model is then the final one."""
        return self._is_closed or (self._orders is not None and self._orders.done)

    # --- training

    def step(self, samples: SupportsIndex, losses: Tensor | None = None) -> None:
        """Note a step of the optimizer; after the last local step of a round, average.

        It then sends the model to the launcher, waits for the other workers, and loads the average.
        A script calls it after every step, or never; then each step of the optimizer is noted.

        Parameters
        ----------
        samples : int
            Number of samples in the step's batch, >= 1; also an integer of numpy or torch.
        losses : torch.Tensor, optional
            One loss per sample, in the order of the sampler. Needed only for samples chosen by
            loss.

        Raises
        ------
        ValueError
            If `samples` is below 1 or no integer, or `losses` has another size.
        UsageError
            If a parameter was frozen or unfrozen since `join`, `samples` is above `batch_size`
            while `sampler` gives the samples, or the optimizer took two steps without a call
            before.
        """
        samples = _whole("step: samples", samples, least=1)
        if losses is not None and losses.shape != (samples,):
            raise ValueError(
                f"session.step: losses has shape {tuple(losses.shape)}, not ({samples},)"
            )
        if self._orders is None or self.done:
            return
        self._counting.note_call()
        self._note_step(self._orders, samples, losses)

    def average(self) -> None:
        """End this worker's part of the round now, wait for the others, and load the average.

        With ``average = "gradients"``, the model is the averaged one after each step.
        """
        if self._orders is None or self.done:
            return
        if self._orders.has_begun:
            self._orders.finish_early()
        else:
            self._begin(self._orders, 0)
            self._orders.end_first_step()

    def average_gradients(self) -> None:
        """Average the gradients now, with ``average = "gradients"``; else nothing happens.

        The optimizer's step does it otherwise. Call it after the backward pass, before the
        gradients are clipped, so that the average is clipped. With a GradScaler, call its
        ``unscale_`` first.
        """
        if self._orders is not None and not self.done:
            self._begin_optimizer_step()
            self._orders.exchange_gradients(calls_step=self._counting.counted == "calls")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time in this block, such as saving or plotting, of this device's speed."""
        orders = self._orders
        if orders is None or orders.paused_since is not None:
            yield
            return
        synchronize(self.device)
        orders.paused_since = time.perf_counter()
        try:
            yield
        finally:
            orders.end_pause()

    def close(self) -> None:
        """Leave the run; without it, the script leaves when it ends."""
        for hook in self._hooks:
            hook.remove()
        if self._orders is not None:
            self._counting.cancel_reminder()
            self._orders.close()
        self._is_closed, HERE.has_joined = True, False

    # --- what a script asks

    def sampler(self, dataset: Sized, by_loss: bool = False) -> SessionSampler:
        """Return a sampler for ``DataLoader(dataset, batch_size=session.batch_size, sampler=...)``.

        The workers share one stream of permutations of the data set, so no sample is drawn twice in
        a pass over it. The sampler continues until the run is over; without ``blsgd launch`` it
        ends after one permutation.

        Parameters
        ----------
        dataset : sized
            The data set, the same on all workers.
        by_loss : bool (default: False)
            Draw the samples that the run's sampler chooses by their recorded losses; then `step`
            needs the losses. If the loader reads ahead, its iteration ends with each round, so put
            it into ``while not session.done:``.
        """
        if self._orders is None:
            return SessionSampler(dataset, by_loss, self.seed, None)
        seed = self._orders.exchange.seed
        sampler = SessionSampler(dataset, by_loss, seed, self._wait_for_order)
        self._orders.sampler = sampler
        return sampler

    def scheduler(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[float], float]
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """Return a scheduler that multiplies the learning rates by ``factor(progress)``.

        The session steps it at the start of every round, so all workers have the same learning
        rate, also with different numbers of steps. The script may step it, too.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its learning rates are the base.
        factor : callable
            ``(progress) -> factor`` for `progress` in [0, 1].
        """
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda _: float(factor(self.progress))
        )
        if self._orders is not None:
            self._orders.schedulers.append(scheduler)
        return scheduler

    def evaluate(
        self,
        function: Callable[[nn.Module], Figures],
        every: SupportsIndex = 0,
        *,
        metric: str = "",
        mode: str = "",
    ) -> None:
        """Evaluate the averaged model regularly; call it once, before the training loop.

        A worker with ``role=evaluate`` stays in this call until the run is over, and evaluates the
        newest model again and again. Without such a worker, the fastest worker evaluates between
        two rounds, which does not count as its speed.

        Parameters
        ----------
        function : callable
            ``(model) -> figures``, named numbers such as ``{"accuracy": 0.9, "loss": 0.3}``. The
            model is on the session's device and in eval mode. Figures that are not numbers are left
            out with a warning.
        every : int (default: 0)
            Samples between two evaluations, rounded to whole epochs of the session's sampler; 0:
            one epoch. The setting ``evaluate-every-epochs`` takes precedence, unless it is 1.
        metric : str (default: "accuracy")
            The figure by which models are compared. The run ends if an evaluation lacks it.
        mode : {"max", "min"} (default: "min" if the name of the metric has "loss", else "max")
            Whether a larger or a smaller figure is better.

        Raises
        ------
        ValueError
            If `mode` is another text, or `every` is below 0 or no integer.
        """
        if mode not in ("", "max", "min"):
            raise ValueError(f'session.evaluate: mode = {mode!r} must be "max" or "min"')
        every = _whole("evaluate: every", every, least=0)
        if self._orders is None:
            return
        self._orders.evaluation = Evaluation(function, every, metric, mode)
        if self._orders.only_evaluates and not self.done:
            self._begin(self._orders, 0)

    # --- what the sampler asks

    def wait_for_first_order(self, batch_size: SupportsIndex = 0) -> None:
        """Wait for the first order, unless it is there.

        `batch_size` is that of the script. It replaces the setting ``batch-size`` for workers
        without ``batch=``.
        """
        orders = self._orders
        if orders is None or orders.has_begun or self.done:
            return
        batch_size = _whole("wait_for_first_order: batch_size", batch_size, least=0)
        if batch_size and not orders.exchange.worker.batch_size:
            self.batch_size = batch_size
        self._begin(orders, batch_size)

    @property
    def order(self) -> TrainOrder | None:
        """The current order; None before the first one, and at the end."""
        return None if self._orders is None else self._orders.current

    def _wait_for_order(self) -> TrainOrder | None:
        self.wait_for_first_order()
        return self.order

    # --- steps

    def _begin(self, orders: Orders, batch_size: int) -> None:
        self._counting.forget_steps()
        orders.begin(batch_size)

    def _note_step(self, orders: Orders, samples: int, losses: Tensor | None = None) -> None:
        self._counting.cancel_reminder()
        if not orders.has_begun:  # this step began with this script's own model, and does not count
            self._replica.undo_steps()
            self._begin(orders, samples)
            return
        if orders.sampler is not None and samples > self.batch_size:
            raise UsageError(
                f"session.step: {samples} samples, but session.batch_size is {self.batch_size}; "
                "use batch_size=session.batch_size in the DataLoader, divided by the number of "
                f"batches that a step accumulates, or keep yours and set -s batch-size={samples}"
            )
        orders.note(samples, losses)

    def _begin_optimizer_step(self, *_: Any) -> None:
        """Note the first step at the second one, unless the script has called `step`."""
        orders = self._orders
        assert orders is not None
        if self._counting.begin_step(is_training=orders.has_begun and not self.done):
            before = self.order
            self._note_step(orders, self.batch_size)
            if self.order is not before and not orders.averages_gradients:
                self._replica.drop_gradients()  # they are those of the model before the average
                self._counting.ignore_step()

    def _end_optimizer_step(self, *_: Any) -> None:
        """Note the step, if the steps of the optimizer are counted."""
        orders = self._orders
        assert orders is not None
        if self.done or not self._counting.end_step(self._replica.has_any_gradient):
            return
        if orders.sampler is not None and orders.sampler.by_loss:
            raise UsageError(
                "session.sampler(dataset, by_loss=True) needs the losses: call "
                "session.step(samples=..., losses=...) after every step of the optimizer"
            )
        self._note_step(orders, self.batch_size)


def _whole(name: str, value: SupportsIndex, least: int) -> int:
    """Return an integer, also of numpy or torch; ValueError for another value or a smaller one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"session.{name} = {value!r} must be an integer") from None
    if number < least:
        raise ValueError(f"session.{name} = {number} must be at least {least}")
    return number
