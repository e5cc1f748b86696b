"""Conversion of model weights and optimizer state to and from Flower records.

The optimizer's state is called momentum, like its record, because SGD has no other state.
"""

import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import safetensors.numpy
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from ..errors import UsageError, first_line
from ..flower.array_records import (
    ArrayView,
    Layout,
    elements_of,
    flat_like,
    flat_of,
    flat_record,
    record_of,
)
from ..protocol import COUNTERS, SLOTS, state_name
from .transfer import copy_to_device, copy_to_host, tensor_on

# --- weights


def sent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are trained, sent, averaged and saved, by name.

    These are the parameters with ``requires_grad``, the persistent buffers of floating point, and
    counters: integer buffers of one element. A tensor with several names, such as a tied weight, is
    sent once. See `frozen_tensors` for the others.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and _is_sent(tensor):
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that are not sent, by name.

    These are parameters without ``requires_grad``, such as the base of a LoRA adapter, and large
    buffers of integers. They must be equal on all workers.
    """
    every = model.state_dict(keep_vars=True).items()
    return {name: tensor.detach() for name, tensor in every if not _is_sent(tensor)}


def _is_sent(tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter):
        return tensor.requires_grad
    return tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 1


def check_model(model: nn.Module, values: bool = False) -> None:
    """Raise UsageError if a model has no trainable parameters, or tensors that cannot be sent.

    With `values`, also if it has a value that is not finite; use it for the model of round 1.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("model: no parameter has requires_grad = True; there is nothing to train")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name.rpartition(".")[2] == "_extra_state":
            reason = "comes from get_extra_state, which cannot be averaged; use a buffer instead"
        elif is_lazy(tensor):
            reason = "has no shape yet; give its layer all sizes, as in nn.Linear(64, 10)"
        elif refused := _refused(tensor):
            reason = (
                f"cannot be sent and saved ({refused}); use float32 or complex64, or {_SCRATCH}"
            )
        elif not _is_sent(tensor):
            continue
        elif any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            reason = "is expanded, so its elements share memory; copy it with clone()"
        elif values and not tensor.isfinite().all():
            reason = (
                "has values that are not finite, which cannot be averaged; for an observer of "
                f"quantization, call the model on a batch first; for a mask with -inf, {_SCRATCH}"
            )
        else:
            continue
        raise UsageError(f"model: {name!r} {reason}")


_SCRATCH = "use register_buffer(..., persistent=False)"


def _refused(tensor: Tensor) -> str:
    """Return why a tensor cannot be sent, written by safetensors or compared; empty if it can."""
    try:
        part = tensor.detach()[(slice(0),) * tensor.dim()]
        if _is_sent(tensor):
            part = part.float() if tensor.dtype in _SHORT else part
            safetensors.numpy.save({"": part.cpu().numpy()})
        else:
            _digest(part.clone(memory_format=torch.contiguous_format))
    except Exception as error:  # of many kinds: sparse, nested, quantized, without data
        return first_line(error).partition(". ")[0]
    return ""


def _dtype_sent(tensor: Tensor) -> str:
    """Return the name of the dtype in which a tensor travels: float32 for 16 bits."""
    dtype = torch.float32 if tensor.dtype in _SHORT else tensor.dtype
    return str(dtype).removeprefix("torch.")


_SHORT = torch.bfloat16, torch.float16
"""Types that travel and are averaged as float32, which holds their values exactly."""


def first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the first tensor whose shape differs, with both shapes; empty if none does."""
    shapes = [{name: tuple(part.shape) for name, part in side.items()} for side in (theirs, ours)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        there, here = (side.get(name, "none") for side in shapes)
        if there != here:
            return f"tensor {name!r} has shape {there} in the global model, {here} in this worker's"
    return ""


def _named_in(model: nn.Module, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model that a record has: those that are sent, or the state dict."""
    own = sent_tensors(model)
    if record.keys() == own.keys():
        return own
    state = model.state_dict()
    return state if record.keys() == state.keys() else own


