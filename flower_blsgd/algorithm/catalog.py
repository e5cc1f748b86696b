"""The algorithms by name: each a row of three independent choices.

``steps`` x ``sampler`` x ``weights``; a run may override any of them. Adding an algorithm is
adding a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .averaging import EqualWeighting, LoadWeighting, Weighting
from .local_steps import SameSteps, StepPolicy, SystemAwareSteps
from .sampling import Sampler, SeparatedSampler, UniformSampler


@dataclass(frozen=True)
class Choices:
    """One algorithm, by the names of its parts."""

    steps: str
    sampler: str
    weights: str


ALGORITHMS: Mapping[str, Choices] = {
    "biased-local-sgd": Choices("system-aware", "separated", "load"),
    "unbiased-local-sgd": Choices("system-aware", "uniform", "equal"),
    "weighted-local-sgd": Choices("system-aware", "uniform", "load"),
    "sampled-local-sgd": Choices("system-aware", "separated", "equal"),
    "balanced-local-sgd": Choices("same", "uniform", "equal"),
    "sync-sgd": Choices("one", "uniform", "equal"),
}

STEPS: Mapping[str, Callable[[int, int | None], StepPolicy]] = {
    "system-aware": SystemAwareSteps,
    "same": lambda local_steps_fast, _: SameSteps(local_steps_fast),
    "one": lambda *_: SameSteps(1),
}
"""Built from the local steps of the fast and of the slow workers (None: from their speed)."""

SAMPLERS: Mapping[str, Callable[[float], Sampler]] = {
    "separated": SeparatedSampler,
    "uniform": lambda _: UniformSampler(),
}
"""Built from the high-loss ratio."""

WEIGHTS: Mapping[str, Callable[[], Weighting]] = {
    "load": LoadWeighting,
    "equal": EqualWeighting,
}
