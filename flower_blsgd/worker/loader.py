"""Samples of a map-style Dataset, prefetched by torch's DataLoader."""

import contextlib
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..devices.machine import usable_cores
from ..errors import first_line
from ..processes import signal_at_parents_end

Wanted = tuple[int, list[int]]
"""A batch to read: the seed of its random transforms, and the indices of its samples."""

_MOST_BY_DEFAULT = 4

_BATCHES_AHEAD = 2
"""Per reading process, as in torch."""


def loader_workers(setting: int | str, num_cores: int = 0) -> int:
    """Return the number of processes that read samples, from the setting ``loader-workers``.

    ``"auto"`` is the number of a worker's cores (0: those of this process), at most 4, and 0 with
    one core. A daemonic process may not have child processes.
    """
    if multiprocessing.current_process().daemon:
        return 0
    if setting != "auto":
        return int(setting)
    cores = num_cores or len(usable_cores())
    return min(cores, _MOST_BY_DEFAULT) if cores > 1 else 0


class SampleReader(Dataset[Any]):
    """Reader of whole batches of a map-style Dataset.

    The data set's ``__getitems__`` is used if it has one, as by torch.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._get_many = getattr(dataset, "__getitems__", None)

    def __getitem__(self, wanted: Wanted) -> Any:
        """Return a batch; ValueError names a sample that cannot be read or collated."""
        seed, indices = wanted
        # Not torch.manual_seed: in a worker's own thread, it also seeds the device's generator.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            samples = self._get_many(indices) if self._get_many else None
        except Exception:  # which sample it was is found below
            samples = None
        if samples is None:
            samples = [self._sample(index) for index in indices]
        try:
            return self._collate(samples)
        except Exception as error:
            raise ValueError(
                f"samples {_shown(indices)} cannot be collated into a batch: {first_line(error)}; "
                "pass collate, like collate_fn of torch's DataLoader"
            ) from error

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise ValueError(
                f"sample {index} cannot be read: {type(error).__name__}: {first_line(error)}"
            ) from error

    @contextlib.contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Restore the global random generators after a read in this process."""
        host, numpys = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            try:
                yield
            finally:
                random.setstate(host)
                np.random.set_state(numpys)


def read_ahead(
    reader: SampleReader, num_workers: int, pin_memory: bool = False
) -> Callable[[Sequence[Wanted]], Iterator[Any]]:
    """Return a function that reads batches in processes of a DataLoader, in order.

    They begin to read when the function is called, serve all later calls, and end with this
    process. After an error, such as a process that was killed, the next call starts new ones.
    """
    wanted: list[Wanted] = []

    def loader() -> DataLoader[Any]:
        return DataLoader(
            reader,
            batch_size=None,
            sampler=wanted,
            num_workers=num_workers,
            prefetch_factor=_BATCHES_AHEAD,
            persistent_workers=True,
            pin_memory=pin_memory,
            collate_fn=_unchanged,
            worker_init_fn=_end_with_parent,
            generator=torch.Generator(),  # not the global one, of which the model's dropout draws
        )

    loaders: list[DataLoader[Any]] = []

    def read(batches: Sequence[Wanted]) -> Iterator[Any]:
        reading = begin(batches)
        next(reading)
        return reading

    def begin(batches: Sequence[Wanted]) -> Iterator[Any]:
        if not loaders:
            loaders.append(loader())
        wanted[:] = batches
        try:
            iterator = iter(loaders[0])
            yield  # to `read`: the processes read from now on
            yield from iterator
        except GeneratorExit:  # an order that ended early; the processes stay
            raise
        except ValueError as error:  # its message is a traceback of the other process
            loaders.clear()
            last = str(error).strip().splitlines()[-1]
            raise ValueError(last.removeprefix("ValueError: ")) from None
        except BaseException:
            loaders.clear()
            raise

    return read


def _unchanged(batch: Any) -> Any:
    return batch


def _end_with_parent(_: int) -> None:
    """Have the kernel kill this process when its parent ends, even after SIGKILL."""
    signal_at_parents_end(signal.SIGKILL)


def _shown(indices: Sequence[int]) -> str:
    few = ", ".join(map(str, indices[:3]))
    return f"{few}, ..." if len(indices) > 3 else few
