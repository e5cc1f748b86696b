"""What this machine has."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.errors import UsageError
from flower_blsgd.runtime import machine as machine_module
from flower_blsgd.runtime.machine import Machine, format_ids, this_machine, usable_cores

BOX = Machine((0, 1, 2, 5), ("cuda:0", "cuda:1", "mps"))


@pytest.fixture
def fresh_look() -> Iterator[None]:
    """Forget what was found, before and after."""
    machine_module._accelerators.cache_clear()
    yield
    machine_module._accelerators.cache_clear()


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1], "0-1"),
        ([0, 2, 4], "0,2,4"),
        ([0, 1, 2, 5, 8, 9], "0-2,5,8-9"),
    ],
)
def test_format_ids_hand_worked(ids: list[int], text: str) -> None:
    assert format_ids(ids) == text


@given(st.sets(st.integers(0, 500)).map(sorted))
def test_format_ids_says_each_number_once(ids: list[int]) -> None:
    read = []
    for part in filter(None, format_ids(ids).split(",")):
        first, _, last = part.partition("-")
        read += range(int(first), int(last or first) + 1)
    assert read == ids


@given(st.sets(st.integers(0, 60)).map(sorted))
def test_format_ids_is_as_short_as_can_be(ids: list[int]) -> None:
    gaps = sum(b != a + 1 for a, b in itertools.pairwise(ids))
    assert format_ids(ids).count(",") == gaps


def test_check_cores() -> None:
    BOX.check_cores([])
    BOX.check_cores([5, 0])
    reason = "core 3 of cpu:3 is not there; this process may use cores 0-2,5"
    with pytest.raises(UsageError, match=re.escape(reason)):
        BOX.check_cores([2, 3, 4])


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "mps", "cuda"])
def test_check_accelerator_that_is_there(device: str) -> None:
    BOX.check_accelerator(device)


@pytest.mark.parametrize("device", ["cuda:2", "xpu", "xpu:0", "cud", "cuda:", "auto", "cpux"])
def test_check_accelerator_that_is_missing(device: str) -> None:
    reason = f"device {device} is not there; this machine has cpu, cuda:0, cuda:1, mps"
    with pytest.raises(UsageError, match=re.escape(reason)):
        BOX.check_accelerator(device)


def test_check_accelerator_without_any() -> None:
    with pytest.raises(UsageError, match=r"this machine has cpu$"):
        Machine((0,), ()).check_accelerator("cuda")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_usable_cores_are_those_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    assert usable_cores() == tuple(sorted(before))
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cores() == (max(before),)
    finally:
        os.sched_setaffinity(0, before)


def test_usable_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == (0, 1, 2)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == (0,)


def test_this_machine_has_our_cores() -> None:
    assert this_machine().cores == usable_cores()
    assert this_machine().given_accelerators is None


@pytest.mark.usefixtures("fresh_look")
def test_accelerators_are_asked_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Machine((0,)).accelerators == ("cuda:0", "cuda:1", "xpu:0", "mps")
    # Given ones are taken at their word.
    assert Machine((0,), ()).accelerators == ()
    assert Machine((0,), ("cuda:7",)).accelerators == ("cuda:7",)


@pytest.mark.usefixtures("fresh_look")
def test_accelerators_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert Machine((0,)).accelerators == ()


@pytest.mark.processes
def test_looking_at_cpu_workers_imports_no_torch() -> None:
    """A worker reads its own specification before it is pinned, and pinning comes before torch."""
    program = (
        "import sys; from flower_blsgd.runtime import local_grid, worker_process; "
        "from flower_blsgd.runtime.devices import parse_workers; "
        "from flower_blsgd.runtime.machine import this_machine; "
        "core = this_machine().cores[0]; parse_workers(f'2x cpu; cpu:{core} slow'); "
        "print([name for name in ('torch', 'ray', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout == "[]\n"
