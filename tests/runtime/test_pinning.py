"""Cores, threads and environment of a worker."""

import contextlib
import os
import threading

import pytest
import torch

from flower_blsgd.runtime.devices import WorkerSpec, usable_cores
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
        (WorkerSpec("cuda:0"), 4, 4),
    ],
)
def test_num_threads(worker: WorkerSpec, threads: int, expected: int) -> None:
    assert num_threads(worker, threads) == expected


@pytest.mark.parametrize(
    ("worker", "threads", "count", "more"),
    [
        (WorkerSpec("cpu", (0, 1)), 0, "2", {"CUDA_VISIBLE_DEVICES": ""}),
        (WorkerSpec("cuda:1"), 3, "3", {}),  # hides nothing: it would be cuda:0 there
    ],
)
def test_environment(worker: WorkerSpec, threads: int, count: str, more: dict[str, str]) -> None:
    assert environment(worker, threads) == {
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        **more,
    }


def test_environment_keeps_the_users_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert environment(WorkerSpec("cpu"))["MALLOC_TRIM_THRESHOLD_"] == "7"


@pytest.fixture
def other_thread_count() -> int:
    """A number of threads that torch does not have now."""
    return torch.get_num_threads() + 3


@needs_affinity
def test_pinned_and_undone_also_after_an_error(other_thread_count: int) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with (
        contextlib.suppress(RuntimeError),
        pinned(WorkerSpec("cpu", CORES[-1:]), other_thread_count),
    ):
        assert os.sched_getaffinity(0) == {CORES[-1]}
        assert torch.get_num_threads() == other_thread_count
        assert inherited_affinity() == {CORES[-1]}
        raise RuntimeError("in the handler")
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


def inherited_affinity() -> set[int]:
    """Return the cores of a thread that starts now."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_pinned_without_affinity(monkeypatch: pytest.MonkeyPatch, other_thread_count: int) -> None:
    """As on macOS: a warning, and the threads still count."""
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with captured_log() as log, pinned(WorkerSpec("cpu", (0, 1)), other_thread_count):
        assert torch.get_num_threads() == other_thread_count
    assert log.warnings == ["no CPU affinity on this system: cpu is not pinned"]
    with captured_log() as log, pinned(WorkerSpec("cuda:0"), 1):
        assert torch.get_num_threads() == 1
    assert log.lines() == []  # there is nothing to warn of where nothing was asked