def _check_shapes(record: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    if different := first_difference(record, own):
        last = f"if training changes it, make it as large from the start, or {_SCRATCH}"
        raise UsageError(f"model: {different}; {last}")


def load_state(model: nn.Module, arrays: ArrayRecord) -> None:
    """Overwrite the tensors of a model that are sent; see `sent_tensors`.

    A record of the whole state dict is loaded as a whole. A record in one buffer moves to an
    accelerator in pieces, see `copy_to_device`. Returns when its memory may be reused.

    UsageError if names or shapes differ; the message gives the first difference.
    """
    own = _named_in(model, arrays)
    _check_shapes(arrays, own)
    flat = flat_of(arrays) if moves_in_pieces(own) else None
    with torch.no_grad():
        if flat is not None:
            copy_to_device(flat, own)
        elif own:
            sources = [tensor_on(elements_of(arrays[name])) for name in own]
            torch._foreach_copy_(list(own.values()), sources)


def state_record(model: nn.Module, like: ArrayRecord | None = None) -> ArrayRecord:
    """Return a copy of the tensors of a model that are sent, in one buffer.

    Tensors of 16 bits become float32. With `like`, the record has the same tensors as this one, and
    a buffer of the same kind, see `flat_like`. From an accelerator, it is filled in pieces.

    UsageError as in `load_state`, if training has changed a shape.
    """
    own = sent_tensors(model) if like is None else _named_in(model, like)
    layout = Layout.of((n, _dtype_sent(tensor), tuple(tensor.shape)) for n, tensor in own.items())
    if like is not None and ((flat := flat_of(like)) is None or flat.layout != layout):
        _check_shapes(like, own)
    record = flat_record(layout) if like is None else flat_like(like, layout)
    with torch.no_grad():
        if moves_in_pieces(own):
            flat = flat_of(record)
            assert flat is not None
            copy_to_host(own, flat)
        elif own:
            targets = [torch.from_numpy(array.numpy()) for array in record.values()]
            torch._foreach_copy_(targets, list(own.values()))
    return record


def moves_in_pieces(state: Mapping[str, Tensor]) -> bool:
    """Return whether a model is on an accelerator, so that it moves in pieces."""
    return any(tensor.device.type != "cpu" for tensor in state.values())


def model_fingerprint(model: nn.Module) -> str:
    """Return a string that is equal for models with the same tensors and frozen values.

    The names, shapes and dtypes of all tensors count, and of the content of `frozen_tensors` an
    exact sum and a sample, because copying and hashing all of a base model takes half a minute.
    """
    every = sorted(model.state_dict().items())
    digest = hashlib.sha256(repr([(n, tuple(t.shape), str(t.dtype)) for n, t in every]).encode())
    for _, tensor in sorted(frozen_tensors(model).items()):
        digest.update(_digest(tensor))
    return digest.hexdigest()[:16]


class FrozenTensors:
    """The tensors of a model that are not sent, to find changes, which would be lost.

    A change in place, or a new tensor under the name, is found in every round without a look at the
    values. Those are compared after rounds 1, 2, 4, 8, ... for changes through ``tensor.data``.
    """

    def __init__(self, model: nn.Module) -> None:
        every = model.state_dict(keep_vars=True).items()
        names = {id(tensor): name for name, tensor in every if not _is_sent(tensor)}
        stores = (s for module in model.modules() for s in (module._parameters, module._buffers))
        places = [(s, key, names[id(t)]) for s in stores for key, t in s.items() if id(t) in names]
        self._places: list[tuple[dict[str, Any], str, str]] = places
        self._tensors: list[Tensor | None] = []
        self._marks: Sequence[object] = [None] * len(places)
        self._values = [b""] * len(places)
        self._lost = ""

    def begin(self, sent: Container[str] = ()) -> None:
        """Note the tensors before training, unless an order has them: one of the whole state dict.

        UsageError again if `check` has raised it.
        """
        if self._lost:
            raise UsageError(self._lost)
        self._are_sent = any(name in sent for *_, name in self._places[:1])
        for i in self._changed():
            tensor = self._tensors[i]
            self._values[i] = b"" if tensor is None else _digest(tensor)

    def check(self, round: int = 1) -> None:
        """Raise UsageError that names the first tensor that has changed since `begin`."""
        before = self._tensors  # held, so that no new tensor gets the address of an old one
        changed = self._changed()
        is_due = round > 0 and round & (round - 1) == 0
        for i in range(len(before)) if is_due and not self._are_sent else changed:
            old, new = before[i], self._tensors[i]
            if old is not None and (new is None or _digest(new) != self._values[i]):
                dtype = str(old.dtype).removeprefix("torch.")
                kind = "no requires_grad" if old.is_floating_point() else dtype
                self._lost = (
                    f"model: training changed {self._places[i][-1]!r} ({kind}), which is neither "
                    f"averaged nor saved; make it a floating-point buffer, or {_SCRATCH}"
                )
                raise UsageError(self._lost)

    def _changed(self) -> list[int]:
        """Look at the tensors again; return the numbers of those that are others or written to."""
        if self._are_sent:
            return []
        self._tensors = [store.get(key) for store, key, _ in self._places]
        marks = [_mark(tensor) for tensor in self._tensors]
        before, self._marks = self._marks, marks
        return [i for i, mark in enumerate(marks) if mark != before[i]]


def _mark(tensor: Tensor | None) -> object:
    """Return what differs after a tensor was replaced or written to, in a fraction of 1 us."""
    try:
        return tensor is None or (tensor.data_ptr(), tensor._version)
    except RuntimeError:  # an inference tensor, which torch refuses to write to
        return id(tensor)


def _digest(tensor: Tensor) -> bytes:
    """Return the sum of a tensor's 64-bit words, at most 4096 of the words, and the other bytes."""
    if tensor.device.type == "mps":  # whose sums of integers are not known to be exact
        tensor = tensor.cpu()
    content = tensor.contiguous().view(-1).view(torch.uint8)
    content = content.clone() if content.storage_offset() % 8 else content
    words = content[: len(content) // 8 * 8].view(torch.int64)
    parts = words.sum(), words[:: len(words) // 4096 + 1], content[8 * len(words) :]
    return b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)


# --- momentum

_NUMBER = "number:"
"""Prefix of a slot whose value is a Python number in the optimizer's state."""


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


def momentum_record(
    model: nn.Module, optimizer: torch.optim.Optimizer, copy: bool = True
) -> ArrayRecord:
    """Return the optimizer's state by `state_name`; empty before the first step.

    Without `copy`, the arrays refer to the optimizer's own tensors, which the next step changes.
    """
    arrays: dict[str, Array] = {}
    for name, _, slot, tensor in _state(model, optimizer):
        short = slot in COUNTERS or tensor.dtype in _SHORT  # of counters torch has float64
        copied = tensor.detach().to("cpu", copy=True) if copy else tensor.detach()
        dtype = torch.float32 if short else tensor.dtype
        arrays[state_name(slot, name)] = TensorArray(copied, dtype)
    return record_of(arrays)


def load_momentum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    record: ArrayRecord | None,
    copy: bool = True,
    fill: bool = False,
) -> None:
    """Set the optimizer's state from a record; None sets it to zero.

    A parameter whose state is missing or incomplete in the record begins with zero. State of a
    parameter's shape gets the parameter's strides, which fused optimizers require. Without `copy`,
    the optimizer uses the record's memory or tensors where possible. With `fill`, the zeros are
    created here and not in the first step, because torch's fused SGD needs the state of all
    parameters or none.
    """
    fill = fill and optimizer.defaults.get("momentum") != 0
    for name, parameter in model.named_parameters():
        names = _names_in(record or {}, name, slots_of(optimizer))
        if record is not None and names:
            kept = {slot: _tensor_of(record[key], parameter, slot) for slot, key in names.items()}
            copied = copy
        elif fill and parameter.requires_grad:
            kept = {slot: torch.zeros_like(parameter) for slot in slots_of(optimizer)}
            for slot in COUNTERS & kept.keys():
                kept[slot] = torch.zeros((), dtype=torch.float32)
            copied = False
        else:
            optimizer.state.pop(parameter, None)
            continue
        optimizer.state[parameter] = {
            slot.removeprefix(_NUMBER): tensor.item()
            if slot.startswith(_NUMBER)
            else _with_strides_of(
                parameter,
                tensor.to(_slot_device(optimizer, parameter, slot), copy=copied),
            )
            for slot, tensor in kept.items()
        }


def _tensor_of(array: Array, parameter: nn.Parameter, slot: str) -> Tensor:
    if isinstance(array, TensorArray):
        return array.tensor
    tensor = tensor_on(elements_of(array))
    was_short = parameter.dtype in _SHORT and slot not in COUNTERS and _NUMBER not in slot
    return tensor.to(parameter.dtype) if was_short else tensor


def _with_strides_of(parameter: nn.Parameter, state: Tensor) -> Tensor:
    """Return an optimizer's state with the strides of a parameter of the same shape."""
    same_kind = state.shape == parameter.shape and state.layout == parameter.layout
    if not same_kind or state.stride() == parameter.stride():
        return state
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device).detach().copy_(state)


