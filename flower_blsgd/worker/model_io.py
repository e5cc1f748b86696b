"""Conversion of a model's tensors to and from Flower records."""

import hashlib
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError, first_line
from ..flower.array_records import AnyArray, Layout, elements_of, flat_like, flat_of, flat_record
from .transfer import copy_to_device, copy_to_host, tensor_on


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
            found[name] = tensor
    return found


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that are not sent, by name.

    These are parameters without ``requires_grad``, such as the base of a LoRA adapter, and large
    buffers of integers. They must be equal on all workers.
    """
    every = model.state_dict(keep_vars=True).items()
    return {name: tensor.detach() for name, tensor in every if not _is_sent(tensor)}


def share_frozen(model: nn.Module, other: nn.Module) -> None:
    """Let a model use the memory of another one, of the same kind, for its frozen tensors."""
    frozen = frozen_tensors(other)
    for name, tensor in model.state_dict(keep_vars=True).items():
        theirs = frozen.get(name)
        if theirs is not None and (theirs.shape, theirs.dtype) == (tensor.shape, tensor.dtype):
            tensor.data = theirs


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
            part = part.float() if tensor.dtype in SHORT_DTYPES else part
            safetensors.numpy.save({"": part.cpu().numpy()})
        else:
            _digest(part.clone(memory_format=torch.contiguous_format))
    except Exception as error:  # of many kinds: sparse, nested, quantized, without data
        return first_line(error).partition(". ")[0]
    return ""


def _dtype_sent(tensor: Tensor) -> str:
    """Return the name of the dtype in which a tensor travels: float32 for 16 bits."""
    dtype = torch.float32 if tensor.dtype in SHORT_DTYPES else tensor.dtype
    return str(dtype).removeprefix("torch.")


SHORT_DTYPES = torch.bfloat16, torch.float16
"""Types that travel and are averaged as float32, which holds their values exactly."""


def first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the first tensor whose shape differs, with both shapes; empty if none does."""
    shapes = [{name: tuple(part.shape) for name, part in side.items()} for side in (theirs, ours)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        there, here = (side.get(name, "none") for side in shapes)
        if there != here:
            return f"tensor {name!r} has shape {there} in the global model, {here} in this worker's"
    return ""


def _check_shapes(record: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    if different := first_difference(record, own):
        last = f"if training changes it, make it as large from the start, or {_SCRATCH}"
        raise UsageError(f"model: {different}; {last}")


def load_state(model: nn.Module, arrays: ArrayRecord) -> None:
    """Overwrite the tensors of a model; see `SentTensors.load`."""
    SentTensors(model).load(arrays)


def state_record(model: nn.Module, like: ArrayRecord | None = None) -> ArrayRecord:
    """Return a copy of the tensors of a model; see `SentTensors.record`."""
    return SentTensors(model).record(like)


class SentTensors:
    """The tensors of a model that are sent, and copies of them from and to records.

    Finding them takes longer than copying those of a small model. So they are found once, and again
    when a tensor or a module has been replaced, frozen or resized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()

    def load(self, arrays: ArrayRecord) -> None:
        """Overwrite the tensors that are sent, or those of the whole state dict.

        Returns when the record's memory may be reused. UsageError names the first difference in
        names or shapes.
        """
        self._load(self._named_in(arrays), arrays)

    def record(self, like: ArrayRecord | None = None) -> ArrayRecord:
        """Return a copy of the tensors that are sent, in one buffer.

        Tensors of 16 bits become float32. With `like`, the record has the same tensors as this one,
        and a buffer of the same kind, see `flat_like`. UsageError if training has changed a shape.
        """
        return self._record(self._named_in(like), like)

    def load_gradients(self, arrays: ArrayRecord) -> None:
        """Overwrite the gradients of the model with those in a record, and its buffers; see `load`.

        A parameter without a gradient keeps none if that in the record is zero: no worker used it.
        """
        own, missing = self._gradients_in(arrays)
        self._load(own, arrays)
        for name, parameter in missing.items():
            if elements_of(arrays[name]).any():
                parameter.grad = own[name]

    def gradients(self, like: ArrayRecord) -> ArrayRecord:
        """Return a copy of the model's gradients, and of its buffers, as `record` of its tensors.

        The gradient of a parameter without one is zero.
        """
        return self._record(self._gradients_in(like)[0], like)

    def _gradients_in(
        self, record: ArrayRecord
    ) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
        """Return the gradients and buffers in a record, and the parameters without a gradient."""
        own, missing = dict(self._named_in(record)), {}
        for name, tensor in own.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                if tensor.grad is None:
                    missing[name] = tensor
                    own[name] = torch.zeros_like(tensor)
                else:
                    tensor.grad = tensor.grad.to_dense()
                    own[name] = tensor.grad
        return own, missing

    def _load(self, own: Mapping[str, Tensor], arrays: ArrayRecord) -> None:
        flat = flat_of(arrays)
        if flat is None or flat.layout != self._layout:
            _check_shapes(arrays, own)
        elif own is self._tensors and self._bytes:
            memory = flat.bytes
            for where, elements in self._bytes:
                elements[:] = memory[where]
            torch.autograd.graph.increment_version(own.values())
            return
        with torch.no_grad():
            if flat is not None and moves_in_pieces(own):
                copy_to_device(flat, own)
            elif own:
                sources = [tensor_on(elements_of(arrays[name])) for name in own]
                torch._foreach_copy_(list(own.values()), sources)

    def _record(self, own: Mapping[str, Tensor], like: ArrayRecord | None) -> ArrayRecord:
        layout = self._layout if own.keys() == self._tensors.keys() else _layout_of(own)
        if like is not None and ((flat := flat_of(like)) is None or flat.layout != layout):
            _check_shapes(like, own)
        record = flat_record(layout) if like is None else flat_like(like, layout)
        flat = flat_of(record)
        assert flat is not None
        with torch.no_grad():
            if own is self._tensors and self._bytes:
                memory = flat.bytes
                for where, elements in self._bytes:
                    memory[where] = elements
            elif moves_in_pieces(own):
                copy_to_host(own, flat)
            elif own:
                targets = [torch.from_numpy(array.numpy()) for array in record.values()]
                torch._foreach_copy_(targets, list(own.values()))
        return record

    def _named_in(self, record: ArrayRecord | None) -> dict[str, Tensor]:
        """Return the tensors that a record has: those that are sent, or the state dict."""
        if self._has_changed():
            self._find()
        own, flat = self._tensors, None if record is None else flat_of(record)
        if record is None or (flat and flat.layout == self._layout) or record.keys() == own.keys():
            return own
        state = self._model.state_dict(keep_vars=True)
        return state if record.keys() == state.keys() else own

    def _has_changed(self) -> bool:
        entries, marks = self._look()
        return not (
            self._is_whole
            and marks == self._marks
            and len(entries) == len(self._entries)
            and all(map(operator.is_, entries, self._entries))
        )

    def _look(self) -> tuple[list[object], list[object]]:
        """Return tensors and modules, and what else may change, also through ``tensor.data``."""
        entries: list[object] = [entry for store in self._stores for entry in store.values()]
        marks: list[object] = [parameter.requires_grad for parameter in self.parameters]
        marks += [(t.data_ptr(), t.shape, t.is_contiguous()) for t in self._tensors.values()]
        return entries, marks

    def _find(self) -> None:
        self.modules = list(self._model.modules())
        self.parameters = list(self._model.parameters())
        self._stores = [s for m in self.modules for s in (m._parameters, m._buffers, m._modules)]
        self._tensors = sent_tensors(self._model)
        self._entries, self._marks = self._look()
        # A custom state_dict may have tensors that are in no store.
        self._is_whole = set(map(id, self._tensors.values())) <= set(map(id, self._entries))
        self._layout = _layout_of(self._tensors)
        self._bytes = _bytes_of(self._tensors, self._layout)


def _layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return Layout.of((n, _dtype_sent(t), tuple(t.shape)) for n, t in tensors.items())


def _bytes_of(tensors: Mapping[str, Tensor], layout: Layout) -> list[tuple[slice, AnyArray]]:
    """Return where each tensor is in a record, and its memory; empty if its bytes differ there."""
    if moves_in_pieces(tensors) or not all(
        t.is_contiguous() and t.dtype not in SHORT_DTYPES for t in tensors.values()
    ):
        return []
    memory = [t.detach().numpy().reshape(-1).view(np.uint8) for t in tensors.values()]
    pairs = zip(layout.places, memory, strict=True)
    return [(slice(p.offset, p.offset + len(m)), m) for p, m in pairs]


def moves_in_pieces(state: Mapping[str, Tensor]) -> bool:
    """Return whether a model is on an accelerator, so that it moves in pieces."""
    return any(tensor.device.type != "cpu" for tensor in state.values())


def model_fingerprint(model: nn.Module) -> str:
    """Return a string that is equal for models with the same tensors and frozen values.

    Of the values, an exact sum and a sample count: hashing all of a base model takes half a minute.
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
