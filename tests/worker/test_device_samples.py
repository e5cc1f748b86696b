"""Which data go to a device: what takes at most half of its free memory.

The meta device stands for an accelerator: tensors move there, and hold nothing.
"""

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flower_blsgd.worker import device_memory
from flower_blsgd.worker.batches import TensorBatches, batch_source
from flower_blsgd.worker.device_memory import bytes_to_move, free_bytes_on, stays_on_host
from flower_blsgd.worker.device_samples import samples_on
from flower_blsgd.worker.host_batches import HostBatches
from flower_blsgd.worker.samples import HostSamples, IndexedSamples

META = torch.device("meta")
INPUTS, TARGETS = np.zeros((10, 4), np.float32), torch.zeros(10, dtype=torch.int64)
"""160 and 80 bytes."""


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_TOLD", set())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flower_blsgd.worker.device_memory")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def free(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr(device_memory, "free_bytes_on", lambda device: count)


@pytest.mark.parametrize(
    ("count", "stays"), [(479, True), (480, False), (481, False), (0, True), (None, False)]
)
def test_half_of_the_free_memory_is_the_limit(
    monkeypatch: pytest.MonkeyPatch, count: int | None, stays: bool
) -> None:
    free(monkeypatch, count)
    assert stays_on_host(240, META) == stays
    placed = samples_on((INPUTS, TARGETS), META)
    assert isinstance(placed, HostSamples) == stays
    kind = HostBatches if stays else TensorBatches
    assert isinstance(batch_source((INPUTS, TARGETS), META), kind)
    assert isinstance(batch_source(placed, META), kind)  # decided once


def test_what_stays_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100)
    placed = samples_on((INPUTS, TARGETS), "meta")
    assert isinstance(placed, HostSamples)
    assert placed.parts[0].data_ptr() == torch.from_numpy(INPUTS).data_ptr()
    assert placed.parts[1] is TARGETS
    assert samples_on(placed, "meta") is placed


def test_part_of_a_data_set_stays_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100)
    indices = np.array([2, 0])
    placed = samples_on(IndexedSamples((INPUTS, TARGETS), indices), "meta")
    assert isinstance(placed, IndexedSamples)
    assert isinstance(placed.samples, HostSamples)
    assert placed.indices is indices
    assert not batch_source(placed, META).on_device


def test_one_line_says_so_however_often_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    free(monkeypatch, 300)
    for samples in ((INPUTS, TARGETS), TensorDataset(torch.from_numpy(INPUTS), TARGETS)):
        samples_on(samples, "meta")
    assert lines == [
        "meta: 240 bytes of data is more than half of the 300 bytes that is free there; it stays "
        "on the host, which gathers and copies every batch"
    ]
    samples_on((INPUTS[:9], TARGETS[:9]), "meta")
    assert len(lines) == 2


def test_memory_that_another_process_took_meanwhile(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    free(monkeypatch, 10_000)

    def full(*arguments: object, **settings: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tensor, "to", full)
    placed = samples_on((INPUTS, TARGETS), "meta")
    assert isinstance(placed, HostSamples)
    assert lines[0].startswith("meta: 240 bytes of data is more than there is room for; it stays")


def test_only_what_is_not_there_counts() -> None:
    cpu = torch.device("cpu")
    parts = [torch.zeros(10), torch.zeros(10, device="meta")]
    assert (bytes_to_move(parts, META), bytes_to_move(parts, cpu)) == (40, 40)
    assert bytes_to_move(parts[1:], META) == bytes_to_move(parts[:1], cpu) == 0


def test_data_that_are_there_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    there = [torch.zeros(10, 4, device="meta"), torch.zeros(10, device="meta")]
    assert samples_on(there, "meta") is there


def test_a_cpu_has_room_for_everything() -> None:
    assert free_bytes_on(torch.device("cpu")) is None
    assert not stays_on_host(10**18, torch.device("cpu"))


def test_free_is_also_what_torch_keeps_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("memory_reserved", 70), ("memory_allocated", 50)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert free_bytes_on(torch.device("cuda:1")) == 1020
