"""The average of the models over a run: by hand, then in any steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.ema import ModelEma


def number(value: float) -> dict[str, np.ndarray]:
    return {"x": np.array(value, np.float32)}


def test_average_worked() -> None:
    """Half-lives of a tenth of the budget: rounds of one, of two and of none."""
    ema = ModelEma(0.1)
    found = []
    for value, share in ((8.0, 0.1), (0.0, 0.2), (12.0, 0.4), (99.0, 0.4), (99.0, 0.3)):
        ema.update(number(value), share)
        found.append(float(ema.kept["x"]))
    # the first model; (8 + 0) / 2; 4 / 4 + 12 x 3 / 4; a budget that became larger counts nothing
    assert found == pytest.approx([8.0, 4.0, 10.0, 10.0, 10.0])
    assert ema.budget_share == 0.3
    ema.update(number(0.0), 0.4)
    assert float(ema.kept["x"]) == pytest.approx(5.0)


def test_counters_are_of_the_last_model_and_halves_are_averaged_in_single_precision() -> None:
    ema = ModelEma(0.01)
    # Below half of the distance of two halves at 1024: each alone would be rounded away.
    values = (1024.0, 1025.0, 1025.0, 1025.0)
    for i, value in enumerate(values):
        model = {"w": np.full((2, 3), value, np.float16), "count": np.array(7 + i)}
        ema.update(model, i / 1000)
    assert ema.kept["w"].dtype == np.float32
    assert ema.kept["w"][1, 2] == pytest.approx(1025 - 0.5**0.3, rel=1e-6)
    averaged = ema.model(model)
    assert {name: tensor.dtype for name, tensor in averaged.items()} == {
        "w": np.float16,
        "count": model["count"].dtype,
    }
    assert averaged["count"] == 10
    averaged["w"][...] = 0  # a copy, as what was given is
    model["w"][...] = 0
    assert ema.kept["w"].all()
    assert ModelEma(0.5).model(model)["count"] == 10  # before any round: the model itself


@given(
    st.lists(st.integers(-100, 100), min_size=1, max_size=4),
    st.floats(0.01, 0.9),
    st.integers(1, 4),
)
def test_average_does_not_depend_on_how_the_time_is_cut(
    values: list[int], half_life: float, cuts: int
) -> None:
    """A model that stays for several rounds counts as one that stays for one long round."""
    whole, cut = ModelEma(half_life), ModelEma(half_life)
    for ema in (whole, cut):
        ema.update(number(values[0]), 0.0)
    for i, value in enumerate(values):
        whole.update(number(value), (i + 1) / len(values))
        for k in range(1, cuts + 1):
            cut.update(number(value), (i + k / cuts) / len(values))
    assert float(whole.kept["x"]) == pytest.approx(float(cut.kept["x"]), abs=1e-3)
    assert min(values) - 1e-3 <= float(whole.kept["x"]) <= max(values) + 1e-3
