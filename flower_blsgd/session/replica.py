"""The script's model and optimizer in the rounds of a run."""

import copy
import math
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..errors import UsageError
from ..protocol import TrainOrder, TrainReport
from ..worker.model_io import FrozenTensors, SentTensors, model_fingerprint
from ..worker.optimizer import OptimizerState
from ..worker.overlap import FirstStep
from ..worker.timing import StepClock


class LocalSteps:
    """Steps of the current order."""

    def __init__(self, order: TrainOrder, slowdown: float, device: torch.device) -> None:
        self.count = 0
        self.samples = 0
        self.losses: list[Tensor] = []
        self._slowdown = slowdown
        self._device = device
        self.begin(order)

    def begin(self, order: TrainOrder, seconds_before: float = 0.0) -> None:
        """Begin the steps of an order, of which some may be done."""
        self.order = order
        self.clock = StepClock(self._device, self._slowdown, seconds_before)

    def note(self, samples: int, losses: Tensor | None) -> None:
        """Count a step."""
        self.count += 1
        self.samples += samples
        if losses is not None:
            # A copy: the next step of a CUDA graph writes to the same memory.
            self.losses.append(losses.detach().to(torch.float32, copy=True))

    def is_complete(self) -> bool:
        """Return whether the order has no steps left, or its time is over."""
        order = self.order
        return self.count >= order.local_steps or self.clock.is_over(order.deadline_seconds)


class Replica:
    """Replica of the model on this worker's device, with its optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        state = optimizer.state_dict()
        self._first_state = copy.deepcopy(state["state"])
        moves = next(model.parameters()).device != device
        self.device = device
        self.model = model.to(device)
        self._optimizer = optimizer
        if moves and state["state"]:  # of a checkpoint
            optimizer.load_state_dict(state)  # moves it to the parameters
        self._sent = SentTensors(self.model)
        self._state = OptimizerState(self.model, optimizer)
        self._trained = [parameter.requires_grad for parameter in self._sent.parameters]
        self._frozen: FrozenTensors | None = None
        self.own_round = 0
        """Round after which the worker's own model is here; 0 for another model."""

    @property
    def fingerprint(self) -> str:
        """Text that is equal for equal models."""
        return model_fingerprint(self.model)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters that are trained."""
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, tensor in named if tensor.requires_grad]

    def arrays(self) -> ArrayRecord:
        """Return a copy of the tensors that are sent."""
        return self._sent.record()

    def own_model(self) -> ArrayRecord:
        """Return a copy of the worker's own model after a round; empty for another model."""
        return self.arrays() if self.own_round else ArrayRecord()

    def optimizer_state(self) -> ArrayRecord:
        """Return the optimizer's state, which the next step changes."""
        return self._state.record(copy=False)

    def undo_steps(self) -> None:
        """Restore the optimizer's state at the beginning; the first order brings a model."""
        groups = self._optimizer.state_dict()["param_groups"]
        state = copy.deepcopy(self._first_state)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def begin(self) -> None:
        """Note what no step may change."""
        self._first_state = {}
        self._frozen = FrozenTensors(self.model)
        self._frozen.begin()

    def load(self, order: TrainOrder, first: FirstStep | None = None) -> None:
        """Load the global model, and set the optimizer's state; or load an averaged gradient.

        With a first step, add its change to the model, and leave the optimizer's state. Without
        `overlap`, the round before that step failed, and the state becomes zero.
        """
        self.own_round = 0
        if first is not None and not order.overlap:
            self._state.zero()
        if first is not None and order.overlap:
            self._sent.load(order.arrays)
            first.add()
        elif order.brings == "model":
            self._sent.load(order.arrays)
            keeps = order.returns == "gradient" and order.momentum is None
            self._state.begin("keep" if keeps else order.momentum_policy, order.momentum)
        else:
            self._sent.load_gradients(order.arrays)
            if order.brings == "skip":
                self.drop_gradients()

    def drop_gradients(self) -> None:
        """Remove the gradients, so that the optimizer's step has no effect."""
        self._optimizer.zero_grad(set_to_none=True)

    def has_gradients(self) -> bool:
        """Return whether there are gradients, and all are finite."""
        grads = self._gradients()
        return bool(grads) and bool(torch.stack([g.isfinite().all() for g in grads]).all())

    def has_any_gradient(self) -> bool:
        """Return whether there are gradients."""
        return bool(self._gradients())

    def unscale(self) -> bool:
        """Divide the gradients by the scale of a GradScaler that leaves it to a fused optimizer.

        Returns False if they overflowed.
        """
        its: Any = self._optimizer
        if (scale := getattr(its, "grad_scale", None)) is not None:
            torch._foreach_mul_(self._gradients(), scale.double().reciprocal().float())
            its.grad_scale = None
        return not getattr(its, "found_inf", False)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def load_own_model(self, order: TrainOrder) -> bool:
        """Load the worker's own model that an order begins with; return whether there is one."""
        if order.overlap and order.own_model is not None:
            self._sent.load(order.own_model)
            return True
        return order.overlap and self.own_round == order.round - 1

    def begin_first_step(self, policy: str, momentum: ArrayRecord | None) -> FirstStep:
        """Set the optimizer's state, and return the step that begins on the worker's own model."""
        self.own_round = 0
        self._state.begin(policy, momentum)
        return FirstStep(self.model)

    def finish(self, arrays: ArrayRecord, trains: bool) -> None:
        """Load the final model."""
        self._sent.load(arrays)
        if trains:
            self._check_frozen()

    def report(self, steps: LocalSteps) -> TrainReport:
        """Return the result of an order.

        UsageError if a parameter was frozen or unfrozen, or a tensor changed that is not sent.
        """
        order, times = steps.order, steps.clock.end()
        momentum, is_zeroed = None, False
        if order.returns == "gradient":
            arrays = self._sent.gradients(like=order.arrays)
        else:
            self._check_trained()
            self._check_frozen(order.round)
            momentum, is_zeroed = self._state.end(order.momentum_policy)
            arrays = self._sent.record(like=order.arrays)
        has_losses = len(steps.losses) == steps.count > 0
        self.own_round = order.round
        rate = self._optimizer.param_groups[0].get("lr")  # None with Adafactor's own rate
        return TrainReport(
            min(steps.count, order.local_steps),
            order.batch_size,
            *times,
            losses=torch.cat(steps.losses).cpu().numpy() if has_losses else np.empty(0, np.float32),
            arrays=arrays,
            momentum=momentum,
            momentum_zeroed=int(is_zeroed),
            samples=steps.samples if order.local_steps else 1,
            learning_rate=math.nan if rate is None else float(rate),
        )

    def _check_frozen(self, round: int = 1) -> None:
        assert self._frozen is not None
        self._frozen.check(round)

    def _check_trained(self) -> None:
        now = [parameter.requires_grad for parameter in self._sent.parameters]
        if now != self._trained:
            names = (name for name, _ in self.model.named_parameters())
            changed = [n for n, a, b in zip(names, self._trained, now, strict=False) if a != b]
            raise UsageError(
                f"model: requires_grad of {changed[0] if changed else 'a parameter'!r} has changed "
                "since join; freeze and unfreeze parameters before join"
            )
