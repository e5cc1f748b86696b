"""Send functions and data of the user's program to worker processes, with the state of its modules.

What the program's own script defines travels by value, and other modules of the user by name. Large
arrays are in shared memory, once for all processes.
"""

import contextlib
import dis
import importlib
import io
import os
import pickle
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from ...flower.array_records import AnyArray, Kind, Layout, is_plain
from .shared_memory import BufferPool, Channel, Payload, filled

_INLINE_TENSOR_BYTES = 1 << 16
"""Smaller tensors are pickled with the object."""


def ship(content: object, pool: BufferPool) -> Payload:
    """Pack functions and data of the user, for worker processes.

    What is defined in ``__main__`` is pickled by value (cloudpickle). The user's other modules are
    imported by name, so that each class exists once. Then their variables, and attributes of their
    classes and functions, get the values that they have here; locks and the like stay as imported.

    Large tensors and arrays travel in shared memory, once for all processes. They are
    copy-on-write, so a worker's changes stay private.

    UsageError if there is not enough memory; any exception of cloudpickle, as for an open file.
    """
    pickler = _ByValue()
    body = pickler.dumps(content)
    variables = [v for name in pickler.modules for v in _variables(name, pickler)]  # finds more
    # In one block: each one needs open files.
    arrays = [array for _, array, _ in pickler.arrays.values()]
    layout = Layout.of((f"{i}", a.dtype.str, a.shape) for i, a in enumerate(arrays))
    memory = filled(pool.new_memory(layout), layout, arrays)
    shipped = Shipped(
        _torch_settings(), pickler.modules, variables, body, memory.block.number, layout.kinds
    )
    return Payload(pickle.dumps(shipped), {memory.block.number: memory})


class Shipped(NamedTuple):
    """Result of `ship`; received like any other object, and then unpacked."""

    settings: Sequence[Callable[[], object]]
    modules: Sequence[str]
    variables: Sequence[tuple[str, str, bytes]]
    body: bytes
    block: int
    kinds: Sequence[Kind]

    def unpack(self, channel: Channel) -> Any:
        """Take over the state of the process that shipped this, and return the content."""
        for setting in self.settings:
            setting()
        memory = channel.attached[self.block].copy_on_write().memory()
        arrays = Layout.of(self.kinds).views(memory)
        content = _WithArrays(self.body, arrays).load()
        for name in self.modules:
            importlib.import_module(name)
        for name, path, pickled in self.variables:
            *owners, attribute = path.split(".")
            try:
                owner = reduce(getattr, owners, sys.modules[name])
                if attribute not in vars(owner) or not _same(vars(owner)[attribute], pickled):
                    setattr(owner, attribute, _WithArrays(pickled, arrays).load())
            except Exception as error:
                reason = f"{name}.{path} of the program cannot be set in a worker"
                raise ImportError(f"{reason}: {type(error).__name__}: {error}") from error
        return content


