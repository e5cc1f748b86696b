"""Optimizers of a worker, and the state that they keep between orders."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..errors import UsageError
from ..flower.array_records import ArrayView, elements_of, record_of, view_record
from ..protocol import COUNTERS, GRAD_SCALER, MOMENTUM, SLOTS, state_name
from .model_io import SHORT_DTYPES
from .step import LossScaler
from .transfer import tensor_on


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer, whose learning rate `set_learning_rate` sets for each order.

    `LocalSGD` documents the settings. `fused` optimizers use one kernel for all parameters; None
    leaves the choice to torch.

    ValueError if the name is unknown.
    """
    both: dict[str, Any] = {"lr": 1.0, "weight_decay": weight_decay, "fused": fused}
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=momentum, nesterov=nesterov, **both)
    if name == "adamw":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.999), **both)
    raise ValueError(f"optimizer = {name!r} must be one of {', '.join(map(repr, SLOTS))}")


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""``(model) -> optimizer`` with the user's parameter groups and learning rates."""


def custom_optimizer(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the user's optimizer for a model; its learning rates are those at the schedule's peak.

    UsageError if it is not an optimizer of torch, or `check_optimizer` refuses it.
    """
    optimizer = make(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"task: optimizer(model) returned a {type(optimizer).__name__}, expected a "
            "torch.optim.Optimizer"
        )
    check_optimizer(model, optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # torch's name for it
    return optimizer


def can_fuse(model: nn.Module, device: torch.device) -> bool:
    """Return whether a fused optimizer can update all parameters of a model on this device.

    On a CPU, fused optimizers are not faster and round differently.
    """
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return (
        device.type == "cuda"
        and not sparse
        and all(parameter.is_floating_point() for parameter in model.parameters())
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set an optimizer's learning rate; those of a custom one are multiplied by it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("initial_lr", 1.0)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if an optimizer is not the model's, or its state not one per parameter."""
    name, own = type(optimizer).__name__, set(model.parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(parameter not in own for parameter in held):
        raise UsageError(
            f"optimizer: {foreign} of its {len(held)} parameters are not the model's; create it "
            "from the parameters of this model"
        )
    if any("LBFGS" in kind.__name__ for kind in type(optimizer).__mro__):
        raise UsageError(
            f"optimizer: {name} computes curvature from its last steps, between which averages "
            "move the weights; use another one, such as SGD or AdamW"
        )
    if missing := {"state", "param_groups"} - optimizer.state_dict().keys():
        raise UsageError(
            f"optimizer: state_dict() of {name} has no {sorted(missing)[0]!r}, as those of torch "
            "do; pass the optimizer that it wraps"
        )


# --- state

_NUMBER = "number:"
"""Prefix of a slot whose value is a Python number in the optimizer's state."""


class OptimizerState:
    """State of a model's optimizer between orders, as their policy says.

    On the wire and in settings it is called momentum, because SGD has no other state. In a record,
    `state_name` names the state of each parameter. `scaler` is the one of float16, whose state
    belongs to it. With `fill`, the zeros of an empty state are created here and not in the first
    step, because torch's fused SGD needs the state of all parameters or none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fill: bool = False,
        scaler: LossScaler | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._fill = fill and optimizer.defaults.get("momentum") != 0
        self._scaler = scaler
        self._kept: list[object] = []
        """The last record of a node, its arrays, and the optimizer's values to which they refer."""

    def begin(
        self, policy: str, sent: ArrayRecord | None, node_state: RecordDict | None = None
    ) -> None:
        """Set the state for the steps of an order, from what it has sent or the node has kept.

        Without `node_state`, the optimizer itself has kept it.
        """
        kept: Any = None if node_state is None else node_state.get(MOMENTUM)
        before = sent or kept
        if self._scaler is not None and before and GRAD_SCALER in before:
            self._scaler.load(before[GRAD_SCALER].numpy())
        if policy == "reset":
            self.load(None)
        elif policy == "average" or sent is not None:
            self.load(sent)
        elif node_state is not None and not self._is_current(node_state):
            self.load(kept, copy=False)

    def end(
        self, policy: str, node_state: RecordDict | None = None
    ) -> tuple[ArrayRecord | None, bool]:
        """Keep the state after an order; return what to send of it, and whether it was zeroed.

        It becomes zero, and is not sent, if it is not finite, as after an overflow.
        """
        is_zeroed = policy != "reset" and not self.is_finite()
        if is_zeroed:
            self.zero()
        if policy == "average":
            return (None if is_zeroed else self.record()), is_zeroed
        if policy == "keep" and node_state is not None and not self._is_current(node_state):
            kept = self.record(copy=False)
            if self._scaler is not None:
                kept[GRAD_SCALER] = view_record({GRAD_SCALER: self._scaler.state})[GRAD_SCALER]
            if kept:
                node_state[MOMENTUM] = kept
            else:  # not that of the order before
                node_state.pop(MOMENTUM, None)
            if self._scaler is None:  # whose state the record does not follow
                self._kept = [kept or None, *kept.values(), *self._values()]
        return None, is_zeroed

    def _is_current(self, node_state: RecordDict) -> bool:
        """Return whether a node's record and the optimizer still have the same tensors."""
        kept: Any = node_state.get(MOMENTUM)
        now = [kept, *(kept or {}).values(), *self._values()]
        return len(now) == len(self._kept) and all(map(operator.is_, now, self._kept))

    def _values(self) -> list[object]:
        return [value for state in self._optimizer.state.values() for value in state.values()]

    def record(self, copy: bool = True) -> ArrayRecord:
        """Return the state; empty before the first step.

        Without `copy`, the arrays refer to the optimizer's own tensors, which the next step
        changes.
        """
        arrays: dict[str, Array] = {}
        for name, slot, tensor in self._tensors():
            short = slot in COUNTERS or tensor.dtype in SHORT_DTYPES  # torch counts in float64
            copied = tensor.detach().to("cpu", copy=True) if copy else tensor.detach()
            arrays[state_name(slot, name)] = TensorArray(
                copied, torch.float32 if short else tensor.dtype
            )
        return record_of(arrays)

    def load(self, record: ArrayRecord | None, copy: bool = True) -> None:
        """Set the state from a record; None sets it to zero.

        A parameter whose state is missing or incomplete in the record begins with zero. State of a
        parameter's shape gets the parameter's strides, which fused optimizers require. Without
        `copy`, the optimizer uses the record's memory or tensors where possible.
        """
        self._kept = []
        slots, state = slots_of(self._optimizer), self._optimizer.state
        for name, parameter in self._model.named_parameters():
            if names := _names_in(record or {}, name, slots):
                assert record is not None
                state[parameter] = {
                    slot.removeprefix(_NUMBER): self._value(record[key], parameter, slot, copy)
                    for slot, key in names.items()
                }
            elif self._fill and parameter.requires_grad:
                state[parameter] = {
                    slot: torch.zeros((), dtype=torch.float32, device=parameter.device)
                    if slot in COUNTERS
                    else torch.zeros_like(parameter)
                    for slot in slots
                }
            else:
                state.pop(parameter, None)

    def zero(self) -> None:
        """Set the state to zero, in place, because the node's record may refer to its tensors.

        That of a custom optimizer is then removed: zero may not be what it begins with.
        """
        for _, _, tensor in self._tensors():
            tensor.zero_()
        if not slots_of(self._optimizer):
            self._optimizer.state.clear()

    def is_finite(self) -> bool:
        """Return whether the state is finite, with one synchronization of the device."""
        tensors = [t for t in self._values() if isinstance(t, Tensor) and t.is_floating_point()]
        tensors = [t._values() if t.is_sparse else t for t in tensors]
        if all(t.is_cpu for t in tensors):  # faster, and a wait for each costs nothing
            norms = torch._foreach_norm(tensors) if tensors else []
            is_finite = all(map(math.isfinite, map(float, norms)))
        else:
            is_finite = bool(get_total_norm(tensors).isfinite())
        if is_finite:
            return True
        return all(bool(t.isfinite().all()) for t in tensors)  # only the sum of squares overflowed

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the parameter's name, slot and tensor of the whole state."""
        kind, every = type(self._optimizer).__name__, self._optimizer.state
        slots, others = slots_of(self._optimizer), set(every)
        for name, parameter in self._model.named_parameters():
            others.discard(parameter)
            kept = every.get(parameter, {})
            for slot in slots or kept:
                value = kept.get(slot)
                if isinstance(value, Tensor):
                    yield name, slot, value
                elif isinstance(value, int | float):
                    dtype = torch.float64 if type(value) is float else None
                    yield name, _NUMBER + slot, torch.tensor(value, dtype=dtype)
                elif value is not None:
                    raise UsageError(
                        f"the state {slot!r} of {kind} is a {type(value).__name__}; only tensors "
                        "and numbers can be kept between rounds"
                    )
        if others and not slots:
            raise UsageError(
                f"{kind} has state that is of no parameter of the model; only that of parameters "
                "can be kept between rounds"
            )

    def _value(
        self, array: Array, parameter: nn.Parameter, slot: str, copy: bool
    ) -> Tensor | int | float:
        """Return a value of a record as the optimizer keeps it."""
        tensor = array.tensor if isinstance(array, TensorArray) else tensor_on(elements_of(array))
        if slot.startswith(_NUMBER):
            number: int | float = tensor.item()
            return number
        is_counter = slot in COUNTERS
        if (
            not isinstance(array, TensorArray)
            and parameter.dtype in SHORT_DTYPES
            and not is_counter
        ):
            tensor = tensor.to(parameter.dtype)
        groups = self._optimizer.param_groups
        counts_on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        on_cpu = is_counter and not counts_on_device
        device = torch.device("cpu") if on_cpu else parameter.device
        tensor = tensor.to(device, copy=copy)
        same_kind = tensor.shape == parameter.shape and tensor.layout == parameter.layout
        if not same_kind or tensor.stride() == parameter.stride():
            return tensor
        strided = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).detach()
        return strided.copy_(tensor)


class TensorArray(ArrayView):
    """A Flower array that refers to a tensor; one on an accelerator is copied when it is read."""

    tensor: Tensor
    _host_dtype: torch.dtype

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.__dict__.update(
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stype="numpy.ndarray",
            tensor=tensor,
            _host_dtype=dtype,
        )

    @property
    def memory(self) -> npt.NDArray[Any]:
        """The elements on the host, contiguous also if the tensor is channels-last."""
        there = self.tensor.to("cpu", self._host_dtype).contiguous()
        elements: npt.NDArray[Any] = there.numpy()
        return elements


TensorArray.__qualname__ = ArrayView.__qualname__  # Flower writes it on the wire


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of an optimizer's state tensors per parameter; empty if they are not known.

    Those of a custom optimizer are only known once it has a state.
    """
    known = {torch.optim.SGD: "sgd", torch.optim.AdamW: "adamw"}
    name = known.get(type(optimizer))
    return SLOTS[name] if name and not optimizer.defaults.get("amsgrad") else ()


def _names_in(record: Mapping[str, Any], parameter: str, slots: Sequence[str]) -> dict[str, str]:
    """Return the names of a parameter's state in a record, by slot; empty if it is incomplete."""
    if slots:
        names = {slot: state_name(slot, parameter) for slot in slots}
        return names if all(key in record for key in names.values()) else {}
    ending = state_name("", parameter)
    names = {key.removesuffix(ending): key for key in record if key.endswith(ending)}
    if parameter in record:
        names[SLOTS["sgd"][0]] = parameter
    return names
