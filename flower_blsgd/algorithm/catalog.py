"""The algorithms by name: each a row of independent choices.

``steps`` x ``sampler`` x ``weights`` x ``train-on``; a run may override any of them. Adding an
algorithm is adding a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .averaging import EqualWeighting, LoadWeighting, NormalizedWeighting, Weighting
from .local_steps import (
    BalancedBatches,
    BySpeedSteps,
    Participant,
    SameSteps,
    StepPolicy,
    SystemAwareSteps,
)
from .sampling import Sampler, SeparatedSampler, TierName, UnifiedSampler, UniformSampler


class TrainOn:
    """Decides which workers train: all of them, unless a subclass says otherwise."""

    slow_reduce: bool = False
    """Whether the slow workers sum the models of the others, as parameter servers."""

    def trains(self, participant: Participant) -> bool:
        """Return whether this worker trains."""
        return True


@dataclass(frozen=True)
class TrainOnFast(TrainOn):
    """Only fast workers train; a slow one is never sent an order.

    Parameters
    ----------
    slow_reduce : bool (default: False)
        Each slow worker sums its slice of the fast ones' models, as the CPUs of BytePS do
        (Jiang et al. 2020, "A Unified Architecture for Accelerating Distributed DNN Training").
    """

    slow_reduce: bool = False

    def trains(self, participant: Participant) -> bool:
        """Return whether it is fast."""
        return participant.fast


@dataclass(frozen=True)
class Choices:
    """One algorithm, by the names of its parts.

    Parameters
    ----------
    steps, sampler, weights, train_on : str
        Keys of `STEPS`, `SAMPLERS`, `WEIGHTS` and `TRAIN_ON`.
    momentum_buffers : {"keep", "reset", "average"} (default: "keep")
        What happens to momentum between rounds.
    """

    steps: str
    sampler: str
    weights: str
    train_on: str = "all"
    momentum_buffers: str = "keep"


ALGORITHMS: Mapping[str, Choices] = {
    "biased-local-sgd": Choices("system-aware", "separated", "load"),
    "unbiased-local-sgd": Choices("system-aware", "uniform", "equal"),
    "weighted-local-sgd": Choices("system-aware", "uniform", "load"),
    "sampled-local-sgd": Choices("system-aware", "separated", "equal"),
    "balanced-local-sgd": Choices("same", "uniform", "equal"),
    "fast-only-local-sgd": Choices("same", "uniform", "equal", "fast"),
    "sync-sgd": Choices("one", "uniform", "equal"),
    "sync-sgd-fast-only": Choices("one", "uniform", "equal", "fast"),
    "byteps": Choices("one", "uniform", "equal", "fast-slow-sums"),
    "dlb": Choices("one-by-throughput", "uniform", "load", "all", "average"),
    "fednova": Choices("system-aware", "uniform", "normalized", "all", "reset"),
}


class AlgorithmSettings(Protocol):
    """The settings that an algorithm's parts are built from; `config.RunConfig` has them."""

    @property
    def local_steps_fast(self) -> int:
        """tau_fast."""

    @property
    def local_steps_slow(self) -> int | str:
        """Steps of every slow worker; "auto": from their speed."""

    @property
    def shrink_slow_batch(self) -> bool:
        """Whether workers that are too slow for one step get smaller batches."""

    @property
    def high_loss_ratio(self) -> float:
        """Share of a tier's samples that are chosen by loss: lambda."""

    @property
    def high_loss_to(self) -> TierName:
        """The tier that gets the highest losses."""

    @property
    def optimizer(self) -> str:
        """Of the local steps: "sgd" or "adamw"."""

    @property
    def momentum(self) -> float:
        """Of SGD."""

    @property
    def nesterov(self) -> bool:
        """Of SGD."""


STEPS: Mapping[str, Callable[[AlgorithmSettings], StepPolicy]] = {
    "system-aware": lambda s: SystemAwareSteps(
        s.local_steps_fast,
        None if s.local_steps_slow == "auto" else int(s.local_steps_slow),
        s.shrink_slow_batch,
    ),
    "by-speed": lambda s: BySpeedSteps(s.local_steps_fast, shrink_slow_batch=s.shrink_slow_batch),
    "same": lambda s: SameSteps(s.local_steps_fast),
    "one": lambda _: SameSteps(1),
    "one-by-throughput": lambda _: BalancedBatches(),
}

SAMPLERS: Mapping[str, Callable[[AlgorithmSettings], Sampler]] = {
    "separated": lambda s: SeparatedSampler(s.high_loss_ratio, s.high_loss_to),
    "unified": lambda s: UnifiedSampler(s.high_loss_ratio, s.high_loss_to),
    "uniform": lambda _: UniformSampler(),
}

WEIGHTS: Mapping[str, Callable[[AlgorithmSettings], Weighting]] = {
    "load": lambda _: LoadWeighting(),
    "equal": lambda _: EqualWeighting(),
    "normalized": lambda s: (
        NormalizedWeighting(s.momentum, s.nesterov)
        if s.optimizer == "sgd"
        else NormalizedWeighting(0.0)
    ),
}

TRAIN_ON: Mapping[str, Callable[[AlgorithmSettings], TrainOn]] = {
    "all": lambda _: TrainOn(),
    "fast": lambda _: TrainOnFast(),
    "fast-slow-sums": lambda _: TrainOnFast(slow_reduce=True),
}
