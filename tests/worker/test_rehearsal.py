"""Steps that leave no trace."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from flower_blsgd.worker.rehearsal import host_randomness, rehearsal, same_randomness

from .stand_in import small_model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3, 6, 6)).square().sum().backward()
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [t for state in optimizer.state.values() for t in state.values()]
    return [*model.state_dict().values(), *kept]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("copies_on", [None, torch.device("cpu")])
def test_values_and_addresses_come_back(
    kind: type, before: int, copies_on: torch.device | None
) -> None:
    model = small_model()
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    for _ in range(before):
        train(model, optimizer)
    found = everything(model, optimizer)
    values = [tensor.clone() for tensor in found]
    with rehearsal(model, optimizer, copies_on):
        train(model, optimizer)
        changed = [not torch.equal(a, b) for a, b in zip(found, values, strict=True)]
        assert all(changed)
    after = everything(model, optimizer)
    assert [t.data_ptr() for t in after] == [t.data_ptr() for t in found]
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_fails_inside_leaves_no_trace_either() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    values = [tensor.clone() for tensor in everything(model, optimizer)]

    def fails() -> None:
        with rehearsal(model, optimizer):
            train(model, optimizer)
            raise RuntimeError("the fan stands still")

    with pytest.raises(RuntimeError, match="the fan"):
        fails()
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))


def test_buffers_that_are_replaced_come_back() -> None:
    model = small_model()
    norm = model[1]
    norm.register_buffer("none", None)
    before = dict(norm._buffers)
    values = [None if b is None else b.clone() for b in before.values()]
    with rehearsal(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        norm.running_mean += 1
        norm.running_mean = norm.running_mean + 1
        norm.none = torch.ones(1)
        norm.num_batches_tracked = None
    assert list(norm._buffers) == list(before)
    for buffer, (name, old), value in zip(
        norm._buffers.values(), before.items(), values, strict=True
    ):
        assert buffer is old, name
        assert buffer is None or torch.equal(buffer, value), name


DRAWS = [random.random, np.random.random, lambda: torch.rand(1)]


@pytest.mark.parametrize("draw", DRAWS, ids=["python", "numpy", "torch"])
def test_random_numbers_of_the_host_are_seen_and_come_back(draw: Callable[[], object]) -> None:
    model = small_model()
    before = host_randomness()
    assert same_randomness(before, host_randomness())
    with rehearsal(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        draw()
        assert not same_randomness(before, host_randomness())
    assert same_randomness(before, host_randomness())
