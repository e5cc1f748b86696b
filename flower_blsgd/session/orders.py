"""Orders for a script: its local steps, and what an average brings."""

from concurrent.futures import Future
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..errors import UsageError
from ..protocol import EvaluateOrder, EvaluateReport, ScriptInfo, TrainOrder
from ..worker.overlap import FirstStep
from .evaluation import Evaluation
from .exchange import Exchange, Joined
from .replica import LocalSteps, Replica
from .sampler import SessionSampler


class Orders:
    """The orders of a worker that runs a script, carried out by the script's steps.

    `exchange` is that of the worker. The other public attributes are those of the `Session`.
    """

    def __init__(
        self, exchange: Exchange, replica: Replica, optimizer: torch.optim.Optimizer
    ) -> None:
        self.exchange = exchange
        self.progress = 0.0
        self.done = False
        self.sampler: SessionSampler | None = None
        self.evaluation: Evaluation | None = None
        self.paused_since: float | None = None
        """Time of `time.perf_counter`, within a pause."""
        self.schedulers: list[torch.optim.lr_scheduler.LambdaLR] = []
        self._replica = replica
        self._optimizer = optimizer
        self._steps: LocalSteps | None = None
        self._first: FirstStep | None = None
        """The first step of a round, from the end of the last round until the average is loaded."""
        self._result: Future[Any] | None = None
        self._hook: RemovableHandle | None = None
        self._next_steps: LocalSteps | None = None
        """Those of the next order, from the average of gradients to `note`."""
        self._has_stepped = False
        self._left_out = False
        """Whether the last gradient has overflowed, so that a GradScaler leaves the step out."""

    @property
    def current(self) -> TrainOrder | None:
        """The current order; None before the first one, and at the end."""
        return None if self._steps is None else self._steps.order

    @property
    def has_begun(self) -> bool:
        """Whether the script has waited for its first order."""
        return self.exchange.joined.done()

    @property
    def only_evaluates(self) -> bool:
        """Whether this worker does not train."""
        return self.exchange.worker.role == "evaluate"

    @property
    def averages_gradients(self) -> bool:
        """Whether each step's gradients are averaged, not the model."""
        return self._steps is not None and self._steps.order.returns == "gradient"

    def begin(self, batch_size: int) -> None:
        """Say that this script is ready, and wait for the first order."""
        evaluation = self.evaluation
        if self.only_evaluates and evaluation is None:
            raise UsageError(
                f"worker {self.exchange.rank} has role=evaluate, but the script does not call "
                "session.evaluate before its training loop"
            )
        replica = self._replica
        replica.begin()
        info = ScriptInfo(
            num_samples=0 if self.sampler is None else len(self.sampler),
            batch_size=batch_size,
            evaluate_every=-1 if evaluation is None else evaluation.every,
            metric_name="" if evaluation is None else evaluation.metric,
            metric_mode="" if evaluation is None else evaluation.mode,
            fingerprint=replica.fingerprint,
            parameter_names=replica.parameter_names,
        )
        joined = Joined(info, replica.arrays, replica.optimizer_state, replica.own_model)
        self.exchange.joined.set_result(joined)
        self._next()

    def note(self, samples: int, losses: Tensor | None) -> None:
        """Count a step; after the last one of the order, report them and take the next order."""
        assert self._steps is not None
        if self.averages_gradients:
            self._end_gradient_step()
            return
        self._steps.note(samples, losses)
        self.end_first_step()
        if not self.done and self._steps.is_complete():
            self._finish()

    def finish_early(self) -> None:
        """Report the steps until now, and load the average; with averaged gradients, do nothing."""
        if self.averages_gradients:
            return
        if self._first is None:
            self._finish()
        self.end_first_step()

    def end_first_step(self) -> None:
        """Add the first step to the average, after waiting for its order if it is not there."""
        first, self._first = self._first, None
        if first is None or self._steps is None:
            return
        self._leave_out_pause()
        first.end(self._steps.clock.end()[0])
        if self._result is None:
            self._next(first)
        else:
            self._begin_steps(self._steps.order, first)

    def end_pause(self) -> None:
        """Leave the time since the pause began out of this device's speed."""
        self._leave_out_pause()
        self.paused_since = None

    def _leave_out_pause(self) -> None:
        if self._steps is not None and self.paused_since is not None:
            self._steps.clock.leave_out(self.paused_since)

    def close(self) -> None:
        """Leave the run."""
        if self._hook is not None:
            self._hook.remove()
        if not self.done:
            self.exchange.end(None)
        self.done = True

    # --- one order after the other

    def _next(self, first: FirstStep | None = None) -> None:
        """Wait for the next order; evaluate meanwhile if asked to.

        `first` is its first step, if that is done.
        """
        while True:
            work = self.exchange.next_work()
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
                self._replica.finish(order, trains=not self.only_evaluates)
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
            self._steps = self._steps_of(order)
        if order.brings == "model":  # else the optimizer has not stepped yet
            self._set_progress(order.progress)

    def _begin_first_step(self, order: TrainOrder, momentum: ArrayRecord | None = None) -> None:
        """Begin the first step of a round on the script's own model."""
        self._first = self._replica.begin_first_step(order.momentum_policy, momentum)
        self._steps = self._steps_of(order)

    def _steps_of(self, order: TrainOrder) -> LocalSteps:
        return LocalSteps(order, self.exchange.worker.slowdown, self._replica.device)

    def _finish(self) -> None:
        """Report the steps of the current order, and wait for the next one or begin its round."""
        assert self._steps is not None
        assert self._result is not None
        order = self._steps.order
        self._leave_out_pause()
        self._result.set_result(self._replica.report(self._steps))
        self._result = None
        if order.next_indices is None:
            self._next()
        else:
            self._begin_first_step(order)

    # --- averages of gradients

    def exchange_gradients(self, calls_step: bool) -> None:
        """Average the gradients before the optimizer's step does, so that the average is clipped.

        `calls_step` says whether the script calls `Session.step`.
        """
        if self._left_out and not calls_step and not self._has_stepped:
            self._end_gradient_step()  # that of the last step
        if self.averages_gradients and self._next_steps is None:
            self._exchange_gradient(self._replica.has_gradients())

    def _before_step(
        self, _: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Average the gradients before the optimizer's step uses them, or after its closure."""
        if not self.averages_gradients:
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

    def _end_gradient_step(self) -> None:
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

    # --- inside

    def _check(self, order: TrainOrder) -> None:
        """Raise UsageError for what a script cannot do."""
        by_loss = self.sampler is not None and self.sampler.by_loss
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
        if self.evaluation is None:
            raise UsageError("the script does not call session.evaluate before its training loop")
        self._replica.own_round = 0
        return self.evaluation.report(self._replica.model, self._replica.device, order)

    def _set_progress(self, progress: float) -> None:
        self.progress = progress
        for scheduler in self.schedulers:
            rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, (base, factor) in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = base * factor(0)
