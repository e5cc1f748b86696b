"""Workers that keep the model and get averaged gradients: against one process with all batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.flower.array_records import tensors_of, view_record
from flower_blsgd.protocol import ProtocolError
from flower_blsgd.worker.model_io import state_record

from .helpers import order_for, overflowing_loss

CLIP, RATES = 0.05, (0.5, 0.25, 0.125, 1.0)
BATCHES = ((0, 1, 2, 3, 4, 5), (6, 7, 8))  # 2 : 1


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 3, generator=generator), torch.arange(40) % 4


def model_of() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)


def custom(model: nn.Module) -> torch.optim.Optimizer:
    first, second = [*model[0].parameters()], [*model[2].parameters()]  # type: ignore[index]
    return torch.optim.NAdam([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.02}])


def batches_of(step: int) -> list[list[int]]:
    return [[(7 * step + sample) % 40 for sample in batch] for batch in BATCHES]


def order_of(round: int, arrays: ArrayRecord, batch: Sequence[int], **changes: Any) -> TrainOrder:
    settings = {
        "round": round,
        "learning_rate": RATES[(round - 1) % 4],
        "momentum_policy": "average",
        "returns": "gradient",
    }
    return order_for(arrays, batch, len(batch), **(settings | changes))


def averaged(reports: Sequence[TrainReport]) -> ArrayRecord:
    """Return the average by samples, as the server computes it."""
    total = sum(report.num_examples for report in reports)
    weights = [report.num_examples / total for report in reports]
    return view_record(weighted_average([tensors_of(r.arrays) for r in reports], weights))


def last_order(round: int, arrays: ArrayRecord, **changes: Any) -> TrainOrder:
    settings = {"local_steps": 0, "batch_size": 1, "brings": "gradient", "returns": "model"}
    empty = np.empty(0, np.int32)
    return dataclasses.replace(order_of(round, arrays, [0]), indices=empty, **(settings | changes))


def train(
    workers: Sequence[LocalSGD], steps: int = 4, begin: ArrayRecord | None = None
) -> list[TrainReport]:
    """Let the workers take these steps together; return their last reports."""
    arrays, brings = begin or state_record(model_of()), "model"
    for step in range(steps):
        orders = [order_of(step + 1, arrays, batch, brings=brings) for batch in batches_of(step)]
        reports = [worker.run(order) for worker, order in zip(workers, orders, strict=True)]
        arrays, brings = averaged(reports), "gradient"
    return [worker.run(last_order(steps + 1, arrays)) for worker in workers]


def one_process(make: Callable[[nn.Module], torch.optim.Optimizer], clip: float) -> nn.Module:
    inputs, targets = data()
    model = model_of()
    optimizer = make(model)
    firsts = [group["lr"] for group in optimizer.param_groups]
    for step in range(4):
        for group, first in zip(optimizer.param_groups, firsts, strict=True):
            group["lr"] = first * RATES[step]
        chosen = [sample for batch in batches_of(step) for sample in batch]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip  # else this tests nothing
        optimizer.step()
    return model


@pytest.mark.parametrize("clip", [0.0, CLIP])
@pytest.mark.parametrize(
    ("optimizer", "make", "settings"),
    [
        ("sgd", sgd, {"momentum": 0.9, "weight_decay": 0.1}),
        ("adamw", adamw, {"weight_decay": 0.1}),
        (custom, custom, {}),
    ],
)
def test_batches_two_to_one_are_one_process_with_the_whole_batch(
    optimizer: Any, make: Any, settings: dict[str, Any], clip: float
) -> None:
    own: dict[str, Any] = {"optimizer": optimizer, "clip_norm": clip, **settings}
    workers = [LocalSGD(model_of(), data(), **own) for _ in range(2)]
    reports = train(workers)
    expected = one_process(make, clip).state_dict()
    for report in reports:
        for name, array in report.arrays.items():
            assert np.abs(array.numpy() - expected[name].numpy()).max() < 1e-6
    first, second = (tensors_of(r.momentum or ArrayRecord()) for r in reports)
    assert first.keys() == second.keys() != set()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_skipped_step_changes_the_buffers_only() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
    worker = LocalSGD(model, data(), momentum=0.9)
    begin = state_record(model)
    report = worker.run(order_of(1, begin, range(8)))
    changed = {name: array.numpy().copy() for name, array in report.arrays.items()}
    changed["0.running_mean"] += 1.0
    report = worker.run(last_order(2, view_record(changed), brings="skip"))
    for name, array in report.arrays.items():
        known = changed if name.startswith("0.") and "running" in name else tensors_of(begin)
        if name != "0.num_batches_tracked":
            assert np.array_equal(array.numpy(), known[name])
    assert not report.momentum


def test_a_parameter_that_no_worker_used_has_no_step() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 4)
            self.unused = nn.Linear(3, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    model = Half()
    begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    worker = LocalSGD(model, data(), weight_decay=0.1)
    report = worker.run(order_of(1, state_record(model), range(8)))
    report = worker.run(last_order(2, averaged([report])))
    same = {n: np.array_equal(a.numpy(), begin[n].numpy()) for n, a in report.arrays.items()}
    assert same == {n: n.startswith("unused") for n in begin}


def test_a_gradient_for_a_model_that_is_not_kept_is_refused() -> None:
    worker, begin = LocalSGD(model_of(), data()), state_record(model_of())
    with pytest.raises(ProtocolError, match="has not kept the model before round 2"):
        worker.run(order_of(2, begin, range(4), brings="gradient"))
    report = worker.run(order_of(1, begin, range(4)))
    with pytest.raises(ProtocolError, match="before round 3"):  # that of round 2 was lost
        worker.run(order_of(3, report.arrays, range(4), brings="gradient"))
    with pytest.raises(ProtocolError, match="before round 2"):  # after an error
        worker.run(order_of(2, report.arrays, range(4), brings="gradient"))


def test_float16_sends_finite_gradients_and_the_scale() -> None:
    worker = LocalSGD(model_of(), data(), overflowing_loss(3000.0), precision="float16")
    report = worker.run(order_of(1, state_record(model_of()), range(8)))
    assert report.skipped_steps == 2  # repeated here, so no other worker skips its step
    gradient = averaged([report])
    assert all(np.isfinite(array.numpy()).all() for array in gradient.values())
    momentum = worker.run(last_order(2, gradient)).momentum
    assert momentum
    assert momentum["grad-scaler"].numpy()[0] == 65536 / 4
