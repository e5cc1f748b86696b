"""What optimizers keep between rounds: AdamW against plain PyTorch, and records of any."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.array_records import flat_like, view_record
from flower_blsgd.strategy.replies import ModelShape
from flower_blsgd.worker.model_io import load_state
from flower_blsgd.worker.optimizers import load_momentum, momentum_record, zero_momentum

from ..in_process_grid import over_the_wire, same_bits

RATE, DECAY = 0.02, 0.1
STEPS, SIZE, ROUNDS = 3, 4, 4
NAMES = {
    f"{slot}/{parameter}"
    for slot in ("exp_avg", "exp_avg_sq", "step")
    for parameter in ("0.weight", "0.bias", "2.weight", "2.bias")
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 3, generator=generator), torch.arange(48) % 4


def model_of(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def adamw_of(**settings: Any) -> LocalSGD:
    return LocalSGD(model_of(), data(), optimizer="adamw", weight_decay=DECAY, **settings)


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def order_of(server_round: int, arrays: ArrayRecord, **changes: Any) -> TrainOrder:
    order = TrainOrder(
        round=server_round,
        epoch=1,
        local_steps=STEPS,
        batch_size=SIZE,
        learning_rate=RATE,
        seed=server_round,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=np.random.default_rng(server_round).integers(0, 48, STEPS * SIZE, dtype=np.int32),
        arrays=arrays,
    )
    return dataclasses.replace(order, **changes)


def start() -> ArrayRecord:
    return ArrayRecord(model_of().state_dict())


def torch_steps(model: nn.Module, optimizer: torch.optim.Optimizer, order: TrainOrder) -> None:
    inputs, targets = data()
    for batch in np.split(order.indices.astype(np.int64), STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()


def furthest(arrays: ArrayRecord, model: nn.Module) -> float:
    expected = model.state_dict()
    assert set(arrays) == set(expected)
    return max(
        float(np.abs(arrays[name].numpy() - tensor.numpy()).max())
        for name, tensor in expected.items()
    )


def steps_in(record: ArrayRecord) -> set[float]:
    return {float(record[name].numpy()) for name in record if name.startswith("step/")}


# --- by hand


def test_first_step_moves_each_weight_by_the_rate_against_its_gradient() -> None:
    # The loss is (w x)^2 for x = (1, -1e-3): with w = (1, 2) the gradient is 2 (w x) x, where
    # w x = 0.998, so about (2, -0.002): three orders apart, and both steps are 0.1.
    model = nn.Linear(2, 1, bias=False)
    sgd = LocalSGD(
        model,
        (torch.tensor([[1.0, -1e-3]]), torch.zeros(1)),
        lambda outputs, targets: outputs.squeeze(1).square(),
        optimizer="adamw",
        weight_decay=0.5,
    )
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    order = order_of(
        1,
        ArrayRecord(model.state_dict()),
        local_steps=1,
        batch_size=1,
        indices=np.zeros(1, np.int32),
        learning_rate=0.1,
        momentum_policy="average",
    )
    report = sgd.run(order)
    # Decoupled decay first: w - 0.1 x 0.5 w = (0.95, 1.9).
    assert report.arrays["weight"].numpy()[0] == pytest.approx([0.85, 2.0], abs=1e-5)
    assert report.momentum is not None
    found = {name: array.numpy() for name, array in report.momentum.items()}
    assert set(found) == {"exp_avg/weight", "exp_avg_sq/weight", "step/weight"}
    gradient = 2 * 0.998 * np.array([1.0, -1e-3])
    assert found["exp_avg/weight"][0] == pytest.approx(0.1 * gradient, rel=1e-5)
    assert found["exp_avg_sq/weight"][0] == pytest.approx(0.001 * gradient**2, rel=1e-3)
    assert (found["step/weight"].shape, found["step/weight"].dtype) == ((), np.float32)
    assert found["step/weight"] == 1.0


# --- against plain PyTorch


@pytest.mark.parametrize("kept_in", ["object", "state", "bytes"])
def test_keep_equals_one_torch_loop(kept_in: str) -> None:
    sgd, arrays, model = adamw_of(), start(), model_of()
    given = None if kept_in == "object" else RecordDict()
    optimizer = torch_adamw(model)
    for server_round in range(1, ROUNDS + 1):
        if kept_in == "bytes":  # as Flower's engines do: another process, a state of plain arrays
            message = over_the_wire(Message(given, 1, "train"))
            sgd, given = adamw_of(), RecordDict(dict(message.content))
        order = order_of(server_round, arrays)
        arrays = sgd.run(order, given).arrays
        torch_steps(model, optimizer, order)
        assert furthest(arrays, model) < 1e-6
    assert furthest(start(), model) > 0.1  # it has moved
    if given is not None:
        kept = given.array_records["momentum"]
        assert set(kept) == NAMES
        assert steps_in(kept) == {float(STEPS * ROUNDS)}


def test_reset_equals_a_fresh_torch_optimizer_each_round() -> None:
    sgd, arrays, state = adamw_of(), start(), RecordDict()
    model = model_of()
    for server_round in range(1, ROUNDS + 1):
        order = order_of(server_round, arrays, momentum_policy="reset")
        arrays = sgd.run(order, state).arrays
        torch_steps(model, torch_adamw(model), order)
        assert furthest(arrays, model) < 1e-6
    assert len(state) == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_average_of_equal_workers_equals_one_torch_loop(num_workers: int) -> None:
    workers = [adamw_of() for _ in range(num_workers)]
    shape, arrays, momentum = ModelShape(start()), start(), None
    model = model_of()
    optimizer = torch_adamw(model)
    weights = [1 / num_workers] * num_workers
    for server_round in range(1, ROUNDS + 1):
        order = order_of(server_round, arrays, momentum_policy="average", momentum=momentum)
        reports = [sent(worker, order) for worker in workers]
        arrays = view_record(weighted_average([shape.checked(r.arrays) for r in reports], weights))
        states = [shape.checked_momentum(r.momentum or ArrayRecord()) for r in reports]
        assert [set(state) for state in states] == [NAMES] * num_workers
        momentum = view_record(weighted_average(states, weights))
        torch_steps(model, optimizer, order)
        assert furthest(arrays, model) < 1e-6
    assert momentum is not None
    assert steps_in(momentum) == {float(STEPS * ROUNDS)}


def sent(worker: LocalSGD, order: TrainOrder) -> TrainReport:
    message = over_the_wire(Message(order.to_records(), 1, "train"))
    report = worker.run(TrainOrder.from_message(message))
    return TrainReport.from_reply(over_the_wire(report.to_reply(message)), order)


def test_counters_are_float32_and_may_be_a_fraction() -> None:
    """Workers of 32 and 8 steps have 27.2 in the mean: the next correction lies between."""
    for dtype in (torch.float64, torch.float32):  # in which torch would keep them
        torch.set_default_dtype(dtype)
        try:
            sgd = adamw_of()
            momentum = sgd.run(order_of(1, start(), momentum_policy="average")).momentum
        finally:
            torch.set_default_dtype(torch.float32)
        assert momentum is not None
        assert momentum["step/0.weight"].numpy().dtype == np.float32
    for name in momentum:
        if name.startswith("step/"):
            momentum[name].numpy()[...] = 27.2
    order = order_of(2, start(), momentum_policy="average", momentum=momentum)
    report = sgd.run(order)
    assert report.momentum is not None
    assert steps_in(report.momentum) == {float(np.float32(27.2) + STEPS)}
    assert steps_in(momentum) == {float(np.float32(27.2))}  # the order is left alone
    for name in ("step/0.weight", "step/0.bias", "step/2.weight", "step/2.bias"):
        del momentum[name]  # moments without their counter begin with zero
    first = adamw_of().run(order_of(2, start(), momentum_policy="reset")).arrays
    assert same_bits(sgd.run(order).arrays, first)


# --- where it is kept


def test_keep_works_in_the_memory_of_the_state() -> None:
    """As `worker_process` moves it to shared memory; the optimizer must not leave that."""
    sgd, state = adamw_of(), RecordDict()
    sgd.run(order_of(1, start()), state)
    kept = state.array_records["momentum"]
    moved = state["momentum"] = flat_like(kept)
    memories = {name: array.numpy() for name, array in moved.items()}
    for name, memory in memories.items():
        memory[...] = kept[name].numpy()
    for server_round in (2, 3):
        sgd.run(order_of(server_round, start()), state)
        found = state.array_records["momentum"]
        assert all(np.shares_memory(found[name].numpy(), memories[name]) for name in memories)
        assert steps_in(found) == {float(STEPS * server_round)}
    kept_by_torch = sgd._optimizer.state[sgd.model[0].weight].values()
    addresses = {memory.__array_interface__["data"][0] for memory in memories.values()}
    assert {tensor.data_ptr() for tensor in kept_by_torch} <= addresses


# --- to and from records


def norm_model(value: float = 0.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def sgd_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 2.0], [3.0, -1.0]])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("kind", [sgd_of, adamw])
def test_momentum_survives_a_move_to_another_optimizer(
    kind: Callable[..., torch.optim.Optimizer], copy: bool
) -> None:
    model = norm_model(0.5)
    optimizer = kind(model)
    assert len(momentum_record(model, optimizer)) == 0  # before the first step
    step(model, optimizer)
    record = momentum_record(model, optimizer)
    slots = ("",) if kind is sgd_of else ("exp_avg/", "exp_avg_sq/", "step/")
    parameters = ("0.weight", "0.bias", "1.weight", "1.bias")  # no buffers
    assert set(record) == {slot + name for slot in slots for name in parameters}
    before = {name: array.numpy().copy() for name, array in record.items()}

    twin = norm_model()
    load_state(twin, ArrayRecord(model.state_dict()))
    other = kind(twin)
    load_momentum(twin, other, record, copy)
    step(model, optimizer)
    step(twin, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name
    kept = all((array.numpy() == before[name]).all() for name, array in record.items())
    assert kept == copy  # else it is the record's memory that the step works on


@pytest.mark.parametrize("kind", [sgd_of, adamw])
def test_momentum_of_nothing_or_of_another_optimizer_is_zero(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    model = norm_model(0.5)
    other = (adamw if kind is sgd_of else sgd_of)(model)
    step(model, other)
    for record in (None, ArrayRecord(), momentum_record(model, other)):
        optimizer = kind(model)
        step(model, optimizer)
        views = momentum_record(model, optimizer, copy=False)
        zero_momentum(model, optimizer)  # in its memory
        assert not any(array.numpy().any() for array in views.values())
        step(model, optimizer)
        assert any(array.numpy().any() for array in views.values())
        load_momentum(model, optimizer, record)
        assert len(momentum_record(model, optimizer)) == 0
