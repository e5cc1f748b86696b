from dataclasses import replace

import pytest

from flower_blsgd.algorithm.averaging import NormalizedWeighting, PerSampleWeighting
from flower_blsgd.algorithm.catalog import (
    ALGORITHMS,
    RELEASED_SAMPLERS,
    SAMPLERS,
    STEPS,
    TRAIN_ON,
    WEIGHTS,
    part_of,
    register_part,
)
from flower_blsgd.algorithm.local_steps import (
    Participant,
    SameSteps,
    SystemAwareSteps,
)
from flower_blsgd.algorithm.sampling import (
    SeparatedSampler,
    UnifiedSampler,
    UniformSampler,
)
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError

_WORKERS = [
    Participant(True, 32, speed_ratio=1.0),
    Participant(False, 32, speed_ratio=0.5),
    Participant(False, 32, speed_ratio=0.5, given_steps=5),  # steps= in the specification
]
_SYSTEM_AWARE = [32, 8, 5]
_SAME = [32, 32, 32]
_ONE = [1, 1, 1]

_B = [32, 32, 32]
_BY_THROUGHPUT = [48, 24, 24]  # 96 in the proportion 1 : 0.5 : 0.5

_LOADS = [3.0, 1.0, 0.0]
_BY_LOAD = [0.75, 0.25, 0.0]
_EQUAL = [0.5, 0.5, 0.0]

_ALL, _FAST = False, True

# Of each algorithm: name, what its steps and its batches are, its sampler, what its weights
# are, whether only fast workers train, and the momentum policy
_ROWS = [
    ("recommended", _SYSTEM_AWARE, _B, UniformSampler, _BY_LOAD, _ALL, "keep"),
    ("biased-local-sgd", _SYSTEM_AWARE, _B, SeparatedSampler, _BY_LOAD, _ALL, "keep"),
    ("unbiased-local-sgd", _SYSTEM_AWARE, _B, UniformSampler, _EQUAL, _ALL, "keep"),
    ("weighted-local-sgd", _SYSTEM_AWARE, _B, UniformSampler, _BY_LOAD, _ALL, "keep"),
    ("sampled-local-sgd", _SYSTEM_AWARE, _B, SeparatedSampler, _EQUAL, _ALL, "keep"),
    ("balanced-local-sgd", _SAME, _B, UniformSampler, _EQUAL, _ALL, "keep"),
    ("fast-only-local-sgd", _SAME, _B, UniformSampler, _EQUAL, _FAST, "keep"),
    ("sync-sgd", _ONE, _B, UniformSampler, _EQUAL, _ALL, "keep"),
    ("sync-sgd-fast-only", _ONE, _B, UniformSampler, _EQUAL, _FAST, "keep"),
    ("byteps", _ONE, _B, UniformSampler, _EQUAL, _FAST, "keep"),
    ("dlb", _ONE, _BY_THROUGHPUT, UniformSampler, _BY_LOAD, _ALL, "average"),
    ("fednova", _SYSTEM_AWARE, _B, UniformSampler, _EQUAL, _ALL, "reset"),
    ("biased-local-sgd-released", _SYSTEM_AWARE, _B, None, _EQUAL, _ALL, "keep"),
    ("unbiased-local-sgd-released", _SYSTEM_AWARE, _B, None, _EQUAL, _ALL, "keep"),
]

_SETTINGS = RunConfig(local_steps_fast=32, local_steps_slow=8)


@pytest.mark.parametrize(
    ("name", "steps", "batches", "sampler", "weights", "fast_only", "momentum"),
    _ROWS,
    ids=[row[0] for row in _ROWS],
)
def test_algorithm_row_is_that_of_the_specification(
    name: str,
    steps: list[int],
    batches: list[int],
    sampler: type | None,
    weights: list[float],
    fast_only: bool,
    momentum: str,
) -> None:
    row = ALGORITHMS[name]
    policy = STEPS[row.steps](_SETTINGS)
    assert policy.local_steps(_WORKERS) == steps
    assert policy.batch_sizes(_WORKERS) == batches
    if sampler:
        assert type(SAMPLERS[row.sampler](_SETTINGS)) is sampler
    else:
        assert row.sampler in RELEASED_SAMPLERS
    assert WEIGHTS[row.weights](_SETTINGS).weights(_LOADS) == pytest.approx(weights)
    assert TRAIN_ON[row.train_on].fast_only is fast_only
    assert row.momentum_buffers == momentum


