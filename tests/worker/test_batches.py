"""Samples by index, from tensors, from data sets, and from data that stay on the host.

The meta device stands for an accelerator: tensors move there, and hold nothing.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from flower_blsgd.worker import batches
from flower_blsgd.worker.batches import (
    BatchSource,
    inputs_and_targets,
    map_tensors,
    micro_batches,
    num_samples,
)

from ..refusal import refusal
from .helpers import warnings_in

CPU, META = torch.device("cpu"), torch.device("meta")
INPUTS = torch.arange(12.0).reshape(6, 2)
TARGETS = torch.arange(6) * 10
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
    ("samples", "on_device"),
    [
        ((INPUTS, TARGETS), True),
        ([INPUTS.numpy(), TARGETS], True),
        (TensorDataset(INPUTS, TARGETS), True),
        (Pairs(), False),
        (Subset((INPUTS.flip(0), TARGETS.flip(0)), np.arange(6)[::-1].copy()), True),
        (Subset(Pairs(), np.arange(6)), False),
    ],
    ids=["tuple", "list", "TensorDataset", "Dataset", "part", "part of a Dataset"],
)
def test_batch_source_fetches_copies_by_index(samples: object, on_device: bool) -> None:
    source = BatchSource(samples, CPU)
    assert source.on_device == on_device
    assert len(source) == num_samples(samples) == 6
    inputs, targets = source.batch(torch.tensor([4, 0, 4]))
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert targets.tolist() == [40, 0, 40]
    assert targets.dtype == torch.int64
    inputs.zero_()
    assert INPUTS[4].tolist() == [8.0, 9.0]


def test_memory_map_that_is_read_only_is_read_without_a_warning(tmp_path: Path) -> None:
    """pytest turns a warning into an error; torch warns once, unless it is told otherwise."""
    np.save(tmp_path / "inputs.npy", INPUTS.numpy())
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        samples = np.load(tmp_path / "inputs.npy", mmap_mode="r"), TARGETS
        assert BatchSource(samples, CPU).batch(torch.tensor([5]))[0].tolist() == [[10.0, 11.0]]
    finally:
        torch.set_warn_always(before)


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths: 6, 5"):
        BatchSource((INPUTS, TARGETS[:5]), CPU)


class Point(NamedTuple):
    x: Any
    y: Any


def test_structure_of_a_batch_is_kept() -> None:
    batch = {"a": (INPUTS, ["word"]), "b": Point(TARGETS, None)}
    found = map_tensors(batch, len)
    assert found == {"a": (6, ["word"]), "b": Point(6, None)}
    assert isinstance(found["b"], Point)
    assert inputs_and_targets(Point(1, 2)) == (1, 2)


@pytest.mark.parametrize(
    ("batch", "found"), [({"x": 1}, "a dict"), ((1, 2, 3), "a tuple of 3 parts"), (1, "a int")]
)
def test_batch_that_is_no_pair_needs_a_loss_of_the_whole_batch(batch: Any, found: str) -> None:
    assert f"a batch is {found}, not a pair" in refusal(inputs_and_targets, batch)


def test_micro_batches_cut_every_part() -> None:
    batch = {"inputs": INPUTS[:5], "targets": (TARGETS[:5], TARGETS[:5] + 1)}
    found = list(micro_batches(batch, 5, 2))
    assert [count for _, count in found] == [2, 2, 1]
    assert [part["targets"][1].tolist() for part, _ in found] == [[1, 11], [21, 31], [41]]
    for part in ("word", torch.tensor(1.0), INPUTS[:4]):
        cut = micro_batches({"inputs": INPUTS[:5], "other": part}, 5, 2)
        assert "only tensors with one row per sample can be split" in refusal(list, cut)


@pytest.mark.parametrize(
    ("count", "sharing", "stays"),
    [
        *((479, 1, True), (480, 1, False), (481, 1, False), (0, 1, True), (None, 1, False)),
        *((1919, 4, True), (1920, 4, False)),  # each of 4 workers may use an eighth
    ],
)
def test_more_than_half_of_the_free_memory_stays_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int | None,
    sharing: int,
    stays: bool,
) -> None:
    monkeypatch.setattr(batches, "free_bytes_on", lambda device: count)
    there = torch.zeros(10, 4, device="meta"), torch.zeros(10, device="meta")
    assert BatchSource(there, META).on_device
    assert not BatchSource((ZEROS, LABELS), META, move=False).on_device
    assert warnings_in(caplog) == []
    for samples in ((ZEROS, LABELS), Subset((ZEROS, LABELS), np.array([2, 0, 1]))):
        source = BatchSource(samples, META, workers_on_device=sharing)
        assert source.on_device != stays
        if stays:  # then batch by batch
            inputs, targets = source.batch(torch.tensor([2, 0]))
            assert (inputs.device, inputs.shape, targets.shape) == (META, (2, 4), (2,))
    assert len(warnings_in(caplog)) == 2 * stays
    if stays:
        share = "50 %" if sharing == 1 else "12 %"
        assert f"meta: 0.0 GB of data do not fit into {share} of" in warnings_in(caplog)[0]


@pytest.mark.parametrize("told", ["MPS backend out of memory", "invalid device ordinal"])
def test_memory_that_another_process_took_meanwhile(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    def full(*arguments: object, **settings: object) -> Tensor:
        raise RuntimeError(told)

    monkeypatch.setattr(Tensor, "to", full)
    if "memory" in told:
        assert not BatchSource((ZEROS, LABELS), META).on_device
    else:
        with pytest.raises(RuntimeError, match=told):
            BatchSource((ZEROS, LABELS), META)
