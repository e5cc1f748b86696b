"""AdamW in the local steps: its moments and counters between rounds, against plain PyTorch."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.array_view import view_record
from flower_blsgd.model_check import ModelShape
from flower_blsgd.runtime.shared_arrays import share_views
from flower_blsgd.runtime.shared_pool import Pool
from flower_blsgd.worker.calibration import seconds_per_step

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


def kept_in_the_object(sgd: LocalSGD, state: RecordDict) -> tuple[LocalSGD, RecordDict | None]:
    return sgd, None


def kept_in_the_state(sgd: LocalSGD, state: RecordDict) -> tuple[LocalSGD, RecordDict | None]:
    return sgd, state


def sent_through_bytes(sgd: LocalSGD, state: RecordDict) -> tuple[LocalSGD, RecordDict | None]:
    """As Flower's engines do: another process, and a state of plain arrays."""
    message = over_the_wire(Message(state, 1, "train"))
    return adamw_of(), RecordDict(dict(message.content))


@pytest.mark.parametrize("between", [kept_in_the_object, kept_in_the_state, sent_through_bytes])
def test_keep_equals_one_torch_loop(between: Any) -> None:
    sgd, arrays, state = adamw_of(), start(), RecordDict()
    model = model_of()
    optimizer = torch_adamw(model)
    given: RecordDict | None = None
    for server_round in range(1, ROUNDS + 1):
        sgd, given = between(sgd, given or state)
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


def test_average_of_counters_may_be_a_fraction() -> None:
    """Workers of 32 and 8 steps have 27.2 in the mean: the next correction lies between."""
    sgd = adamw_of()
    momentum = sgd.run(order_of(1, start(), momentum_policy="average")).momentum
    assert momentum is not None
    for name in momentum:
        if name.startswith("step/"):
            momentum[name].numpy()[...] = 27.2
    order = order_of(2, start(), momentum_policy="average", momentum=momentum)
    report = sgd.run(order)
    assert report.momentum is not None
    assert steps_in(report.momentum) == {float(np.float32(27.2) + STEPS)}
    assert steps_in(momentum) == {float(np.float32(27.2))}  # the order is left alone


# --- where it is kept


def test_keep_works_in_the_shared_memory_of_the_state() -> None:
    """What `worker_process` does after each message; the optimizer must not leave that memory."""
    pool, sgd, state = Pool(), adamw_of(), RecordDict()
    addresses = []
    for server_round in range(1, 4):
        sgd.run(order_of(server_round, start()), state)
        moved = share_views(state.array_records["momentum"], pool)
        assert moved is not None
        state["momentum"] = moved
        memories = [array.numpy() for array in moved.values()]
        addresses.append([memory.__array_interface__["data"][0] for memory in memories])
        assert steps_in(moved) == {float(STEPS * server_round)}
        del moved, memories
    assert addresses[0] == addresses[1] == addresses[2]
    kept = sgd._optimizer.state[sgd.model[0].weight]
    assert {tensor.data_ptr() for tensor in kept.values()} <= set(addresses[0])


def test_two_nodes_may_share_one_object() -> None:
    sgd, one, two = adamw_of(), RecordDict(), RecordDict()
    first = sgd.run(order_of(1, start()), one).arrays
    assert same_bits(sgd.run(order_of(1, start()), two).arrays, first)
    assert not same_bits(sgd.run(order_of(1, start()), one).arrays, first)


def test_calibration_leaves_no_trace() -> None:
    models = []
    for calibrate in (False, True):
        sgd, state = adamw_of(), RecordDict()
        for server_round in (1, 2):
            if calibrate:
                seconds_per_step(sgd, SIZE, 48, seconds=0.01)
                assert len(sgd._optimizer.state) == 0
            report = sgd.run(order_of(server_round, start()), state)
        models.append(report.arrays)
    assert same_bits(*models)


def test_order_that_fails_leaves_zeros_where_it_is_kept() -> None:
    burning = False

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if burning:
            raise RuntimeError("the fan stands still")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    sgd, state = adamw_of(loss=loss), RecordDict()
    first = sgd.run(order_of(1, start()), state).arrays
    burning = True
    with pytest.raises(RuntimeError, match="the fan"):
        sgd.run(order_of(2, start()), state)
    kept = state.array_records["momentum"]
    assert set(kept) == NAMES
    assert not any(array.numpy().any() for array in kept.values())
    burning = False
    assert same_bits(sgd.run(order_of(1, start()), state).arrays, first)


def test_moments_without_their_counter_begin_with_zero() -> None:
    sgd, state = adamw_of(), RecordDict()
    first = sgd.run(order_of(1, start()), state).arrays
    for name in [name for name in state.array_records["momentum"] if name.startswith("step/")]:
        del state.array_records["momentum"][name]
    assert same_bits(adamw_of().run(order_of(1, start()), state).arrays, first)


def test_takes_no_notice_of_momentum() -> None:
    one = adamw_of(momentum=0.0).run(order_of(1, start())).arrays
    two = adamw_of(momentum=0.9, nesterov=True).run(order_of(1, start())).arrays
    assert same_bits(one, two)


def test_float64_as_torch_default_reports_float32_counters() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        sgd = adamw_of()
        report = sgd.run(order_of(1, start(), momentum_policy="average"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.momentum is not None
    assert report.momentum["step/0.weight"].numpy().dtype == np.float32


def test_unknown_optimizer_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^optimizer = 'adam' must be one of 'sgd', 'adamw'$"):
        LocalSGD(model_of(), data(), optimizer="adam")
