import numpy as np
import pytest

from flower_blsgd.algorithm.randomness import derived_seed, generator


def _draw(*key: object) -> list[int]:
    return generator(*key).integers(0, 2**62, 4).tolist()  # type: ignore[arg-type]


def test_draws_depend_on_nothing_but_the_arguments() -> None:
    np.random.seed(1)
    first = _draw(0, "order", 1)
    assert np.random.random() == np.random.RandomState(1).random()
    _draw(0, "other", 1)
    assert _draw(0, "order", 1) == first


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
        (0, "order", 3, 2, 0),
    ],
)
def test_every_argument_counts(other: tuple[object, ...]) -> None:
    assert _draw(*other) != _draw(0, "order", 3, 2)
    assert derived_seed(*other) != derived_seed(0, "order", 3, 2)  # type: ignore[arg-type]


def test_derived_seed_fits_what_torch_takes_and_uses_all_63_bits() -> None:
    values = [derived_seed(2**63, "order", i) for i in range(200)]
    assert all(type(value) is int and 0 <= value < 2**63 for value in values)
    assert len(set(values)) == 200
    for bit in range(63):
        assert {value >> bit & 1 for value in values} == {0, 1}
