"""Cores, threads and environment of a worker."""

import os
import threading

import pytest
import torch

from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.runtime.pinning import environment, num_threads, pinned
from tests.log_capture import captured_log

CORES = usable_cores()
needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)


@pytest.mark.parametrize(
    ("worker", "threads", "expected"),
    [
        (WorkerSpec("cpu", (0, 1, 2)), 0, 3),
        (WorkerSpec("cpu", (0, 1, 2)), 1, 1),
        (WorkerSpec("cpu", (4,)), 8, 8),
        (WorkerSpec("cpu"), 0, 1),
        (WorkerSpec("cuda:0"), 0, 1),
        (WorkerSpec("cuda:0"), 4, 4),
    ],
)
def test_num_threads(worker: WorkerSpec, threads: int, expected: int) -> None:
    assert num_threads(worker, threads) == expected


ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": "268435456", "MALLOC_MMAP_THRESHOLD_": "33554432"}


def test_environment_of_a_cpu_worker() -> None:
    assert environment(WorkerSpec("cpu", (0, 1))) == {
        **ALLOCATOR,
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.mark.parametrize("device", ["cuda:1", "cuda", "xpu:0", "mps"])
def test_environment_of_an_accelerator_worker_hides_nothing(device: str) -> None:
    """It would be cuda:0 there, and cuda:1 everywhere else."""
    assert environment(WorkerSpec(device), threads=3) == {
        **ALLOCATOR,
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
    }


def test_environment_leaves_the_users_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert environment(WorkerSpec("cpu"))["MALLOC_TRIM_THRESHOLD_"] == "7"


@pytest.fixture
def other_thread_count() -> int:
    """A number of threads that torch does not have now."""
    return torch.get_num_threads() + 3


@needs_affinity
def test_pinned_and_undone(other_thread_count: int) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pinned(WorkerSpec("cpu", CORES[-1:]), other_thread_count):
        assert os.sched_getaffinity(0) == {CORES[-1]}
        assert torch.get_num_threads() == other_thread_count
        assert inherited_affinity() == {CORES[-1]}
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


def inherited_affinity() -> set[int]:
    """Return the cores of a thread that starts now."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


@needs_affinity
def test_pinned_undone_after_an_error(other_thread_count: int) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with (
        pytest.raises(RuntimeError, match="in the handler"),
        pinned(WorkerSpec("cpu", CORES[:1]), other_thread_count),
    ):
        raise RuntimeError("in the handler")
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


@needs_affinity
def test_pinned_one_worker_after_the_other(other_thread_count: int) -> None:
    """As an actor of Ray serves them."""
    for cores, threads in [(CORES[:1], 1), (CORES, other_thread_count), (CORES[-1:], 2)]:
        with pinned(WorkerSpec("cpu", cores), threads):
            assert os.sched_getaffinity(0) == set(cores)
            assert torch.get_num_threads() == threads


@needs_affinity
def test_pinned_accelerator_keeps_all_cores() -> None:
    cores = os.sched_getaffinity(0)
    with pinned(WorkerSpec("cuda:0"), 2):
        assert os.sched_getaffinity(0) == cores
        assert torch.get_num_threads() == 2


def test_pinned_without_affinity(monkeypatch: pytest.MonkeyPatch, other_thread_count: int) -> None:
    """As on macOS: a warning, and the threads still count."""
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with captured_log() as log, pinned(WorkerSpec("cpu", (0, 1)), other_thread_count):
        assert torch.get_num_threads() == other_thread_count
    assert log.warnings == ["no CPU affinity on this system: cpu is not pinned"]


def test_pinned_to_no_cores_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to warn of where nothing was asked."""
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with captured_log() as log, pinned(WorkerSpec("cuda:0"), 1):
        assert torch.get_num_threads() == 1
    assert log.lines() == []
