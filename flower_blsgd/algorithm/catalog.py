"""The algorithms by name: each a row of independent choices.

``steps`` x ``sampler`` x ``weights`` x ``train-on``; a run may override any of them. Adding an
algorithm is adding a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .averaging import EqualWeighting, LoadWeighting, NormalizedWeighting, Weighting
from .batch_shares import BalancedBatches
from .local_steps import BySpeedSteps, SameSteps, StepPolicy, SystemAwareSteps
from .sampling import Sampler, SeparatedSampler, TierName, UnifiedSampler, UniformSampler
from .train_on import TrainOn, TrainOnAll, TrainOnFast


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


@dataclass(frozen=True)
class PartSettings:
    """What the parts are built from; each takes what it needs.

    Parameters
    ----------
    local_steps_fast : int (default: 32)
        tau_fast.
    local_steps_slow : int, optional
        Of every slow worker; None: from their speed.
    shrink_slow_batch : bool (default: True)
        Smaller batches for workers too slow for one step.
    high_loss_ratio : float (default: 0.5)
        lambda.
    high_loss_to : {"fast", "slow"} (default: "fast")
        The tier that gets the highest losses.
    momentum : float (default: 0.9)
        Of the local steps; 0 for AdamW.
    nesterov : bool (default: False)
        Of the local steps.
    """

    local_steps_fast: int = 32
    local_steps_slow: int | None = None
    shrink_slow_batch: bool = True
    high_loss_ratio: float = 0.5
    high_loss_to: TierName = "fast"
    momentum: float = 0.9
    nesterov: bool = False


STEPS: Mapping[str, Callable[[PartSettings], StepPolicy]] = {
    "system-aware": lambda s: SystemAwareSteps(
        s.local_steps_fast, s.local_steps_slow, s.shrink_slow_batch
    ),
    "by-speed": lambda s: BySpeedSteps(s.local_steps_fast, s.shrink_slow_batch),
    "same": lambda s: SameSteps(s.local_steps_fast),
    "one": lambda _: SameSteps(1),
    "one-by-throughput": lambda _: BalancedBatches(),
}

SAMPLERS: Mapping[str, Callable[[PartSettings], Sampler]] = {
    "separated": lambda s: SeparatedSampler(s.high_loss_ratio, s.high_loss_to),
    "unified": lambda s: UnifiedSampler(s.high_loss_ratio, s.high_loss_to),
    "uniform": lambda _: UniformSampler(),
}

WEIGHTS: Mapping[str, Callable[[PartSettings], Weighting]] = {
    "load": lambda _: LoadWeighting(),
    "equal": lambda _: EqualWeighting(),
    "normalized": lambda s: NormalizedWeighting(s.momentum, s.nesterov),
}

TRAIN_ON: Mapping[str, Callable[[PartSettings], TrainOn]] = {
    "all": lambda _: TrainOnAll(),
    "fast": lambda _: TrainOnFast(),
    "fast-slow-sums": lambda _: TrainOnFast(slow_sums=True),
}
