"""Small models, data and orders, how to compare reports, and a stand-in for CUDA graphs."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.worker.model_io import state_record

from ..in_process_grid import same_bits

NUM_SAMPLES, SIZE, STEPS = 40, 4, 3


def data() -> tuple[Tensor, Tensor]:
    """Return images of 3x6x6 and labels of four classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SAMPLES, 3, 6, 6, generator=generator), torch.arange(NUM_SAMPLES) % 4


def small_model(dropout: bool = False) -> nn.Module:
    """Return a model with BatchNorm, for these images."""
    return _image_model(nn.BatchNorm2d(8), 8, dropout)


def independent_model(dropout: bool = False) -> nn.Module:
    """Return a model whose samples do not depend on each other, for these images."""
    return _image_model(nn.GroupNorm(2, 8), 0, dropout)


def _image_model(norm: nn.Module, hidden: int, dropout: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
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


# --- a stand-in for CUDA graphs on a CPU: what is replayed is the captured function, called again.
# It holds what a real graph takes for granted: every tensor that the step reads or writes is at the
# address at which it was when the step was captured.

Body = Callable[[torch.Generator], None]


@dataclass
class StandInGraph:
    body: Body
    optimizer: torch.optim.Optimizer
    generator: torch.Generator = field(default_factory=torch.Generator)
    replays: int = 0

    def __post_init__(self) -> None:
        self.addresses = self._now()

    def _now(self) -> list[int]:
        kept = [t for state in self.optimizer.state.values() for t in state.values()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [tensor.data_ptr() for tensor in [*parameters, *kept, *rates]]

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def replay(self) -> None:
        assert self._now() == self.addresses
        self.replays += 1
        self.body(self.generator)


class StandInCapture:
    """Captures on a CPU; `graphs` are all that it ever made."""

    def __init__(self) -> None:
        self.graphs: list[StandInGraph] = []
        self.warm_up_steps = 0
        self.released = 0

    def warm_up(self, body: Body) -> None:
        body(torch.Generator())
        self.warm_up_steps += 1

    def check(self, body: Body) -> None:
        self.warm_up(body)

    def graph(self, body: Body, optimizer: torch.optim.Optimizer) -> StandInGraph:
        graph = StandInGraph(body, optimizer)
        body(graph.generator)  # a graph would not compute, but what does must not matter
        self.graphs.append(graph)
        return graph

    def release(self) -> None:
        self.released += 1

    @property
    def replays(self) -> list[int]:
        """How often each was replayed."""
        return [graph.replays for graph in self.graphs]


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch, capture: object) -> None:
    """Make every `LocalSGD` that is built from now on capture its steps with this."""
    monkeypatch.setattr("flower_blsgd.worker.local_sgd.capture_for", lambda *told: capture)


def eager_and_graphed(
    model: Callable[..., nn.Module], **settings: Any
) -> tuple[LocalSGD, LocalSGD]:
    """Return two of a kind; a capture must be in place."""
    return tuple(  # type: ignore[return-value]
        LocalSGD(model(), data(), cuda_graph=cuda_graph, **settings) for cuda_graph in (False, True)
    )
