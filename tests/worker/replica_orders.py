"""Orders for several workers, and what LocalSGD makes of them one after another."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.array_view import view_record

STEPS, SIZE, SAMPLES = 3, 4, 40


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return data, torch.arange(SAMPLES) % 4


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (SAMPLES, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(SAMPLES) % 10


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model in float64, with weights that are a function of the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def order_of(worker: int, arrays: ArrayRecord, server_round: int = 1, **changes: Any) -> TrainOrder:
    draw = np.random.default_rng([server_round, worker])
    order = TrainOrder(
        round=server_round,
        epoch=1,
        local_steps=STEPS,
        batch_size=SIZE,
        learning_rate=0.05,
        seed=100 * server_round + worker,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=draw.integers(0, SAMPLES, STEPS * SIZE, dtype=np.int32),
        arrays=arrays,
    )
    return dataclasses.replace(order, **changes)


def one_by_one(
    sgd: LocalSGD, orders: Sequence[TrainOrder], states: Sequence[RecordDict | None]
) -> list[TrainReport]:
    """Return copies: the next order works on in the memory of the one before."""
    return [
        dataclasses.replace(report, arrays=copied(report.arrays), momentum=copied(report.momentum))
        for report in (sgd.run(*work) for work in zip(orders, states, strict=True))
    ]


def copied(record: ArrayRecord | None) -> Any:
    """Return copies as views, as on the local grid: bytes are read by `ast`.

    Python 3.11 does not do that in several threads at once.
    """
    if record is None:
        return None
    return view_record({name: np.array(array.numpy()) for name, array in record.items()})


def furthest(one: ArrayRecord, other: ArrayRecord) -> float:
    """Return the largest difference relative to the largest number of its tensor."""
    assert list(one) == list(other)
    found = [0.0]
    for name, array in one.items():
        a, b = array.numpy(), other[name].numpy()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        found.append(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-9)))
    return max(found)
