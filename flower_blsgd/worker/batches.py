"""Data sets of a worker, and the batches of its steps on its device.

A batch has the structure that PyTorch and Hugging Face give it: a pair, a tuple, a dict, or these
nested.
"""

import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from ..errors import UsageError, is_out_of_memory
from .loader import SampleReader, read_ahead

_LOG = logging.getLogger(__name__)

DATA_SHARE = 0.5
"""Share of an accelerator's free memory that data may use."""

Samples = Any
"""A pair (inputs, targets) of tensors, arrays or memory maps; a TensorDataset; a map-style Dataset;
or a `Subset` of one of these, which is not copied."""

Collate = Callable[[list[Any]], Any]
"""``(samples) -> batch``, like ``collate_fn`` of torch's DataLoader."""


# --- the structure of a batch


def map_tensors(
    batch: Any, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Return a batch with a function applied to its tensors, and `other` to its other leaves.

    Mappings become dicts; lists, tuples and named tuples keep their type.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(part, function, other) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [map_tensors(part, function, other) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return other(batch)


def channels_last_images(part: Tensor) -> Tensor:
    """Return images, which have four dimensions, in the channels-last memory format."""
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the parts of a batch that is a pair; UsageError for another structure."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    parts = len(batch) if isinstance(batch, tuple | list) else 1
    found = f"a {type(batch).__name__}" + (f" of {parts} parts" if parts != 1 else "")
    raise UsageError(
        f"task: a batch is {found}, not a pair (inputs, targets), so loss and metric must take the "
        "model and the whole batch: loss(model, batch) and metric(model, batch)"
    )


def micro_batches(batch: Any, num_samples: int, size: int) -> Iterator[tuple[Any, int]]:
    """Yield each micro-batch of at most `size` samples with its number of samples, in order.

    Their sizes differ by at most one. UsageError if a part of the batch is not a tensor with one
    row per sample.
    """

    def refuse(part: Any) -> Any:
        what = f"a {type(part).__name__}"
        if isinstance(part, Tensor):
            what = f"a tensor of shape {tuple(part.shape)}"
        raise UsageError(
            f"micro-batch-size = {size}: a part of a batch of {num_samples} is {what}, and only "
            "tensors with one row per sample can be split; set it to 0"
        )

    for rows in torch.arange(num_samples).tensor_split(-(-num_samples // size)):
        first, last = int(rows[0]), int(rows[-1]) + 1

        def cut(part: Tensor, first: int = first, last: int = last) -> Any:
            has_rows = part.dim() > 0 and len(part) == num_samples
            return part[first:last] if has_rows else refuse(part)

        yield map_tensors(batch, cut, refuse), last - first


# --- data sets


def num_samples(samples: Samples) -> int:
    """Return the number of samples of a data set."""
    tensors = tensor_parts(samples)
    return len(samples) if tensors is None else len(tensors[0])


def tensor_parts(samples: Samples) -> Sequence[Tensor] | None:
    """Return the tensors of a data set; None if it does not consist of tensors or arrays.

    Arrays become tensors that share their memory. UsageError if torch cannot read an array's
    memory.
    """
    if isinstance(samples, TensorDataset):
        return samples.tensors
    kinds = Tensor | np.ndarray
    if isinstance(samples, tuple | list) and all(isinstance(part, kinds) for part in samples):
        return [part if isinstance(part, Tensor) else _on_array(part) for part in samples]
    return None


def _on_array(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        raise UsageError(
            f"data: an array with dtype = {array.dtype.str!r} and strides = {array.strides} cannot "
            "become a tensor; copy it with np.ascontiguousarray(x, x.dtype.newbyteorder('='))"
        )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about read-only arrays
        return torch.from_numpy(array)


class BatchSource:
    """Source of batches on a worker's device, by sample index.

    Tensors move to an accelerator once, so that a batch is one gather operation there. Tensors that
    would take more than half of its free memory, divided by the workers that share it, stay on the
    host, with one line in the log; without `move`, all do. Then, and for other data sets, the host
    assembles every batch and copies it, on CUDA through pinned memory while the device computes.

    Samples of a map-style Dataset are read by `loader_workers` processes of a DataLoader, or by the
    calling thread if that is 0. The global random generators are seeded for each batch, so a random
    transform gives the same samples wherever it runs. With `collate`, tensors are also read sample
    by sample; the default is torch's ``default_collate``. ValueError for different lengths.
    """

    def __init__(
        self,
        samples: Samples,
        device: torch.device,
        move: bool = True,
        collate: Collate | None = None,
        loader_workers: int = 0,
        workers_on_device: int = 1,
    ) -> None:
        self._device = device
        self._chosen: Tensor | None = None
        if type(samples) is Subset:  # subclasses may change samples
            self._chosen = torch.as_tensor(samples.indices)
            samples = samples.dataset
        self._parts = tensor_parts(samples)
        if self._parts is not None and len({len(part) for part in self._parts}) != 1:
            lengths = ", ".join(str(len(part)) for part in self._parts)
            raise ValueError(f"the tensors of the data have different lengths: {lengths}")
        if self._parts is not None and collate is not None:
            samples, self._parts = TensorDataset(*self._parts), None
        self._dataset = samples
        self._reader = SampleReader(samples, collate or default_collate)
        self._loader_workers = loader_workers
        self._read_ahead: Callable[..., Iterator[Any]] | None = None
        if self._parts is not None and move:
            self._parts = _moved(self._parts, device, DATA_SHARE / workers_on_device)
        self.on_device = self._parts is not None and not _elsewhere(self._parts, device)
        if self._chosen is not None and self.on_device:
            self._chosen = self._chosen.to(device)

    def __len__(self) -> int:
        if self._chosen is not None:
            return len(self._chosen)
        return len(self._dataset) if self._parts is None else len(self._parts[0])

    def batch(self, indices: Tensor, seed: int = 0) -> Any:
        """Return the samples of these indices as one batch, on the worker's device.

        The indices need no copy if they are on this device (with `on_device`) or on the host.
        """
        indices = self._in_dataset(indices)
        if self._parts is None:
            with self._reader.own_randomness():
                return self._brought(self._reader[seed, indices.tolist()])
        parts = tuple(part.index_select(0, indices.to(part.device)) for part in self._parts)
        return parts if self.on_device else self._brought(parts)

    def batches(
        self, indices: Tensor, size: int | list[int], seed: int = 0, seed_step: int = 1
    ) -> Generator[Any, None, None]:
        """Return the batches of `size` consecutive indices, in order; a list has all sizes.

        Processes begin to read with this call. Batch k has the seed ``seed + k * seed_step``.
        """
        parts = torch.split(indices, size) if len(indices) else ()
        seeds = (seed + number * seed_step for number in range(len(parts)))
        if self._parts is not None or not self._loader_workers:
            return (self.batch(*wanted) for wanted in zip(parts, seeds, strict=True))
        if self._read_ahead is None:
            pinned = self._device.type == "cuda"
            self._read_ahead = read_ahead(self._reader, self._loader_workers, pinned)
        wanted = zip(seeds, (self._in_dataset(some).tolist() for some in parts), strict=True)
        return (self._brought(batch) for batch in self._read_ahead(list(wanted)))

    def _in_dataset(self, indices: Tensor) -> Tensor:
        return indices if self._chosen is None else self._chosen[indices.to(self._chosen.device)]

    def _brought(self, batch: Any) -> Any:
        def bring(part: Tensor) -> Tensor:
            if self._device.type == "cuda" and part.device.type == "cpu":
                part = part if part.is_pinned() else part.pin_memory()
                return part.to(self._device, non_blocking=True)
            return part.to(self._device)

        return map_tensors(batch, bring)


def _moved(parts: Sequence[Tensor], device: torch.device, share: float) -> Sequence[Tensor]:
    """Copy the tensors to the device; return them unchanged if it has too little memory."""
    num_bytes = sum(part.nbytes for part in _elsewhere(parts, device))
    free = free_bytes_on(device)
    if num_bytes == 0 or free is None or num_bytes <= share * free:
        try:
            return [part.to(device) for part in parts]
        except RuntimeError as error:
            if not is_out_of_memory(error):  # another process took it meanwhile
                raise
    _LOG.warning(
        "%s: %.1f GB of data do not fit into %.0f %% of the free memory and stay on the host, "
        "which gathers and copies every batch",
        device,
        num_bytes / 1e9,
        100 * share,
    )
    return parts


def _elsewhere(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that are not on the device; without an index, any card matches."""
    return [
        part
        for part in parts
        if part.device.type != device.type or device.index not in (None, part.device.index)
    ]


def free_bytes_on(device: torch.device) -> int | None:
    """Return the free memory of an accelerator in bytes; None if torch does not report it.

    Memory that torch has reserved but not allocated counts as free.
    """
    its = torch.accelerator
    try:
        free, _ = its.get_memory_info(device)
    except (RuntimeError, ValueError):  # not an accelerator, or its allocator does not know
        return None
    return int(free + its.memory_reserved(device) - its.memory_allocated(device))