def test_what_only_one_algorithm_has() -> None:
    assert list(ALGORITHMS) == [row[0] for row in _ROWS]
    rows = ALGORITHMS.items()
    assert [n for n, r in rows if TRAIN_ON[r.train_on].slow_reduce] == ["byteps"]
    assert [n for n, r in rows if r.local_steps_fast == "auto"] == ["recommended"]
    assert [n for n, r in rows if STEPS[r.steps](_SETTINGS).follows_speeds] == ["dlb"]
    assert [n for n, r in rows if WEIGHTS[r.weights](_SETTINGS).scales_updates] == ["fednova"]
    assert [n for n, r in rows if r.high_loss_to == "slow"] == ["biased-local-sgd-released"]
    assert [n for n, r in rows if r.epoch == "table"] == list(ALGORITHMS)[-2:]


def test_parts_are_built_from_the_settings() -> None:
    settings = RunConfig(
        local_steps_fast=16,
        local_steps_slow="auto",
        shrink_slow_batch=False,
        high_loss_ratio=0.25,
        high_loss_to="slow",
        momentum=0.5,
        nesterov=True,
    )
    assert STEPS["system-aware"](settings) == SystemAwareSteps(16, None, False)
    assert STEPS["same"](settings) == SameSteps(16)
    assert STEPS["one"](settings) == SameSteps(1)
    chosen = {
        name: make(replace(settings, local_steps_fast="auto")) for name, make in STEPS.items()
    }
    for name, made in chosen.items():
        assert made.with_local_steps(16) == STEPS[name](settings)
    assert [n for n, p in chosen.items() if p.is_open] == ["system-aware", "same"]
    assert SAMPLERS["separated"](settings) == SeparatedSampler(0.25, "slow")
    assert SAMPLERS["unified"](settings) == UnifiedSampler(0.25, "slow")
    assert WEIGHTS["normalized"](settings) == NormalizedWeighting(0.5, True)
    assert type(WEIGHTS["per-sample"](settings)) is PerSampleWeighting
    adamw = RunConfig(momentum=0.5, optimizer="adamw")
    assert WEIGHTS["normalized"](adamw) == NormalizedWeighting(0.0)
    assert SAMPLERS["separated"](RunConfig()) == SeparatedSampler(0.5, "fast")


# --- custom parts


class FirstSamples(UniformSampler):
    """A sampler of a user."""


def test_custom_part_is_named_as_module_and_class_or_given() -> None:
    own = f"{__name__}:FirstSamples"
    assert RunConfig(sampler=own).choices.sampler == own
    assert type(part_of("sampler", own, RunConfig())) is FirstSamples
    given = FirstSamples()
    assert part_of("sampler", register_part("sampler", given), RunConfig()) is given
    assert part_of("sampler", "uniform", RunConfig()) == UniformSampler()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("unifrom", "sampler = 'unifrom' is not known; did you mean uniform?"),
        ("no_such_module:X", "cannot be created: No module named 'no_such_module'"),
        (f"{__name__}:NoSuch", "cannot be created: module"),
        ("pathlib:Path", "is a PosixPath, but must be a Sampler of flower_blsgd"),
        ("given-in-python:Other", "was given as an object, which is not saved; pass it again"),
    ],
)
def test_custom_part_that_cannot_be_used_is_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        part_of("sampler", name, RunConfig())
    assert str(refused.value).startswith("sampler = ")
    assert told in str(refused.value)


def test_object_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="must be a name, module:Class, or a StepPolicy"):
        register_part("steps", FirstSamples())
