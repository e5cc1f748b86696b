import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.randomness import derived_seed, generator

from .teams import QUICK


def _draw(*key: object) -> list[int]:
    return generator(*key).integers(0, 2**62, 4).tolist()  # type: ignore[arg-type]


@QUICK
@given(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(0, 1000))
def test_generator_equal_arguments_give_equal_draws(seed: int, epoch: int, worker: int) -> None:
    first = _draw(seed, "purpose", epoch, worker)
    np.random.default_rng(0).random(3)
    _draw(seed, "other", epoch)
    assert _draw(seed, "purpose", epoch, worker) == first


@pytest.mark.parametrize(
    "other",
    [
        (1, "order", 3, 2),
        (2**32, "order", 3, 2),  # a seed that needs more than 32 bits
        (0, "permutation", 3, 2),
        (0, "redro", 3, 2),  # the same letters
        (0, "order", 4, 2),
        (0, "order", 3, 1),
        (0, "order", 2, 3),  # the same counters in another order
        (0, "order", 3),
    ],
)
def test_generator_every_argument_counts(other: tuple[object, ...]) -> None:
    assert _draw(*other) != _draw(0, "order", 3, 2)
    assert derived_seed(*other) != derived_seed(0, "order", 3, 2)  # type: ignore[arg-type]


def test_generator_no_seed_makes_one_purpose_another() -> None:
    """Seed and purpose are not folded into one number by an exclusive or, or by a sum."""
    one, other = zlib.crc32(b"order"), zlib.crc32(b"permutation")
    first = _draw(2**33, "order", 3)
    for seed in (2**33 ^ one ^ other, 2**33 + one - other):
        assert _draw(seed, "permutation", 3) != first


def test_generator_hands_out_a_fresh_generator_each_time() -> None:
    first = generator(0, "order", 1)
    first.random(100)
    assert generator(0, "order", 1).random() != first.random()


def test_generator_neither_reads_nor_moves_the_global_state() -> None:
    np.random.seed(1)
    first = _draw(0, "order", 1)
    expected = np.random.RandomState(1).random()
    assert np.random.random() == expected
    assert _draw(0, "order", 1) == first


def test_generator_neighbouring_keys_are_not_correlated() -> None:
    # mean of 400 uniform numbers: 0.5, standard deviation 0.289 / 20 = 0.0144
    first = np.array([generator(0, "order", i).random() for i in range(400)])
    assert abs(first.mean() - 0.5) < 0.06
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.25


@QUICK
@given(st.integers(0, 2**63), st.integers(0, 10**6))
def test_derived_seed_fits_what_torch_takes(seed: int, counter: int) -> None:
    value = derived_seed(seed, "order", counter)
    assert type(value) is int
    assert 0 <= value < 2**63
    assert derived_seed(seed, "order", counter) == value


def test_derived_seed_uses_all_its_bits() -> None:
    values = [derived_seed(0, "order", i) for i in range(200)]
    assert len(set(values)) == 200
    assert all(any(value >> bit & 1 for value in values) for bit in range(63))
    assert not all(value & 1 for value in values)


def test_derived_seed_is_the_same_in_another_process() -> None:
    """Python's own hash of a string is not."""
    code = (
        "from flower_blsgd.algorithm.randomness import derived_seed, generator\n"
        "print(derived_seed(3, 'order', 5, 1), generator(3, 'order', 5).integers(2**62))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    here = [derived_seed(3, "order", 5, 1), generator(3, "order", 5).integers(2**62)]
    assert printed == [str(value) for value in here]
