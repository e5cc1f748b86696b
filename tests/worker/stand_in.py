"""A stand-in for CUDA graphs on a CPU: what is replayed is the recorded function, called again.

It holds what a real graph takes for granted: every tensor that the step reads or writes is at the
address at which it was when the step was recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

Body = Callable[[torch.Generator], None]


@dataclass
class StandInRecording:
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
    """Records on a CPU; `recordings` are all that it ever made."""

    def __init__(self) -> None:
        self.recordings: list[StandInRecording] = []
        self.warm_up_steps = 0
        self.released = 0

    def warm_up(self, body: Body, steps: int) -> None:
        generator = torch.Generator()
        for _ in range(steps):
            body(generator)
        self.warm_up_steps += steps

    def check(self, body: Body) -> None:
        self.warm_up(body, 1)

    def record(self, body: Body, optimizer: torch.optim.Optimizer) -> StandInRecording:
        recording = StandInRecording(body, optimizer)
        body(recording.generator)  # a graph would not compute, but what does must not matter
        self.recordings.append(recording)
        return recording

    def release(self) -> None:
        self.released += 1

    @property
    def replays(self) -> list[int]:
        """How often each was replayed."""
        return [recording.replays for recording in self.recordings]


def record_on_cpu(monkeypatch: pytest.MonkeyPatch, capture: object) -> None:
    """Make every `LocalSGD` that is built from now on record its steps with this."""
    monkeypatch.setattr("flower_blsgd.worker.device_path.capture_for", lambda device: capture)


def draw_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step draw from the CPU's generator, which a step on CUDA would not touch."""
    monkeypatch.setattr("flower_blsgd.worker.cuda_graph.same_randomness", lambda *states: True)


def small_model(dropout: bool = False) -> nn.Module:
    """Return a model with BatchNorm, for images of 3x6x6 and four classes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1),
            nn.Dropout(0.5) if dropout else nn.Identity(),
            nn.Flatten(),
            nn.Linear(8 * 36, 4),
        )
