"""Data that stay on the host, and are copied to the device batch by batch."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_blsgd import LocalSGD
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker.batches import IndexedBatches, TensorBatches, batch_source
from flower_blsgd.worker.host_batches import HostBatches
from flower_blsgd.worker.model_state import state_record
from flower_blsgd.worker.replica_sgd import ReplicaSGD
from flower_blsgd.worker.samples import HostSamples, IndexedSamples, num_samples

from .replica_orders import furthest, made, perceptron, points
from .replica_orders import order_of as replica_order
from .stand_in import StandInCapture, record_on_cpu
from .test_cuda_graph import data, order_of, same, small_model
from .test_replica_sgd import together

CPU = torch.device("cpu")
INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.arange(6) * 10
HOST = HostSamples([INPUTS, TARGETS])


def test_batch_is_gathered_by_index() -> None:
    source = batch_source(HOST, CPU)
    assert isinstance(source, HostBatches)
    assert not source.on_device
    assert len(source) == num_samples(HOST) == 6
    inputs, targets = source.batch(torch.tensor([4, 0, 4]))
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert targets.tolist() == [40, 0, 40]
    assert targets.dtype == torch.int64


def test_batch_is_a_copy() -> None:
    inputs, targets = batch_source(HOST, CPU).batch(torch.arange(6))
    inputs.zero_()
    targets.zero_()
    assert INPUTS[5].tolist() == [10.0, 11.0]
    assert TARGETS[5] == 50


def test_part_of_them_is_named_by_indices_on_the_host() -> None:
    """The meta device stands for an accelerator: what is there holds nothing."""
    part = IndexedSamples(HOST, np.array([5, 3, 1]))
    source = batch_source(part, CPU)
    assert isinstance(source, IndexedBatches)
    assert not source.on_device
    assert source.batch(torch.tensor([2, 0]))[1].tolist() == [10, 50]
    there = batch_source(part, torch.device("meta"))
    inputs, targets = there.batch(torch.tensor([2, 0]))
    assert (inputs.device.type, inputs.shape, targets.shape) == ("meta", (2, 2), (2,))


def test_memory_map_is_read_in_place(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 256, (50, 3, 4, 4), np.uint8)
    np.save(tmp_path / "images.npy", whole)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="c")
    source = batch_source(HostSamples([torch.from_numpy(mapped), torch.arange(50)]), CPU)
    chosen = torch.tensor([49, 0, 7])
    assert np.array_equal(source.batch(chosen)[0].numpy(), whole[chosen.numpy()])


@pytest.mark.parametrize("pinned", [None, True])
def test_copies_go_through_pinned_memory_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, pinned: bool | None
) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def noting(*shape: Any, pin_memory: bool = False, **settings: Any) -> Any:
        asked.append(pin_memory)
        return empty(*shape, **settings)

    monkeypatch.setattr(torch, "empty", noting)
    source = HostBatches(HOST, CPU, pinned)
    assert source.batch(torch.tensor([1]))[1].tolist() == [10]
    assert asked == [bool(pinned)] * 2
    assert HostBatches(HOST, torch.device("cuda"))._pin


def on_host() -> HostSamples:
    return HostSamples(data())


@pytest.mark.parametrize("settings", [{}, {"augment": random_crop_and_flip}])
def test_training_gives_the_same_bits(settings: dict[str, Any]) -> None:
    found = LocalSGD(small_model(), on_host(), **settings).run(order_of(1))
    assert same(found, LocalSGD(small_model(), data(), **settings).run(order_of(1)))


def test_steps_are_not_recorded_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = StandInCapture()
    record_on_cpu(monkeypatch, capture)
    sgd = LocalSGD(small_model(), on_host(), name="fast-0")
    assert same(sgd.run(order_of(1)), LocalSGD(small_model(), on_host()).run(order_of(1)))
    assert capture.recordings == []
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert lines[0] == (
        "worker fast-0: steps are not recorded as a CUDA graph: the host makes every batch; only a "
        "pair of tensors, as far as there is memory for it, is on the GPU (cuda-graph = false says "
        "the same, without this line)"
    )


def test_workers_that_compute_together_read_them() -> None:
    arrays = state_record(made(perceptron))
    orders = [replica_order(worker, arrays) for worker in range(2)]
    found = together(ReplicaSGD(made(perceptron), HostSamples(points())), orders)
    expected = together(ReplicaSGD(made(perceptron), points()), orders)
    for one, other in zip(found, expected, strict=True):
        assert furthest(one.arrays, other.arrays) == 0.0


def test_tensors_that_fit_are_there_as_ever() -> None:
    assert isinstance(batch_source((INPUTS, TARGETS), CPU), TensorBatches)
