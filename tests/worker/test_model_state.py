"""Weights and momentum to and from Flower records."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from flower_blsgd.worker.model_state import (
    load_momentum,
    load_state,
    model_fingerprint,
    momentum_record,
    zero_momentum,
)


def model_of(value: float = 0.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def sgd_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 2.0], [3.0, -1.0]])).square().sum().backward()
    optimizer.step()


def test_load_state_overwrites_parameters_and_buffers() -> None:
    source, target = model_of(0.5), model_of(9.0)
    source[1].running_mean.fill_(3.0)
    source[1].num_batches_tracked.fill_(7)
    load_state(target, ArrayRecord(source.state_dict()))
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
        assert tensor.dtype == source.state_dict()[name].dtype


def test_load_state_copies() -> None:
    arrays = ArrayRecord(model_of(0.5).state_dict())
    before = {name: array.numpy().copy() for name, array in arrays.items()}
    target = model_of()
    load_state(target, arrays)
    step(target, sgd_of(target))
    assert target[0].weight.flatten().tolist() != [0.5, 0.5]
    for name, array in arrays.items():
        assert np.array_equal(array.numpy(), before[name])


def test_load_state_reads_arrays_that_may_not_be_written_to() -> None:
    class Locked(Array):
        def numpy(self) -> np.ndarray:
            array = super().numpy()
            array.flags.writeable = False
            return array

    arrays = ArrayRecord()
    for name, tensor in model_of(0.25).state_dict().items():
        arrays[name] = Locked(tensor.numpy())
    target = model_of()
    load_state(target, arrays)  # pytest turns torch's warning into an error
    assert target[0].weight.flatten().tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda a: a.pop("0.bias"), "'0.bias' is only in the worker"),
        (lambda a: a.update({"more": Array(np.zeros(1))}), "'more' is only in the global model"),
        (lambda a: a.update({"0.bias": Array(np.zeros((1, 1)))}), r"'0.bias' has shape \(1, 1\)"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_load_state_of_another_model_is_refused_by_name(change: object, told: str) -> None:
    arrays = ArrayRecord(model_of().state_dict())
    change(arrays)  # type: ignore[operator]
    with pytest.raises(ValueError, match=told):
        load_state(model_of(), arrays)


def test_momentum_is_empty_before_the_first_step() -> None:
    model = model_of(0.5)
    assert len(momentum_record(model, sgd_of(model))) == 0


def test_momentum_survives_a_move_to_another_optimizer() -> None:
    model = model_of(0.5)
    optimizer = sgd_of(model)
    step(model, optimizer)
    record = momentum_record(model, optimizer)
    assert set(record) == {"0.weight", "0.bias", "1.weight", "1.bias"}  # no buffers

    twin = model_of()
    load_state(twin, ArrayRecord(model.state_dict()))
    other = sgd_of(twin)
    load_momentum(twin, other, record)
    step(model, optimizer)
    step(twin, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_momentum_record_is_a_copy() -> None:
    model = model_of(0.5)
    optimizer = sgd_of(model)
    step(model, optimizer)
    record = momentum_record(model, optimizer)
    before = record["0.weight"].numpy().copy()
    load_momentum(model, optimizer, record)
    step(model, optimizer)
    assert np.array_equal(record["0.weight"].numpy(), before)
    assert not np.array_equal(momentum_record(model, optimizer)["0.weight"].numpy(), before)


def test_momentum_that_is_a_view_on_shared_memory_is_not_written_to() -> None:
    shared = np.full((1, 2), 3.0, np.float32)

    class View(Array):
        def numpy(self) -> np.ndarray:
            return shared

    record = ArrayRecord()
    record["0.weight"] = View(shared)
    model = model_of(0.5)
    optimizer = sgd_of(model)
    load_momentum(model, optimizer, record)
    step(model, optimizer)
    assert shared.tolist() == [[3.0, 3.0]]
    assert momentum_record(model, optimizer)["0.weight"].numpy().tolist() != [[3.0, 3.0]]


@pytest.mark.parametrize("record", [None, ArrayRecord()])
def test_momentum_nothing_stands_for_zero(record: ArrayRecord | None) -> None:
    model = model_of(0.5)
    optimizer = sgd_of(model)
    step(model, optimizer)
    load_momentum(model, optimizer, record)
    assert len(momentum_record(model, optimizer)) == 0


@pytest.mark.parametrize("copy", [True, False])
def test_momentum_of_adamw_survives_a_move_to_another_optimizer(copy: bool) -> None:
    model = model_of(0.5)
    optimizer = adamw_of(model)
    step(model, optimizer)
    record = momentum_record(model, optimizer)
    slots = ("exp_avg", "exp_avg_sq", "step")
    parameters = ("0.weight", "0.bias", "1.weight", "1.bias")  # no buffers
    assert set(record) == {f"{slot}/{name}" for slot in slots for name in parameters}

    twin = model_of()
    load_state(twin, ArrayRecord(model.state_dict()))
    other = adamw_of(twin)
    load_momentum(twin, other, record, copy)
    step(model, optimizer)
    step(twin, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name
    assert record["step/0.bias"].numpy() == (1.0 if copy else 2.0)  # the memory of the record


def test_momentum_of_another_optimizer_is_none() -> None:
    model = model_of(0.5)
    optimizer = sgd_of(model)
    step(model, optimizer)
    other = adamw_of(model)
    step(model, other)
    load_momentum(model, other, momentum_record(model, optimizer))
    assert len(momentum_record(model, other)) == 0


@pytest.mark.parametrize("kind", [sgd_of, adamw_of])
def test_zero_momentum_stays_in_its_memory(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = model_of(0.5)
    optimizer = kind(model)
    step(model, optimizer)
    views = momentum_record(model, optimizer, copy=False)
    assert any(array.numpy().any() for array in views.values())
    zero_momentum(model, optimizer)
    assert not any(array.numpy().any() for array in views.values())


def test_fingerprint_is_of_names_shapes_and_dtypes_and_not_of_values() -> None:
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert model_fingerprint(one) == model_fingerprint(other)
    assert len(model_fingerprint(one)) == 16
    different = [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).double()]
    different.append(nn.Sequential(nn.Linear(2, 3)))
    assert len({model_fingerprint(model) for model in [one, *different]}) == 5
