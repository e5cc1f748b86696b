"""The algorithms by name: each a row of independent choices.

``steps`` x ``sampler`` x ``weights`` x ``train-on``; a run may override any of them. Adding an
algorithm is adding a row. Custom parts are named as ``module:Class``, or given as objects.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, nearest
from .averaging import (
    EqualWeighting,
    LoadWeighting,
    NormalizedWeighting,
    PerSampleWeighting,
    Weighting,
)
from .local_steps import (
    DEFAULT_LOCAL_STEPS,
    BalancedBatches,
    SameSteps,
    StepPolicy,
    SystemAwareSteps,
)
from .sampling import (
    Sampler,
    SeparatedSampler,
    UnifiedSampler,
    UniformSampler,
)
from .selection import ActiveBias, ImportanceSampling, InfoBatch, Selection


@dataclass(frozen=True)
class TrainOn:
    """Choice of the workers that train, and the task of the others.

    With `slow_reduce`, only with `fast_only`, each slow worker sums a slice of the fast workers'
    models, as the CPUs of BytePS do (Jiang et al. 2020, "A Unified Architecture for Accelerating
    Distributed DNN Training").
    """

    fast_only: bool = False
    slow_reduce: bool = False


@dataclass(frozen=True)
class Choices:
    """One algorithm, by the names of its parts.

    The first four are keys of `STEPS`, `SAMPLERS`, `WEIGHTS` and `TRAIN_ON`. `momentum_buffers`
    ("keep", "reset" or "average") is the policy for momentum between rounds, `local_steps_fast` tau
    of the fastest worker or "auto". The others are defaults of the settings with these names.
    """

    steps: str
    sampler: str
    weights: str
    train_on: str = "all"
    momentum_buffers: str = "keep"
    local_steps_fast: int | str = DEFAULT_LOCAL_STEPS
    high_loss_to: str = "fast"
    epoch: str = "samples"
    average: str = "models"


ALGORITHMS: Mapping[str, Choices] = {
    "recommended": Choices("system-aware", "uniform", "load", local_steps_fast="auto"),
    "biased-local-sgd": Choices("system-aware", "separated", "load"),
    "unbiased-local-sgd": Choices("system-aware", "uniform", "equal"),
    "weighted-local-sgd": Choices("system-aware", "uniform", "load"),
    "sampled-local-sgd": Choices("system-aware", "separated", "equal"),
    "balanced-local-sgd": Choices("same", "uniform", "equal"),
    "fast-only-local-sgd": Choices("same", "uniform", "equal", "fast"),
    "sync-sgd": Choices("one", "uniform", "equal"),
    "sync-sgd-fast-only": Choices("one", "uniform", "equal", "fast"),
    "byteps": Choices("one", "uniform", "equal", "fast-slow-sums"),
    "dlb": Choices(
        "one-by-throughput", "uniform", "load", momentum_buffers="average", average="gradients"
    ),
    "fednova": Choices("system-aware", "uniform", "normalized", "all", "reset"),
    "biased-local-sgd-released": Choices(
        "system-aware", "candidates", "equal", high_loss_to="slow", epoch="table"
    ),
    "unbiased-local-sgd-released": Choices("system-aware", "reshuffled", "equal", epoch="table"),
}


Settings = Any
"""`config.RunConfig`, which is built on this module."""

RELEASED_SAMPLERS = ("candidates", "reshuffled")
"""Samplers of the authors' released code; ``released.py`` has them, with their strategy."""


def tau_fast(settings: Settings) -> int | None:
    """Return tau_fast of the settings; None for "auto", which leaves a policy open."""
    steps = settings.choices.local_steps_fast
    return None if steps == "auto" else int(steps)


STEPS: Mapping[str, Callable[[Settings], StepPolicy]] = {
    "system-aware": lambda s: SystemAwareSteps(
        tau_fast(s),
        None if s.local_steps_slow == "auto" else int(s.local_steps_slow),
        s.shrink_slow_batch,
    ),
    "same": lambda s: SameSteps(tau_fast(s)),
    "one": lambda _: SameSteps(1),
    "one-by-throughput": lambda _: BalancedBatches(),
}

SAMPLERS: Mapping[str, Callable[[Settings], Sampler]] = {
    "separated": lambda s: SeparatedSampler(s.high_loss_ratio, s.choices.high_loss_to),
    "unified": lambda s: UnifiedSampler(s.high_loss_ratio, s.choices.high_loss_to),
    "uniform": lambda _: UniformSampler(),
}

SELECTIONS: Mapping[str, Callable[[Settings], Selection]] = {
    "infobatch": lambda _: InfoBatch(),
    "importance-sampling": lambda _: ImportanceSampling(),
    "active-bias": lambda _: ActiveBias(),
}

WEIGHTS: Mapping[str, Callable[[Settings], Weighting]] = {
    "load": lambda _: LoadWeighting(),
    "per-sample": lambda _: PerSampleWeighting(),
    "equal": lambda _: EqualWeighting(),
    "normalized": lambda s: (
        NormalizedWeighting(s.momentum, s.nesterov)
        if s.optimizer == "sgd"
        else NormalizedWeighting(0.0)
    ),
}

TRAIN_ON: Mapping[str, TrainOn] = {
    "all": TrainOn(),
    "fast": TrainOn(fast_only=True),
    "fast-slow-sums": TrainOn(fast_only=True, slow_reduce=True),
}


# --- parts by name

_KINDS: Mapping[str, tuple[Mapping[str, Callable[[Settings], Any]], type]] = {
    "steps": (STEPS, StepPolicy),
    "sampler": (SAMPLERS, Sampler),
    "weights": (WEIGHTS, Weighting),
    "selection": (SELECTIONS, Selection),
}

CUSTOM_PARTS = tuple(_KINDS)
"""The settings that also accept ``module:Class``, and in Python an object."""

_GIVEN = "given-in-python"
_given: dict[tuple[str, str], Any] = {}


def register_part(setting: str, part: object) -> str:
    """Register an object as a part of the algorithm in this process, and return its name.

    It replaces an object of the same class. UsageError if it has the wrong base class.
    """
    base = _KINDS[setting][1]
    if base not in type(part).__mro__:  # a Protocol
        raise UsageError(f"{setting} = {part!r} must be a name, module:Class, or a {base.__name__}")
    name = f"{_GIVEN}:{type(part).__name__}"
    _given[setting, name] = part
    return name


def part_of(setting: str, name: str, settings: Settings) -> Any:
    """Return a part of the algorithm: a built-in one, ``module:Class``, or a registered object.

    `setting` is one of `CUSTOM_PARTS`, and `name` its value; only built-in parts use `settings`.
    UsageError if there is no such part, it cannot be created without arguments, or it has the wrong
    base class.
    """
    known, base = _KINDS[setting]
    if name in known:
        return known[name](settings)
    if (setting, name) in _given:
        return _given[setting, name]
    module, colon, class_name = name.partition(":")
    if module == _GIVEN:
        raise UsageError(
            f"{setting} = {name!r}: it was given as an object, which is not saved; pass it again"
        )
    if not colon:
        raise UsageError(f"{setting} = {name!r} is not known; {nearest(name, known)}")
    try:
        part = getattr(importlib.import_module(module), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{setting} = {name!r} cannot be created: {error}") from error
    if base not in type(part).__mro__:  # a Protocol
        raise UsageError(
            f"{setting} = {name!r} is a {type(part).__name__}, but must be a {base.__name__} of "
            "flower_blsgd"
        )
    return part
