import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.block_draws import BLOCK_SAMPLES
from flower_blsgd.algorithm.order_statistics import values_at

from .teams import QUICK, blocks_of

_any_float = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, math.inf])


@pytest.mark.parametrize("block", [2, 1000])
def test_values_at_worked(block: int) -> None:
    values = np.array([3.0, math.inf, -1.5, 0.25, 3.0, -1e30], np.float32)
    with blocks_of(block):
        found = values_at(values, [0, 1, 2, 3, 4, 5])
    assert found.dtype == np.float32
    assert found.tolist() == np.array([-1e30, -1.5, 0.25, 3.0, 3.0, math.inf], np.float32).tolist()


@QUICK
@given(st.lists(_any_float, min_size=1, max_size=40), st.data())
def test_values_at_are_those_of_the_sorted_array(values: list[float], data: st.DataObject) -> None:
    array = np.array(values, np.float32)
    places = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=4))
    with blocks_of(data.draw(st.integers(1, 50))):
        assert values_at(array, places).tolist() == np.sort(array)[places].tolist()
    assert array.tolist() == np.array(values, np.float32).tolist()


@pytest.mark.parametrize("kind", ["close", "tied", "wide", "unseen"])
def test_values_at_of_many(kind: str) -> None:
    """Also where all share the upper half of their bits."""
    rng = np.random.default_rng(0)
    number = 3 * BLOCK_SAMPLES + 17
    values = {
        "close": (rng.permutation(number) + 0x3F80_0000).astype(np.uint32).view(np.float32),
        "tied": rng.integers(0, 3, number).astype(np.float32),
        "wide": (rng.standard_cauchy(number) * 1e20).astype(np.float32),
        "unseen": np.where(rng.random(number) < 0.5, np.inf, 1).astype(np.float32),
    }[kind]
    places = [0, number // 3, number // 2, number - 1]
    assert values_at(values, places).tolist() == np.sort(values)[places].tolist()
