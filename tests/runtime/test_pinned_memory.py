"""Registering shared memory with CUDA: once for each block, undone when it goes. No GPU needed."""

import gc
import os

import numpy as np
import pytest
import torch

from flower_blsgd.flat_record import Layout
from flower_blsgd.runtime.pinned_memory import Call, pin
from flower_blsgd.runtime.shared_block import Block
from flower_blsgd.runtime.shared_pool import Pool

LAYOUT = Layout.of([("w", "float32", (5000,))])


class Cuda:
    """Stands for the CUDA runtime."""

    def __init__(self, error: int = 0, late_error: int = 0) -> None:
        self.error, self.late_error = error, late_error
        self.calls: list[tuple[object, ...]] = []

    @property
    def calls_of_it(self) -> "tuple[Call, Call, Call]":
        return self.register, self.unregister, self.forget_error

    def register(self, address: int, num_bytes: int) -> int:
        self.calls.append(("register", address, num_bytes))
        return self.error

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.late_error

    def forget_error(self) -> None:
        self.calls.append(("forget error",))


def test_a_block_is_registered_once_and_unregistered_when_it_goes() -> None:
    cuda, pool = Cuda(), Pool()
    lease, _ = pool.new_memory(LAYOUT)
    address, size = lease.block.address, lease.block.size
    for _ in range(3):
        assert pin(lease, *cuda.calls_of_it)
    assert cuda.calls == [("register", address, size)]
    del lease
    again, _ = pool.new_memory(LAYOUT)  # the same block, used again
    assert pin(again, *cuda.calls_of_it)
    assert len(cuda.calls) == 1
    del again, pool
    gc.collect()
    assert cuda.calls[1:] == [("unregister", address)]


def test_it_is_registered_as_long_as_anybody_looks_at_it() -> None:
    cuda, pool = Cuda(), Pool()
    lease, _ = pool.new_memory(LAYOUT)
    assert pin(lease, *cuda.calls_of_it)
    view = np.ndarray(5000, np.float32, lease)
    del lease, pool
    gc.collect()
    view[:] = 1
    assert len(cuda.calls) == 1
    del view
    gc.collect()
    assert len(cuda.calls) == 2


def test_where_it_cannot_be_registered_nothing_fails_and_it_is_not_tried_again() -> None:
    cuda, pool = Cuda(error=1), Pool()
    lease, _ = pool.new_memory(LAYOUT)
    assert not pin(lease, *cuda.calls_of_it)
    assert not pin(lease, *cuda.calls_of_it)
    # Else the next launch of this thread would raise what happened here.
    assert cuda.calls[1:] == [("forget error",)]
    del lease, pool
    gc.collect()
    assert len(cuda.calls) == 2


def test_error_of_its_end_is_forgotten_as_well() -> None:
    cuda, pool = Cuda(late_error=713), Pool()
    lease, _ = pool.new_memory(LAYOUT)
    address = lease.block.address
    assert pin(lease, *cuda.calls_of_it)
    del lease, pool
    gc.collect()
    assert cuda.calls[1:] == [("unregister", address), ("forget error",)]


def test_memory_that_is_not_shared_is_left_alone() -> None:
    cuda = Cuda()
    assert not pin(np.zeros(10, np.uint8), *cuda.calls_of_it)
    assert cuda.calls == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_itself_knows_it() -> None:
    pool = Pool()
    lease, _ = pool.new_memory(LAYOUT)
    torch.zeros(1, device="cuda")
    assert pin(lease)
    assert torch.from_numpy(np.ndarray(5000, np.float32, lease)).is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_itself_forgets_that_it_could_not_be_registered() -> None:
    pool = Pool()
    lease, _ = pool.new_memory(LAYOUT)
    again = Block(99, os.dup(lease.block.fd), lease.block.size)
    torch.zeros(1, device="cuda")
    assert pin(lease)
    again.address = lease.block.address  # registered already
    assert not pin(again.lease())
    assert torch.ones(3, device="cuda").sum().item() == 3