def zero_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set the optimizer's state to zero, in place; that of a custom optimizer is removed."""
    if not slots_of(optimizer):
        optimizer.state.clear()
    for _, _, _, tensor in _state(model, optimizer):
        tensor.zero_()


def momentum_is_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's state is finite, with one synchronization of the device."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    tensors = [t for t in kept if isinstance(t, Tensor) and t.is_floating_point()]
    tensors = [t._values() if t.is_sparse else t for t in tensors]
    if not tensors or get_total_norm(tensors).isfinite():
        return True
    return all(bool(t.isfinite().all()) for t in tensors)  # only the sum of squares overflowed


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


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, str, Tensor]]:
    """Yield name, parameter, slot and tensor of the optimizer's whole state."""
    slots, others = slots_of(optimizer), set(optimizer.state)
    for name, parameter in model.named_parameters():
        others.discard(parameter)
        kept = optimizer.state.get(parameter, {})
        for slot in slots or kept:
            tensor = kept.get(slot)
            if isinstance(tensor, Tensor):
                yield name, parameter, slot, tensor
            elif isinstance(tensor, int | float):
                is_float = type(tensor) is float
                number = torch.tensor(tensor, dtype=torch.float64 if is_float else None)
                yield name, parameter, _NUMBER + slot, number
            elif tensor is not None:
                raise UsageError(
                    f"the state {slot!r} of {type(optimizer).__name__} is a "
                    f"{type(tensor).__name__}; only tensors and numbers can be kept between rounds"
                )
    if others and not slots:
        what = f"{type(optimizer).__name__} has state that is of no parameter of the model"
        raise UsageError(f"{what}; only that of parameters can be kept between rounds")


def _slot_device(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str
) -> torch.device:
    """Return the device of a slot: the CPU for counters unless fused, else the parameter's."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return torch.device("cpu") if slot in COUNTERS and not fused else parameter.device
