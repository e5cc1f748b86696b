"""The devices that this process may use."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flower_blsgd.grids import machine
from flower_blsgd.grids.machine import Machine, usable_cores


@pytest.fixture
def fresh_look() -> Iterator[None]:
    """Clear the cache before and after the test."""
    machine._accelerators.cache_clear()
    yield
    machine._accelerators.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_usable_cores_are_those_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    assert usable_cores() == tuple(sorted(before))
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cores() == (max(before),)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("fresh_look")
def test_accelerators_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Machine((0,)).accelerators == ("cuda:0", "cuda:1", "xpu:0", "mps")
    assert Machine((0,), ()).accelerators == ()
    assert Machine((0,), ("cuda:7",)).accelerators == ("cuda:7",)


@pytest.mark.processes
def test_looking_at_cpu_workers_imports_no_torch() -> None:
    """A worker reads its own specification before it is pinned, and pinning comes before torch."""
    program = (
        "import sys; from flower_blsgd.grids import local_grid, worker_process; "
        "from flower_blsgd.grids.machine import this_machine; "
        "from flower_blsgd.grids.worker_spec import parse_workers; "
        "core = this_machine().cores[0]; parse_workers(f'2x cpu; cpu:{core} slow'); "
        "print([name for name in ('torch', 'ray', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout == "[]\n"
