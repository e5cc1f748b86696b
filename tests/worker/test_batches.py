"""Samples by index, from tensors, from data sets, and from data that stay on the host.

The meta device stands for an accelerator: tensors move there, and hold nothing.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd import LocalSGD
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker import batches
from flower_blsgd.worker.batches import (
    DatasetBatches,
    HostBatches,
    HostSamples,
    IndexedBatches,
    IndexedSamples,
    TensorBatches,
    batch_source,
    bytes_to_move,
    free_bytes_on,
    num_samples,
    samples_on,
)

from .helpers import data, order_of, same, small_model, warnings_in

CPU, META = torch.device("cpu"), torch.device("meta")
INPUTS = torch.arange(12.0).reshape(6, 2)
TARGETS = torch.arange(6) * 10
HOST = HostSamples([INPUTS, TARGETS])
ZEROS, LABELS = np.zeros((10, 4), np.float32), torch.zeros(10, dtype=torch.int64)
"""160 and 80 bytes."""


class Pairs(Dataset):
    """A map-style data set that does not give tensors away."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not isinstance(index, int):
            raise TypeError("a data set may rely on plain numbers")
        return INPUTS[index], int(TARGETS[index])


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        ((INPUTS, TARGETS), TensorBatches),
        ([INPUTS.numpy(), TARGETS], TensorBatches),
        (TensorDataset(INPUTS, TARGETS), TensorBatches),
        (Pairs(), DatasetBatches),
        (HOST, HostBatches),
        (IndexedSamples((INPUTS.flip(0), TARGETS.flip(0)), np.arange(6)[::-1].copy()), None),
        (IndexedSamples(HOST, np.arange(6)), IndexedBatches),
    ],
    ids=["tuple", "list", "TensorDataset", "Dataset", "on the host", "part", "part on the host"],
)
def test_batch_source_fetches_copies_by_index(samples: object, kind: type | None) -> None:
    source = batch_source(samples, CPU)
    assert isinstance(source, kind or IndexedBatches)
    assert source.on_device == (kind in (TensorBatches, None))
    assert len(source) == num_samples(samples) == 6
    inputs, targets = source.batch(torch.tensor([4, 0, 4]))
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert targets.tolist() == [40, 0, 40]
    assert targets.dtype == torch.int64
    inputs.zero_()
    assert INPUTS[4].tolist() == [8.0, 9.0]


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ((INPUTS, TARGETS, TARGETS), "got 3 tensors"),
        (TensorDataset(INPUTS), "got 1 tensors"),
        ((INPUTS, TARGETS[:5]), "6 inputs, but 5 targets"),
    ],
)
def test_batch_source_of_no_pair_is_refused(samples: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        batch_source(samples, CPU)


def test_host_samples_move_batch_by_batch() -> None:
    source = batch_source(IndexedSamples(HOST, np.array([5, 3, 1])), META)
    assert not source.on_device
    inputs, targets = source.batch(torch.tensor([2, 0]))
    assert (inputs.device.type, inputs.shape, targets.shape) == ("meta", (2, 2), (2,))


@pytest.mark.parametrize("settings", [{}, {"augment": random_crop_and_flip}])
def test_training_gives_the_same_bits(settings: dict[str, Any]) -> None:
    found = LocalSGD(small_model(), HostSamples(data()), **settings).run(order_of(1))
    assert same(found, LocalSGD(small_model(), data(), **settings).run(order_of(1)))


# --- which data go to a device


@pytest.fixture(autouse=True)
def _nothing_logged() -> None:
    batches._log_host.cache_clear()


@pytest.mark.parametrize(
    ("count", "stays"), [(479, True), (480, False), (481, False), (0, True), (None, False)]
)
def test_half_of_the_free_memory_is_the_limit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int | None,
    stays: bool,
) -> None:
    monkeypatch.setattr(batches, "free_bytes_on", lambda device: count)
    placed = samples_on((ZEROS, LABELS), META)
    kind = HostBatches if stays else TensorBatches
    assert isinstance(batch_source((ZEROS, LABELS), META), kind)
    assert isinstance(batch_source(placed, META), kind)  # decided once
    part = samples_on(IndexedSamples((ZEROS, LABELS), np.array([2, 0])), META)
    assert batch_source(part, META).on_device != stays
    assert isinstance(placed, HostSamples) == stays
    assert len(warnings_in(caplog)) == stays  # however often it is asked
    if stays:  # nothing is copied
        assert placed.parts[0].data_ptr() == torch.from_numpy(ZEROS).data_ptr()
        assert placed.parts[1] is LABELS
        assert warnings_in(caplog)[0].startswith("meta: 0.0 GB of data is more than half of")


def test_memory_that_another_process_took_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tensor, "to", full)
    assert isinstance(samples_on((ZEROS, LABELS), "meta"), HostSamples)


def test_data_that_are_there_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "free_bytes_on", lambda device: 0)
    there = [torch.zeros(10, 4, device="meta"), torch.zeros(10, device="meta")]
    assert samples_on(there, "meta") is there
    parts = [torch.zeros(10), torch.zeros(10, device="meta")]
    assert (bytes_to_move(parts, META), bytes_to_move(parts, CPU)) == (40, 40)
    assert bytes_to_move(parts[1:], META) == bytes_to_move(parts[:1], CPU) == 0


def test_free_is_also_what_torch_keeps_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes_on(CPU) is None  # a CPU has room for everything
    for name, value in (("memory_reserved", 70), ("memory_allocated", 50)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert free_bytes_on(torch.device("cuda:1")) == 1020
