"""The devices that this process may use."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from flower_blsgd.devices import machine
from flower_blsgd.devices.machine import (
    OWN_DEVICE,
    Machine,
    accelerator_names,
    kernel_problem,
    usable_cores,
    visible_card,
)
from flower_blsgd.devices.worker_spec import WorkerSpec, cores_note, parse_workers
from flower_blsgd.errors import UsageError


@pytest.fixture
def fresh_look(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear what is remembered of the accelerators before and after the test."""
    caches = machine._accelerators, machine.accelerator_of
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_usable_cores_are_those_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    assert usable_cores() == tuple(sorted(before))
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cores() == (max(before),)
    finally:
        os.sched_setaffinity(0, before)


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 1) -> None:
    """Let torch see accelerators of a kind."""
    import torch

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.usefixtures("fresh_look")
@pytest.mark.parametrize(
    ("kind", "count", "devices"),
    [
        ("cuda", 2, ("cuda:0", "cuda:1")),
        ("cuda", 0, ()),
        ("hpu", 2, ("hpu:0", "hpu:1")),  # any kind that torch was built for
        ("mps", 1, ("mps",)),
    ],
)
def test_accelerators_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int, devices: tuple[str, ...]
) -> None:
    pretend(monkeypatch, kind, count)
    assert Machine((0,)).accelerators == devices
    assert Machine((0,), ("cuda:7",)).accelerators == ("cuda:7",)


@pytest.mark.usefixtures("fresh_look")
def test_each_mig_device_is_seen_by_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts one of them per process, so they are those of the variable."""
    pretend(monkeypatch, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert Machine((0,)).accelerators == ("cuda:0", "cuda:1")
    seen = visible_card("cuda:1", alone=False)
    assert seen == {"CUDA_VISIBLE_DEVICES": "MIG-b", OWN_DEVICE: "cuda:1"}


@pytest.mark.parametrize(
    ("visible", "device", "entry"),
    [
        (None, "cuda:1", "1"),
        ("", "cuda:1", ""),  # no card: all are hidden and stay hidden
        ("2, 3", "cuda:1", "3"),
        ("GPU-a,GPU-b", "cuda:1", "GPU-b"),
        ("5,6", "cuda", "5"),
        ("5,6", "cuda:2", ""),
    ],
)
def test_a_process_sees_its_own_card(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, entry: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_card(device, alone=False) == {}  # cards that are no MIG devices
    assert visible_card("xpu:1") == {}
    assert visible_card("cuda:x") == {}  # refused elsewhere
    assert visible_card("cpu") == visible_card("cpu:0-3") == {"CUDA_VISIBLE_DEVICES": ""}
    variables = visible_card(device)
    assert variables == {"CUDA_VISIBLE_DEVICES": entry, OWN_DEVICE: device}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    assert visible_card("cpu") == hidden
    monkeypatch.setenv(OWN_DEVICE, device)
    worker = WorkerSpec(device)
    assert (worker.torch_device, worker.device_with_cores) == ("cuda:0", device)
    there = Machine((0,), ("cuda:0",))  # as this process sees it
    assert parse_workers(device, there) == [worker]
    assert WorkerSpec("cpu").torch_device == "cpu"


CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("capability", "architectures", "problem"),
    [
        ((7, 5), CUDA_13, ""),
        ((8, 9), CUDA_13, ""),  # the binaries of 8.6
        ((12, 1), CUDA_13, ""),
        ((6, 1), CUDA_13, "(7.5 and newer); install torch from https://download.pytorch.org/whl/c"),
        ((7, 0), CUDA_13, "(7.5 and newer)"),  # an older minor version
        ((6, 1), ("sm_50", "sm_60", "sm_70"), ""),
        ((12, 0), ("sm_80", "sm_90"), "(up to 9.0); install a newer one"),
        ((12, 0), ("sm_80", "compute_90"), ""),  # compiled on that card
        ((12, 0), ("sm_80", "compute_90a"), "(up to 9.0)"),
        ((10, 3), ("sm_100a",), "(up to 10.0)"),
        ((10, 3), ("sm_100f",), ""),
        ((6, 1), (), ""),  # unknown
    ],
)
def test_kernel_problem(
    capability: tuple[int, int], architectures: tuple[str, ...], problem: str
) -> None:
    found = kernel_problem(capability, architectures)
    assert bool(found) == bool(problem)
    assert problem in found


@pytest.mark.usefixtures("fresh_look")
def test_a_card_without_kernels_is_refused_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cards = [
        SimpleNamespace(name="H100", major=9, minor=0, total_memory=8),
        SimpleNamespace(name="GTX 1080 Ti", major=6, minor=1, total_memory=8),
    ]
    pretend(monkeypatch, "cuda", 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(CUDA_13))
    machine = Machine((0, 1, 2))
    line = (
        "cuda:1 (GTX 1080 Ti, 6.1) is not supported by this torch (7.5 and newer); install torch "
        "from https://download.pytorch.org/whl/cu126"
    )
    with pytest.raises(UsageError, match=re.escape(f"workers: {line}")):
        parse_workers("2x cuda:0-1", machine)
    workers = parse_workers("auto", machine)
    assert [worker.device_with_cores for worker in workers] == ["cuda:0", "cpu:2"]
    assert cores_note(workers, machine) == f"note: {line}"
    assert cores_note(workers[:1], machine) == ""
    assert accelerator_names(machine) == ("H100", "GTX 1080 Ti")


@pytest.mark.processes
def test_looking_at_cpu_workers_imports_no_torch() -> None:
    """A worker reads its own specification before it is pinned, and pinning comes before torch."""
    program = (
        "import sys; from flower_blsgd.engines.local import grid, worker_process; "
        "from flower_blsgd.devices.machine import this_machine; "
        "from flower_blsgd.devices.worker_spec import parse_workers; "
        "core = this_machine().cores[0]; parse_workers(f'2x cpu; cpu:{core} slow'); "
        "print([name for name in ('torch', 'ray', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout == "[]\n"
