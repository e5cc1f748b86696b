"""Session of a training script: its steps are local steps, and its model is averaged."""

import contextlib
import copy
import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import SupportsIndex

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..algorithm.randomness import derived_seed
from ..errors import UsageError
from ..protocol import EvaluateOrder, EvaluateReport, ScriptInfo, TrainOrder, TrainReport
from ..worker.model_io import (
    FrozenTensors,
    check_model,
    check_optimizer,
    load_momentum,
    load_state,
    model_fingerprint,
    momentum_is_finite,
    momentum_record,
    state_record,
)
from ..worker.step import fork_rng
from ..worker.timing import synchronize, throttle
from .exchange import HERE, Exchange, Joined, Work
from .sampler import SessionSampler

_LOG = logging.getLogger(__name__)

Figures = Mapping[str, float]

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
        The session. Call its `step` after every step of the optimizer.

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
            session.step(samples=len(batch))
            if session.done:
                break
    """
    if HERE.has_joined:
        raise UsageError("join was called twice; a script has one session, so keep the first one")
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
        Seed for this script's random numbers; different on each worker.
    progress : float
        Used share of the run's budget, in [0, 1], at the start of the round.
    done : bool
        Whether the run is over. The model is then the final one.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, exchange: Exchange | None
    ) -> None:
        self.is_alone, self.done = exchange is None, False
        self.progress = 0.0
        self.rank, self.is_main, self.run_seed, self.batch_size = 0, True, 0, _BATCH_SIZE
        self.device = next(model.parameters()).device
        self._slowdown, self._evaluates = 1.0, False
        if exchange is not None:
            worker = exchange.worker
            self.rank, self.is_main = exchange.rank, exchange.is_main
            self.run_seed, self.batch_size = exchange.seed, worker.batch_size or exchange.batch_size
            self.device = torch.device(worker.torch_device)
            self._slowdown, self._evaluates = worker.slowdown, worker.role == "evaluate"
        self.seed = derived_seed(self.run_seed, "session", self.rank)
        state = optimizer.state_dict()
        self._first_state = copy.deepcopy(state["state"])
        moves = next(model.parameters()).device != self.device
        self._model, self._optimizer = model.to(self.device), optimizer
        if moves and state["state"]:  # of a checkpoint
            optimizer.load_state_dict(state)  # moves it to the parameters
        self._trained = [parameter.requires_grad for parameter in model.parameters()]
        self._exchange = exchange
        self._now: _InProgress | None = None
        self._is_ready, self._sampler_size, self._by_loss = False, 0, False
        self._schedulers: list[torch.optim.lr_scheduler.LambdaLR] = []
        self._evaluate: Callable[[nn.Module], Figures] | None = None
        self._evaluate_every, self._metric, self._mode = -1, "", ""
        self._left_out: set[object] = set()

    # --- training

    def step(self, samples: SupportsIndex, losses: Tensor | None = None) -> None:
        """Note a step of the optimizer; after the last local step of a round, average.

        It then sends the model to the launcher, waits for the other workers, and loads the average.

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
            If a parameter was frozen or unfrozen since `join`, or `samples` is above `batch_size`
            while `sampler` gives the samples.
        """
        samples = _whole("step: samples", samples, least=1)
        if losses is not None and losses.shape != (samples,):
            raise ValueError(
                f"session.step: losses has shape {tuple(losses.shape)}, not ({samples},)"
            )
        if self._exchange is None or self.done:
            return
        if not self._is_ready:  # this step began with this script's own model, and does not count
            groups = self._optimizer.state_dict()["param_groups"]
            state = copy.deepcopy(self._first_state)
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
            self._begin(samples)
            return
        if self._sampler_size and samples > self.batch_size:
            raise UsageError(
                f"session.step: {samples} samples, but session.batch_size is {self.batch_size}; "
                "use batch_size=session.batch_size in the DataLoader, or "
                f"-s batch-size={samples}"
            )
        assert self._now is not None
        self._now.note(samples, losses)
        if self._now.is_complete():
            self._finish()

    def average(self) -> None:
        """End this worker's part of the round now, wait for the others, and load the average."""
        if self._exchange is None or self.done:
            return
        if not self._is_ready:
            self._begin(0)
        else:
            self._finish()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time in this block, such as saving or plotting, of this device's speed."""
        synchronize(self.device)
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._now is not None:
                self._now.paused_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Leave the run; without it, the script leaves when it ends."""
        if self._exchange is not None and not self.done:
            self._exchange.end(None)
        self.done, HERE.has_joined = True, False

    # --- what a script asks

    def sampler(self, dataset: Sized, by_loss: bool = False) -> SessionSampler:
        """Return a sampler for ``DataLoader(dataset, batch_size=session.batch_size, sampler=...)``.

        The workers share one stream of permutations of the data set, so no sample is drawn twice in
        an epoch. The sampler continues until the run is over; without ``blsgd launch`` it ends
        after one permutation.

        Parameters
        ----------
        dataset : sized
            The data set, the same on all workers.
        by_loss : bool (default: False)
            Draw the samples that the run's sampler chooses by their recorded losses; then `step`
            needs the losses. If the loader reads ahead, its iteration ends with each round, so put
            it into ``while not session.done:``.
        """
        sampler = SessionSampler(self, dataset, by_loss)
        self._sampler_size, self._by_loss = len(sampler), by_loss
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
        self._schedulers.append(scheduler)
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
        self._evaluate = function
        self._evaluate_every = _whole("evaluate: every", every, least=0)
        self._metric = metric or "accuracy"
        self._mode = mode or ("min" if "loss" in self._metric else "max")
        if self._evaluates and not self.done:
            self._begin(0)

    # --- what the sampler asks

    def wait_for_first_order(self, batch_size: SupportsIndex = 0) -> None:
        """Wait for the first order, unless it is there.

        `batch_size` is that of the script. It replaces the setting ``batch-size`` for workers
        without ``batch=``.
        """
        if self._exchange is None or self._is_ready or self.done:
            return
        batch_size = _whole("wait_for_first_order: batch_size", batch_size, least=0)
        if batch_size and not self._exchange.worker.batch_size:
            self.batch_size = batch_size
        self._begin(batch_size)

    @property
    def order(self) -> TrainOrder | None:
        """The current order; None before the first one, and at the end."""
        return None if self._now is None else self._now.order

    # --- orders

    def _begin(self, batch_size: int) -> None:
        """Say that this script is ready, and wait for the first order."""
        assert self._exchange is not None
        if self._evaluates and self._evaluate is None:
            raise UsageError(
                f"worker {self.rank} has role=evaluate, but the script does not call "
                "session.evaluate before its training loop"
            )
        self._is_ready, self._first_state = True, {}
        self._frozen = FrozenTensors(self._model)
        self._frozen.begin()
        self._exchange.joined.set_result(
            Joined(
                ScriptInfo(
                    num_samples=self._sampler_size,
                    batch_size=batch_size,
                    evaluate_every=self._evaluate_every,
                    metric_name=self._metric,
                    metric_mode=self._mode,
                    fingerprint=model_fingerprint(self._model),
                    parameter_names=[
                        name
                        for name, tensor in self._model.named_parameters(remove_duplicate=False)
                        if tensor.requires_grad
                    ],
                ),
                arrays=lambda: state_record(self._model),
                optimizer_state=lambda: momentum_record(self._model, self._optimizer, copy=False),
            )
        )
        self._next_work()

    def _next_work(self) -> None:
        """Wait for the next order; evaluate meanwhile if asked to."""
        assert self._exchange is not None
        self._now = None
        while True:
            work = self._exchange.next_work()
            order = work.order
            if isinstance(order, EvaluateOrder):
                try:
                    work.result.set_result(self._evaluated(order))
                except Exception as error:
                    work.result.set_exception(error)
                    raise
                continue
            if isinstance(order, ArrayRecord):
                load_state(self._model, order)
                self.progress, self.done = 1.0, True
                self._set_rates()
                if not self._evaluates:
                    self._frozen.check()
                return
            self._take(order)
            self._now = _InProgress(work, order, self._slowdown, self.device)
            return

    def _take(self, order: TrainOrder) -> None:
        """Load the global model, and set the optimizer's state and the learning rates."""
        if not order.stream_stride and not self._by_loss:
            raise UsageError(
                "this run chooses samples by their losses: use session.sampler(dataset, "
                "by_loss=True) and session.step(..., losses=...), or sampler=uniform, no selection"
            )
        if order.sample_weights is not None:
            raise UsageError(
                "this run weighs samples, which scripts do not: use -s selection=active-bias, or "
                "leave selection out"
            )
        load_state(self._model, order.arrays)
        if order.momentum is not None:
            load_momentum(self._model, self._optimizer, order.momentum)
        elif order.momentum_policy == "reset":
            self._optimizer.state.clear()
        self.progress = order.progress
        self._set_rates()

    def _set_rates(self) -> None:
        for scheduler in self._schedulers:
            rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, (base, factor) in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = base * factor(0)

    def _finish(self) -> None:
        """Report the steps of the current order, and wait for the next one."""
        now = self._now
        assert now is not None
        self._check_trained()
        seconds = now.all_seconds()
        self._frozen.check(now.order.round)
        now.result.set_result(self._report(now, now.order, seconds))
        self._next_work()

    def _report(self, now: "_InProgress", order: TrainOrder, seconds: float) -> TrainReport:
        is_finite = order.momentum_policy == "reset" or momentum_is_finite(self._optimizer)
        if not is_finite:
            self._optimizer.state.clear()
        averages = order.momentum_policy == "average" and is_finite
        has_losses = len(now.losses) == now.steps > 0
        rate = self._optimizer.param_groups[0].get("lr")  # None with Adafactor's own rate
        return TrainReport(
            completed_steps=min(now.steps, order.local_steps),
            batch_size=order.batch_size,
            compute_seconds=seconds,
            started_at=now.started_at,
            ended_at=now.started_at + seconds,
            losses=torch.cat(now.losses).cpu().numpy() if has_losses else np.empty(0, np.float32),
            arrays=state_record(self._model, like=order.arrays),
            momentum=momentum_record(self._model, self._optimizer) if averages else None,
            momentum_zeroed=int(not is_finite),
            samples=now.samples,
            learning_rate=math.nan if rate is None else float(rate),
        )

    def _check_trained(self) -> None:
        now = [parameter.requires_grad for parameter in self._model.parameters()]
        if now != self._trained:
            names = (name for name, _ in self._model.named_parameters())
            changed = [n for n, a, b in zip(names, self._trained, now, strict=False) if a != b]
            raise UsageError(
                f"model: requires_grad of {changed[0] if changed else 'a parameter'!r} has changed "
                "since join; freeze and unfreeze parameters before join"
            )

    def _evaluated(self, order: EvaluateOrder) -> EvaluateReport:
        """Evaluate a model with the script's function."""
        if self._evaluate is None:
            raise UsageError("the script does not call session.evaluate before its training loop")
        was_training = self._model.training
        load_state(self._model, order.arrays)
        with fork_rng(self.device):
            self._model.eval()
            try:
                found = self._evaluate(self._model)
            finally:
                self._model.train(was_training)
        figures = self._numbers(found)
        return EvaluateReport(
            order.first,
            order.last,
            loss_sums=[figures.get("loss", math.nan)],
            metric_sums=list(figures.values()),
            metric_names=list(figures),
        )

    def _numbers(self, found: object) -> dict[str, float]:
        """Return the figures that are numbers; warn once about each other one."""
        numbers = {}
        for name, value in found.items() if isinstance(found, Mapping) else ():
            with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
                numbers[str(name)] = float("" if isinstance(value, str | bytes) else value)
            if str(name) not in numbers and name not in self._left_out:
                self._left_out.add(name)
                _LOG.warning("session.evaluate: %r is left out: it is not a number", name)
        return numbers


