"""Small models, data and orders, and how to compare reports."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_blsgd import TrainOrder, TrainReport
from flower_blsgd.worker.losses import cross_entropy
from flower_blsgd.worker.model_io import state_record

from ..in_process_grid import same_bits

NUM_SAMPLES, SIZE, STEPS = 40, 4, 3

SECOND_CARD = pytest.param(
    "cuda:1",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    ],
)


def data() -> tuple[Tensor, Tensor]:
    """Return images of 3x6x6 and labels of four classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SAMPLES, 3, 6, 6, generator=generator), torch.arange(NUM_SAMPLES) % 4


def overflowing_loss(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss whose backward pass overflows above a limit, as in a type with less range."""

    class Overflowing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return torch.where(gradient.abs().amax() > limit, torch.inf, gradient)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(Overflowing.apply(outputs.float()), targets)  # type: ignore[no-untyped-call]

    return loss


def small_model(dropout: bool = False) -> nn.Module:
    """Return a model with BatchNorm, for these images."""
    return _image_model(nn.BatchNorm2d(8), 8, dropout)


def independent_model(dropout: bool = False) -> nn.Module:
    """Return a model whose samples do not depend on each other, for these images."""
    return _image_model(nn.GroupNorm(2, 8), 0, dropout)


def _image_model(norm: nn.Module, hidden: int, dropout: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)  # leaves cards alone
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            norm,
            nn.ReLU(),
            nn.Conv2d(8, hidden, 1) if hidden else nn.Identity(),
            nn.Dropout(0.5) if dropout else nn.Identity(),
            nn.Flatten(),
            nn.Linear(8 * 36, 4),
        )


def order_for(
    arrays: ArrayRecord, indices: Sequence[int], batch_size: int, **changes: Any
) -> TrainOrder:
    """Return an order of as many steps as these samples make."""
    order = TrainOrder(
        round=1,
        epoch=1,
        local_steps=len(indices) // batch_size,
        batch_size=batch_size,
        learning_rate=0.1,
        seed=0,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=np.array(indices, np.int32),
        arrays=arrays,
    )
    return dataclasses.replace(order, **changes)


def drawn_order(
    server_round: int,
    arrays: ArrayRecord,
    local_steps: int = STEPS,
    batch_size: int = SIZE,
    **changes: Any,
) -> TrainOrder:
    """Return an order whose samples and seed differ from round to round."""
    draw = np.random.default_rng(server_round)
    indices = draw.integers(0, NUM_SAMPLES, local_steps * batch_size, dtype=np.int32)
    own = {"round": server_round, "seed": server_round, "learning_rate": 0.02 / server_round}
    return order_for(arrays, indices.tolist(), batch_size, **(own | changes))


def order_of(server_round: int = 1, **changes: Any) -> TrainOrder:
    """Return an order for `small_model`, unless `arrays` are another model's."""
    arrays = changes.pop("arrays", None) or state_record(small_model())
    return drawn_order(server_round, arrays, **changes)


def independent_order(server_round: int = 1, **changes: Any) -> TrainOrder:
    """Return an order for `independent_model`."""
    return order_of(server_round, arrays=state_record(independent_model()), **changes)


# --- comparing


def same(one: TrainReport, other: TrainReport) -> bool:
    """Return whether they agree to the bit."""
    return (
        one.completed_steps == other.completed_steps
        and one.losses.tobytes() == other.losses.tobytes()
        and same_bits(one.arrays, other.arrays)
    )


def close(one: TrainReport, other: TrainReport, rtol: float = 1e-5, atol: float = 1e-6) -> bool:
    """Return whether they agree to rounding: a learning rate in a tensor is float32."""
    return np.allclose(one.losses, other.losses, rtol=rtol, atol=atol) and closely(
        one.arrays, other.arrays, rtol, atol
    )


def closely(one: ArrayRecord, other: ArrayRecord, rtol: float = 1e-5, atol: float = 1e-6) -> bool:
    return set(one) == set(other) and all(
        np.allclose(one[name].numpy(), other[name].numpy(), rtol=rtol, atol=atol) for name in one
    )


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
