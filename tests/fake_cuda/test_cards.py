"""What other tests rely on: the emulation refuses what CUDA refuses, and waits where CUDA waits."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from .environment import is_emulated
from .log import recorded

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not is_emulated(), reason="only of emulated cards"),
]


def test_tensors_on_several_devices_are_refused() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda:0")
    for other in (here, there.to("cuda:1")):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            there + other
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1)  # a number may be on the host


def test_fused_optimizers_refuse_state_with_other_strides() -> None:
    layer = nn.Conv2d(3, 4, 3, device="cuda:0").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)
    layer(torch.ones(1, 3, 5, 5, device="cuda:0")).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    with pytest.raises(RuntimeError, match="check_fast_path_restrictions"):
        optimizer.step()


def test_copies_from_and_to_pinned_memory_end_when_the_host_waits() -> None:
    host, card = torch.arange(4.0).pin_memory(), torch.zeros(4, device="cuda:0")
    card.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    target = torch.zeros(4).pin_memory()
    target.copy_(card, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not torch.equal(target, host)
    event.synchronize()
    assert torch.equal(target, host)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_changed_too_early_is_reported(waits: bool) -> None:
    host = torch.ones(4).pin_memory()
    with recorded() as events:
        host.to("cuda:0", non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        host.zero_()
        torch.cuda.synchronize()
    assert ("race" in {event.kind for event in events}) is not waits


def test_memory_can_be_page_locked_later() -> None:
    memory, cudart = torch.ones(4096), torch.cuda.cudart()
    assert cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
    assert cudart.cudaHostRegister(memory.data_ptr(), 4, 0) == 712  # already is
    assert memory.is_pinned()
    assert memory[7:].is_pinned()
    assert cudart.cudaHostUnregister(memory.data_ptr()) == 0
    assert not memory.is_pinned()


def test_values_that_the_host_reads_make_it_wait() -> None:
    values = torch.arange(4, device="cuda:0")
    with recorded() as events:
        (values * 2).sum()
        assert {event.kind for event in events} == {"kernel"}
        assert values[values > 1].tolist() == [2, 3]
    waits = [event.what for event in events if event.kind == "wait"]
    assert waits[:2] == ["aten::nonzero", "aten::index"]


def test_a_card_draws_from_its_own_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    torch.cuda.manual_seed(2)
    first = nn.functional.dropout(torch.ones(50, device="cuda:0"))
    torch.rand(2, device="cuda:1")
    assert torch.equal(torch.rand(3), expected)
    torch.cuda.manual_seed(2)
    assert torch.equal(nn.functional.dropout(torch.ones(50, device="cuda:0")), first)


def test_cards_are_chosen_as_by_cuda() -> None:
    uuids = "GPU-aa-1,GPU-ab-2,MIG-c-3,MIG-c-4"
    cases = {
        "2,0": [2],  # a MIG instance is seen alone
        "1,0": [1, 0],
        "1,7,0": [1],
        "1,1": [],
        "": [],
        "-1": [],
        "GPU-ab,GPU-aa": [1, 0],
        "GPU-a": [],  # ambiguous
        "MIG-c-4,MIG-c-3": [3],
    }
    code = (
        "import os\nfrom emulated_cuda import LIBRARY\n"
        f"for wanted in {list(cases)}:\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = wanted\n"
        "    print([LIBRARY.fake_number_in_machine(i) for i in range(LIBRARY.fake_count())])\n"
    )
    settings = {"FAKE_CUDA_DEVICES": "4", "FAKE_CUDA_UUIDS": uuids}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(cards) for cards in cases.values()]


def test_after_a_failed_kernel_every_call_fails() -> None:
    code = """
import torch
values = torch.zeros(3, device="cuda:0")
for call in (lambda: values + 1, lambda: values + 1, torch.cuda.synchronize, values.cpu):
    try:
        call()
        print("ok")
    except torch.AcceleratorError as error:
        print(str(error).splitlines()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FAKE_CUDA_FAIL_AT": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    failed = "CUDA error: device-side assert triggered"
    assert done.stdout.splitlines() == ["ok", failed, failed, failed]
