"""Registering shared memory with CUDA: once for each block, undone when it goes. No GPU needed."""

import gc

import numpy as np
import pytest
import torch

from flower_blsgd.flat_record import Layout
from flower_blsgd.runtime.pinned_memory import pin
from flower_blsgd.runtime.shared_pool import Pool

LAYOUT = Layout.of([("w", "float32", (5000,))])


class Cuda:
    """Stands for the CUDA runtime."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[object, ...]] = []

    def register(self, address: int, num_bytes: int) -> int:
        self.calls.append(("register", address, num_bytes))
        return self.error

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_a_block_is_registered_once_and_unregistered_when_it_goes() -> None:
    cuda, pool = Cuda(), Pool()
    lease, _ = pool.new_memory(LAYOUT)
    address, size = lease.block.address, lease.block.size
    for _ in range(3):
        assert pin(lease, cuda.register, cuda.unregister)
    assert cuda.calls == [("register", address, size)]
    del lease
    again, _ = pool.new_memory(LAYOUT)  # the same block, used again
    assert pin(again, cuda.register, cuda.unregister)
    assert len(cuda.calls) == 1
    del again, pool
    gc.collect()
    assert cuda.calls[1:] == [("unregister", address)]


def test_it_is_registered_as_long_as_anybody_looks_at_it() -> None:
    cuda, pool = Cuda(), Pool()
    lease, _ = pool.new_memory(LAYOUT)
    assert pin(lease, cuda.register, cuda.unregister)
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
    assert not pin(lease, cuda.register, cuda.unregister)
    assert not pin(lease, cuda.register, cuda.unregister)
    assert len(cuda.calls) == 1


def test_memory_that_is_not_shared_is_left_alone() -> None:
    cuda = Cuda()
    assert not pin(np.zeros(10, np.uint8), cuda.register, cuda.unregister)
    assert cuda.calls == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_itself_knows_it() -> None:
    pool = Pool()
    lease, _ = pool.new_memory(LAYOUT)
    torch.zeros(1, device="cuda")
    assert pin(lease)
    assert torch.from_numpy(np.ndarray(5000, np.float32, lease)).is_pinned()