class _InProgress:
    """An order in progress: the steps done, and their time without pauses."""

    def __init__(
        self, work: Work, order: TrainOrder, slowdown: float, device: torch.device
    ) -> None:
        self.order, self.result = order, work.result
        self.steps = self.samples = 0
        self.losses: list[Tensor] = []
        self.paused_seconds, self._slowdown, self._device = 0.0, slowdown, device
        synchronize(device)
        self.started_at, self.began = time.time(), time.perf_counter()

    def note(self, samples: int, losses: Tensor | None) -> None:
        """Count a step."""
        self.steps += 1
        self.samples += samples
        if losses is not None:
            self.losses.append(losses.detach().float())

    def is_complete(self) -> bool:
        """Return whether the order has no steps left, or its time is over."""
        if self.steps >= self.order.local_steps:
            return True
        return 0 < self.order.deadline_seconds <= self._seconds

    @property
    def _seconds(self) -> float:
        synchronize(self._device)
        return self._slowdown * (time.perf_counter() - self.began - self.paused_seconds)

    def all_seconds(self) -> float:
        """Wait for the device, and as long as a slower one would compute; return the seconds."""
        synchronize(self._device)
        throttle(self.began + self.paused_seconds, self._slowdown)
        return time.perf_counter() - self.began - self.paused_seconds


def _whole(name: str, value: SupportsIndex, least: int) -> int:
    """Return an integer, also of numpy or torch; ValueError for another value or a smaller one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"session.{name} = {value!r} must be an integer") from None
    if number < least:
        raise ValueError(f"session.{name} = {number} must be at least {least}")
    return number
