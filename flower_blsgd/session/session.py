"""Session of a training script: its steps are local steps, and its model is averaged."""

import contextlib
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future
from threading import Timer
from typing import Any, Literal, SupportsIndex

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..algorithm.randomness import derived_seed
from ..errors import UsageError
from ..protocol import EvaluateOrder, EvaluateReport, ScriptInfo, TrainOrder
from ..worker.model_io import check_model
from ..worker.optimizer import check_optimizer
from ..worker.overlap import FirstStep
from ..worker.timing import synchronize
from .evaluation import Evaluation, Figures
from .exchange import HERE, Exchange, Joined
from .replica import LocalSteps, Replica
from .sampler import SessionSampler

_BATCH_SIZE = 16
"""Default of the setting ``batch-size``."""

_REMINDER_SECONDS = 60.0


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
        Seed for this script's random numbers; different on each worker.
    progress : float
        Used share of the run's budget, in [0, 1], at the start of the round.
    done : bool
        Whether the run is over. The model is then the final one.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, exchange: Exchange | None
    ) -> None:
        self.is_alone = exchange is None
        self.is_main = True
        self.rank = 0
        self.batch_size = _BATCH_SIZE
        self.device = next(model.parameters()).device
        self.progress = 0.0
        self.done = False
        if exchange is not None:
            self.rank = exchange.rank
            self.is_main = exchange.is_main
            self.batch_size = exchange.worker.batch_size or exchange.batch_size
            self.device = torch.device(exchange.worker.torch_device)
        self.seed = derived_seed(exchange.seed if exchange else 0, "session", self.rank)
        self._exchange = exchange
        self._slowdown = exchange.worker.slowdown if exchange else 1.0
        self._replica = Replica(model, optimizer, self.device)
        self._optimizer = optimizer
        self._steps: LocalSteps | None = None
        self._first: FirstStep | None = None
        """The first step of a round, from the end of the last round until the average is loaded."""
        self._next_steps: LocalSteps | None = None
        """Those of the next order, from the average of gradients to `step`."""
        self._hook: RemovableHandle | None = None
        self._has_stepped = False
        self._result: Future[Any] | None = None
        self._counted_by: Literal["", "calls", "steps"] = ""
        """What counts as a step: calls of `step`, or steps of the optimizer; empty if unknown."""
        self._unknown_steps = 0
        """Steps of the optimizer before that is known."""
        self._in_step = False
        self._left_out = False
        """Whether the last gradient has overflowed, so that a GradScaler leaves the step out."""
        self._hooks: list[RemovableHandle] = []
        self._reminder = Timer(_REMINDER_SECONDS, self._remind)
        if exchange is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._hooks.append(optimizer.register_step_pre_hook(self._know_before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        if exchange is not None and not self._only_evaluates:
            self._reminder.daemon = True
            self._reminder.start()
        self._sampler: SessionSampler | None = None
        self._evaluation: Evaluation | None = None
        self._schedulers: list[torch.optim.lr_scheduler.LambdaLR] = []

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
        if self._exchange is None or self.done:
            return
        if self._counted_by == "steps":
            raise UsageError(
                "session.step: the optimizer took two steps without it, so its steps are counted; "
                "call session.step after every step of the optimizer, or never"
            )
        self._counted_by = "calls"
        self._note_step(samples, losses)

    def _know_before_step(self, *_: Any) -> None:
        """Know from the second step that the script does not call `step`; note the first one."""
        self._in_step = True
        if self._counted_by or not self._unknown_steps or not self._is_ready or self.done:
            return
        self._counted_by = "steps"
        order = self.order
        self._note_step(self.batch_size)
        if self.order is not order and not self._averages_gradients:
            self._replica.drop_gradients()  # they are those of the model before the average

    def _count_step(self, *_: Any) -> None:
        """Note a step of the optimizer, if they are counted.

        Before the first order, the first two steps are those of this script's own model. A step
        without gradients, or within the step of a derived class, is none.
        """
        if not self._in_step or self.done:
            return
        self._in_step = False
        if not self._counted_by and self._replica.has_any_gradient():
            self._unknown_steps += 1
            if self._unknown_steps > 1:
                self._counted_by = "steps"
        if self._counted_by != "steps":
            return
        if self._sampler is not None and self._sampler.by_loss:
            raise UsageError(
                "session.sampler(dataset, by_loss=True) needs the losses: call "
                "session.step(samples=..., losses=...) after every step of the optimizer"
            )
        self._note_step(self.batch_size)

    def _remind(self) -> None:
        """Say that no step has been counted, if that is so."""
        if not self._counted_by and not self._unknown_steps and not self.done:
            sys.stderr.write(
                f"worker {self.rank}: no step was counted in {_REMINDER_SECONDS:.0f} s since "
                "flower_blsgd.join; if it trains, give join the optimizer that takes the steps, or "
                "call session.step after each\n"
            )

    def _note_step(self, samples: int, losses: Tensor | None = None) -> None:
        self._reminder.cancel()
        if not self._is_ready:  # this step began with this script's own model, and does not count
            self._replica.undo_steps()
            self._begin(samples)
            return
        if self._sampler is not None and samples > self.batch_size:
            raise UsageError(
                f"session.step: {samples} samples, but session.batch_size is {self.batch_size}; "
                "use batch_size=session.batch_size in the DataLoader, or "
                f"-s batch-size={samples}"
            )
        assert self._steps is not None
        if self._averages_gradients:
            self._end_step()
            return
        self._steps.note(samples, losses)
        self._end_first_step()
        if not self.done and self._steps.is_complete():
            self._finish()

    def average(self) -> None:
        """End this worker's part of the round now, wait for the others, and load the average.

        With ``average = "gradients"``, the model is the averaged one after each step.
        """
        if self._exchange is None or self.done:
            return
        if not self._is_ready:
            self._begin(0)
        elif self._averages_gradients:
            return
        elif self._first is None:
            self._finish()
        self._end_first_step()

    def average_gradients(self) -> None:
        """Average the gradients now, with ``average = "gradients"``; else nothing happens.

        The optimizer's step does it otherwise. Call it after the backward pass, before the
        gradients are clipped, so that the average is clipped. With a GradScaler, call its
        ``unscale_`` first.
        """
        self._know_before_step()
        if self._left_out and self._counted_by != "calls" and not self._has_stepped:
            self._end_step()  # that of the last step
        if self._averages_gradients and self._next_steps is None:
            self._exchange_gradient(self._replica.has_gradients())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time in this block, such as saving or plotting, of this device's speed."""
        synchronize(self.device)
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._steps is not None:
                self._steps.clock.paused_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Leave the run; without it, the script leaves when it ends."""
        self._reminder.cancel()
        for hook in self._hooks:
            hook.remove()
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
        if self._exchange is None:
            return SessionSampler(dataset, by_loss, self.seed, None)
        self._sampler = SessionSampler(dataset, by_loss, self._exchange.seed, self._wait_for_order)
        return self._sampler

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
        every = _whole("evaluate: every", every, least=0)
        self._evaluation = Evaluation(function, every, metric, mode)
        if self._only_evaluates and not self.done:
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
        return None if self._steps is None else self._steps.order

    def _wait_for_order(self) -> TrainOrder | None:
        self.wait_for_first_order()
        return self.order

    # --- orders

    @property
    def _is_ready(self) -> bool:
        """Whether the script has waited for its first order."""
        return self._exchange is not None and self._exchange.joined.done()

    @property
    def _only_evaluates(self) -> bool:
        return self._exchange is not None and self._exchange.worker.role == "evaluate"

    def _begin(self, batch_size: int) -> None:
        """Say that this script is ready, and wait for the first order."""
        assert self._exchange is not None
        self._unknown_steps = 0
        evaluation = self._evaluation
        if self._only_evaluates and evaluation is None:
            raise UsageError(
                f"worker {self.rank} has role=evaluate, but the script does not call "
                "session.evaluate before its training loop"
            )
        self._replica.begin()
        info = ScriptInfo(
            num_samples=0 if self._sampler is None else len(self._sampler),
            batch_size=batch_size,
            evaluate_every=-1 if evaluation is None else evaluation.every,
            metric_name="" if evaluation is None else evaluation.metric,
            metric_mode="" if evaluation is None else evaluation.mode,
            fingerprint=self._replica.fingerprint,
            parameter_names=self._replica.parameter_names,
        )
        replica = self._replica
        joined = Joined(info, replica.arrays, replica.optimizer_state, replica.own_model)
        self._exchange.joined.set_result(joined)
        self._next_order()

    def _next_order(self, first: FirstStep | None = None) -> None:
        """Wait for the next order; evaluate meanwhile if asked to.

        `first` is its first step, if that is done.
        """
        assert self._exchange is not None
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
                self._steps, self.done = None, True
                self._replica.finish(order, trains=not self._only_evaluates)
                self._set_progress(1.0)
                return
            self._check(order)
            self._result = work.result
            if first is None and self._replica.load_own_model(order):
                self._begin_first_step(order, order.momentum)
                self._set_progress(order.last_progress)
            else:
                self._begin_steps(order, first)
            if order.returns == "gradient" and self._hook is None:
                self._hook = self._optimizer.register_step_pre_hook(self._before_step)
            return

    def _begin_steps(self, order: TrainOrder, first: FirstStep | None) -> None:
        """Load the average, and begin the steps of an order; `first` is done."""
        self._replica.load(order, first)
        if first is not None and self._steps is not None and order.overlap:
            self._steps.begin(order, first.seconds)
        else:
            self._steps = LocalSteps(order, self._slowdown, self.device)
        if order.brings == "model":  # else the optimizer has not stepped yet
            self._set_progress(order.progress)

    def _begin_first_step(self, order: TrainOrder, momentum: ArrayRecord | None = None) -> None:
        """Begin the first step of a round on the script's own model."""
        self._first = self._replica.begin_first_step(order.momentum_policy, momentum)
        self._steps = LocalSteps(order, self._slowdown, self.device)

    def _end_first_step(self) -> None:
        """Add the first step to the average, after waiting for its order if it is not there."""
        first, self._first = self._first, None
        if first is None or self._steps is None:
            return
        first.end(self._steps.clock.end()[0])
        if self._result is None:
            self._next_order(first)
        else:
            self._begin_steps(self._steps.order, first)

    def _finish(self) -> None:
        """Report the steps of the current order, and wait for the next one or begin its round."""
        assert self._steps is not None
        assert self._result is not None
        order = self._steps.order
        self._result.set_result(self._replica.report(self._steps))
        self._result = None
        if order.next_indices is None:
            self._next_order()
        else:
            self._begin_first_step(order)

    # --- averages of gradients

    @property
    def _averages_gradients(self) -> bool:
        return self._steps is not None and self._steps.order.returns == "gradient"

    def _before_step(
        self, _: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Average the gradients before the optimizer's step uses them, or after its closure."""
        if not self._averages_gradients:
            return None
        closure = named.get("closure") or next(iter(arguments[1:]), None)

        def average() -> Any:
            if self._has_stepped:
                raise UsageError(
                    "gradients are averaged once between two calls of session.step: call it after "
                    "each step, and use an optimizer that evaluates its closure once"
                )
            self._has_stepped = True
            loss = closure and closure()
            if self._next_steps is None:
                self._exchange_gradient(self._replica.unscale())
            return loss

        if closure is not None:
            return arguments[:1], {**named, "closure": average}
        average()
        return None

    def _exchange_gradient(self, is_finite: bool) -> None:
        """Send this worker's gradient, and wait for the average; all skip the step of an overflow.

        The samples of the step are not known yet, so those of the order count.
        """
        current = self._steps
        assert current is not None
        self._left_out = not is_finite
        if is_finite:
            current.note(current.order.batch_size, None)
        else:
            self._replica.drop_gradients()
        self._finish()
        self._next_steps = self._steps
        if self._next_steps is None or self._next_steps.order.brings == "model":
            self._replica.drop_gradients()  # this worker has got another model
        self._steps = None if self.done else current

    def _end_step(self) -> None:
        """Begin the next order after the optimizer's step; first return the model if asked to."""
        if self._next_steps is None:  # GradScaler has left the step out
            if self._replica.has_gradients():
                raise UsageError(
                    "session.step was called without a step of the optimizer, whose gradients are "
                    "finite; with accumulated gradients, call it once per step of the optimizer"
                )
            self._exchange_gradient(is_finite=False)
        self._steps, self._next_steps = self._next_steps, None
        self._has_stepped = self._left_out = False
        if self._steps is None:
            return
        if not self._steps.order.local_steps:
            self._finish()
        elif self._steps.order.brings != "model":
            self._set_progress(self._steps.order.progress)

    def _check(self, order: TrainOrder) -> None:
        """Raise UsageError for what a script cannot do."""
        by_loss = self._sampler is not None and self._sampler.by_loss
        if order.returns == "gradient" and (by_loss or not order.stream_stride):
            raise UsageError(
                'average = "gradients" does not choose samples of scripts by loss: use '
                "session.sampler(dataset) without by_loss, and sampler=uniform without selection"
            )
        if not order.local_steps:
            return
        if not order.stream_stride and not by_loss:
            raise UsageError(
                "this run chooses samples by their losses: use session.sampler(dataset, "
                "by_loss=True) and session.step(..., losses=...), or sampler=uniform, no selection"
            )
        if order.sample_weights is not None:
            raise UsageError(
                "this run weighs samples, which scripts do not: use -s selection=active-bias, or "
                "leave selection out"
            )
        if by_loss and (order.overlap or order.next_indices is not None):
            raise UsageError(
                "overlap = true: session.sampler(dataset, by_loss=True) does not know the samples "
                "of the next round; leave overlap or by_loss out"
            )

    def _evaluated(self, order: EvaluateOrder) -> EvaluateReport:
        if self._evaluation is None:
            raise UsageError("the script does not call session.evaluate before its training loop")
        self._replica.own_round = 0
        return self._evaluation.report(self._replica.model, self.device, order)

    def _set_progress(self, progress: float) -> None:
        self.progress = progress
        for scheduler in self._schedulers:
            rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, (base, factor) in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = base * factor(0)


def _whole(name: str, value: SupportsIndex, least: int) -> int:
    """Return an integer, also of numpy or torch; ValueError for another value or a smaller one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"session.{name} = {value!r} must be an integer") from None
    if number < least:
        raise ValueError(f"session.{name} = {number} must be at least {least}")
    return number
