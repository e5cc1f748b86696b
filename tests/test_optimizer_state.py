"""What optimizers keep, and that torch keeps exactly that."""

import pytest
import torch

from flower_blsgd.protocol import COUNTERS, SLOTS, state_copies, state_name
from flower_blsgd.worker.optimizers import make_optimizer, slots_of


@pytest.mark.parametrize(
    ("optimizer", "momentum", "copies"),
    [("sgd", 0.9, 1), ("sgd", 0.0, 0), ("adamw", 0.9, 2), ("adamw", 0.0, 2)],
)
def test_copies_are_what_torch_keeps(optimizer: str, momentum: float, copies: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(50))
    made = make_optimizer(
        optimizer, [parameter], momentum=momentum, nesterov=False, weight_decay=0.0
    )
    parameter.grad = torch.ones(50)
    made.step()
    kept = {slot: tensor for slot, tensor in made.state[parameter].items() if tensor is not None}
    assert state_copies(optimizer, momentum) == copies
    assert sum(tensor.numel() for tensor in kept.values()) // 50 == copies
    if kept:
        assert set(kept) == set(SLOTS[optimizer]) == set(slots_of(made))
    for slot, tensor in kept.items():
        if slot in COUNTERS:
            assert (tensor.shape, tensor.dtype) == ((), torch.float32)
        else:
            assert (tensor.shape, tensor.dtype) == (parameter.shape, parameter.dtype)


def test_names_of_all_slots_differ() -> None:
    names = [state_name(slot, "a.b") for slots in SLOTS.values() for slot in slots]
    assert names == ["a.b", "exp_avg/a.b", "exp_avg_sq/a.b", "step/a.b"]
