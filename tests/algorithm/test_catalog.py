import pytest

from flower_blsgd.algorithm.catalog import ALGORITHMS, SAMPLERS, STEPS, WEIGHTS
from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.algorithm.sampling import SeparatedSampler, UniformSampler

_WORKERS = [
    Participant(True, 32),
    Participant(False, 32),
    Participant(False, 32, given_steps=5),  # steps= in the worker specification
]
_SYSTEM_AWARE = [32, 8, 5]
_SAME = [32, 32, 32]
_ONE = [1, 1, 1]

_LOADS = [3.0, 1.0, 0.0]
_BY_LOAD = [0.75, 0.25, 0.0]
_EQUAL = [0.5, 0.5, 0.0]

# ALGORITHM.md, section 4: name, what its steps are, its sampler, what its weights are
_ROWS = [
    ("biased-local-sgd", _SYSTEM_AWARE, SeparatedSampler, _BY_LOAD),
    ("unbiased-local-sgd", _SYSTEM_AWARE, UniformSampler, _EQUAL),
    ("weighted-local-sgd", _SYSTEM_AWARE, UniformSampler, _BY_LOAD),
    ("sampled-local-sgd", _SYSTEM_AWARE, SeparatedSampler, _EQUAL),
    ("balanced-local-sgd", _SAME, UniformSampler, _EQUAL),
    ("sync-sgd", _ONE, UniformSampler, _EQUAL),
]


@pytest.mark.parametrize(("name", "steps", "sampler", "weights"), _ROWS)
def test_algorithm_row_is_that_of_the_specification(
    name: str, steps: list[int], sampler: type, weights: list[float]
) -> None:
    row = ALGORITHMS[name]
    assert STEPS[row.steps](32, 8).local_steps(_WORKERS) == steps
    assert type(SAMPLERS[row.sampler](0.5)) is sampler
    assert WEIGHTS[row.weights]().weights(_LOADS) == pytest.approx(weights)


def test_algorithms_every_choice_of_every_row_can_be_built() -> None:
    for row in ALGORITHMS.values():
        assert row.steps in STEPS
        assert row.sampler in SAMPLERS
        assert row.weights in WEIGHTS


def test_algorithms_no_two_rows_are_the_same() -> None:
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)


def test_samplers_separated_takes_the_high_loss_ratio() -> None:
    sampler = SAMPLERS["separated"](0.25)
    assert sampler == SeparatedSampler(0.25)


def test_samplers_high_loss_ratio_out_of_range_refused() -> None:
    with pytest.raises(ValueError, match="high_loss_ratio"):
        SAMPLERS["separated"](1.5)


def test_steps_slow_from_the_speed_when_no_number_is_given() -> None:
    workers = [Participant(True, 32), Participant(False, 32, speed_ratio=0.5)]
    assert STEPS["system-aware"](32, None).local_steps(workers) == [32, 16]