def _torch_settings() -> list[Callable[[], object]]:
    """Return calls that repeat the settings of torch in another process."""
    if (torch := sys.modules.get("torch")) is None:
        return []
    calls: list[Callable[[], object]] = [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
    ]
    with contextlib.suppress(RuntimeError):  # the program has used torch's newer names, the flags
        precision = torch.get_float32_matmul_precision()
        calls.append(partial(torch.set_float32_matmul_precision, precision))
    flags = ["cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision"]
    flags += ["cudnn.benchmark", "cudnn.deterministic"]
    try:
        calls.append(partial(_set_flag, "cudnn.allow_tf32", torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # likewise
        flags += ["cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"]
    return calls + [partial(_set_flag, f, attrgetter(f)(torch.backends)) for f in flags]


def _set_flag(flag: str, value: object) -> None:
    owner, _, name = flag.rpartition(".")
    setattr(attrgetter(owner)(sys.modules["torch"].backends), name, value)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves large arrays out, and notes them and the user's modules that objects refer to."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer)
        self.modules: list[str] = []
        self.arrays: dict[int, tuple[int, AnyArray, object]] = {}
        """Large arrays by the id of their object: index, array and the object itself."""

    def dumps(self, content: object) -> bytes:
        """Return the pickled object; of one that cannot be pickled, no arrays are noted."""
        self._buffer.seek(0)
        self._buffer.truncate()
        self.clear_memo()
        before = dict(self.arrays)
        try:
            self.dump(content)
        except BaseException:
            self.arrays = before
            raise
        return self._buffer.getvalue()

    def reducer_override(self, content: Any) -> Any:
        """Leave large tensors and arrays out, and the rest to cloudpickle."""
        if content is os.environ:  # each process has its own
            return getattr, (os, "environ")
        if callable(content) or isinstance(content, types.ModuleType):  # not each of many samples
            self.modules += (name for name in _users_modules(content) if name not in self.modules)
        is_array = type(content) in (np.ndarray, np.memmap)
        array = content if is_array else _elements_of_tensor(content)
        if array is None or array.nbytes < _INLINE_TENSOR_BYTES or not is_plain(array.dtype):
            return super().reducer_override(content)
        new = len(self.arrays), array, content
        return _array_at, (self.arrays.setdefault(id(content), new)[0], not is_array)


def _users_modules(content: Any) -> Iterator[str]:
    """Return the user's modules that an object is, belongs to, or imports when it is called."""
    names = [getattr(content, "__module__", None)]
    if isinstance(content, types.ModuleType):
        names = [content.__name__]
    elif isinstance(content, types.FunctionType):
        steps = dis.get_instructions(content.__code__)
        found = [step.argval for step in steps if step.opname in ("IMPORT_NAME", "IMPORT_FROM")]
        names += found + [f"{content.__globals__.get('__package__')}.{name}" for name in found]
    for name in (name for name in names if isinstance(name, str)):
        file = getattr(sys.modules.get(name), "__file__", None)
        is_own = isinstance(file, str) and not file.startswith(_STDLIB) and not _SITE.search(file)
        if is_own and name.partition(".")[0] not in ("__main__", "flower_blsgd"):
            yield name


_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_SITE = re.compile(r"[/\\](site|dist)-packages[/\\]")


def _variables(module: str, pickler: _ByValue) -> Iterator[tuple[str, str, bytes]]:
    """Return the variables of a module, and the attributes of its classes and functions."""
    owners: list[tuple[str, Any]] = [("", sys.modules[module])]
    for prefix, owner in owners:
        for name, value in list(vars(owner).items()):
            is_code = isinstance(value, type | types.FunctionType)
            is_descriptor = prefix and hasattr(type(value), "__get__") and not is_code
            if name.startswith("__") or not name.isidentifier() or is_descriptor:
                continue
            if is_code and (value.__module__, value.__qualname__) == (module, prefix + name):
                owners.append((f"{prefix}{name}.", value))
            with contextlib.suppress(Exception):  # a lock or an open file
                yield module, prefix + name, pickler.dumps(value)


def _elements_of_tensor(content: Any) -> AnyArray | None:
    """Return a plain CPU tensor's elements; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(content) is not torch.Tensor or content.requires_grad:
        return None
    if content.device.type != "cpu" or content.layout is not torch.strided:
        return None
    try:
        elements: AnyArray = content.numpy()
    except (TypeError, RuntimeError):  # numpy lacks bfloat16, conjugate views and others
        return None
    return elements


class _WithArrays(pickle.Unpickler):
    def __init__(self, content: bytes, arrays: Sequence[AnyArray]) -> None:
        super().__init__(io.BytesIO(content))
        self._arrays = arrays

    def find_class(self, module: str, name: str) -> Any:
        """Return the named global; the function that finds an array gets the arrays."""
        found = super().find_class(module, name)
        return partial(found, self._arrays) if found is _array_at else found


def _array_at(arrays: Sequence[AnyArray], index: int, is_torch: bool) -> Any:
    """Return a shipped tensor or array."""
    if not is_torch:
        return arrays[index]
    import torch

    return torch.from_numpy(arrays[index])


def _same(value: object, pickled: bytes) -> bool:
    """Return whether a value is pickled like this, apart from cloudpickle's random ids."""
    try:
        own = (pickler := _ByValue()).dumps(value)
    except Exception:  # a lock
        return False
    return not pickler.arrays and _ID.sub(b"", own) == _ID.sub(b"", pickled)


_ID = re.compile(rb"[0-9a-f]{32}")
