"""16-bit changes: rounding as torch does it, and errors that are late and not lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_blsgd.runtime.stream.wire_dtype import (
    changed,
    from_16_bits,
    relative_error,
    rounded_change,
    same_layout,
    to_16_bits,
)

HALF_STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative: half the distance of neighbours, for numbers that are not tiny."""
DTYPES = pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])

FLOATS = hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32))


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def as_torch(values: np.ndarray, wire_dtype: str) -> np.ndarray:
    rounded = torch.from_numpy(values.copy()).to(getattr(torch, wire_dtype))
    return rounded.to(torch.float32).numpy()


def test_bfloat16_ties_go_to_the_even_neighbour() -> None:
    # Above 1 the neighbours are 2^-7 apart, so 2^-8 is half way.
    tie = 2.0**-8
    values = floats(1 + tie, 1 + 3 * tie, -1 - tie, 1 + tie + 2**-20, 1 + tie - 2**-20)
    expected = floats(1, 1 + 4 * tie, -1, 1 + 2 * tie, 1)
    np.testing.assert_array_equal(
        from_16_bits(to_16_bits(values, "bfloat16"), "bfloat16"), expected
    )


def test_float16_ties_go_to_the_even_neighbour() -> None:
    tie = 2.0**-11
    values = floats(1 + tie, 1 + 3 * tie, 65504.0, 65519.0, 65520.0, 6e-8)
    expected = floats(1, 1 + 4 * tie, 65504.0, 65504.0, np.inf, 2.0**-24)
    np.testing.assert_array_equal(from_16_bits(to_16_bits(values, "float16"), "float16"), expected)


@DTYPES
@settings(deadline=None)
@given(FLOATS)
def test_rounding_is_that_of_torch(wire_dtype: str, values: np.ndarray) -> None:
    found = from_16_bits(to_16_bits(values, wire_dtype), wire_dtype)
    np.testing.assert_array_equal(found, as_torch(values, wire_dtype))
    assert found.dtype == np.float32


@DTYPES
def test_rounding_of_all_kinds_of_bits_is_that_of_torch(wire_dtype: str) -> None:
    patterns = np.random.default_rng(1).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    edges = [0, 1, 0x7FFF, 0x8000, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF]
    patterns[: len(edges)] = edges
    values = patterns.view(np.float32)
    found = from_16_bits(to_16_bits(values, wire_dtype), wire_dtype)
    np.testing.assert_array_equal(found, as_torch(values, wire_dtype))


@DTYPES
def test_what_is_not_finite_in_16_bits_is_no_change(wire_dtype: str) -> None:
    base = {"w": floats(0, 0)}
    largest = 3.4e38 if wire_dtype == "bfloat16" else 65_520
    for bad in (np.nan, np.inf, -np.inf, largest):
        assert rounded_change({"w": floats(1, bad)}, base, {}, wire_dtype) is None
    assert rounded_change({"w": floats(1, 65_504)}, base, {}, wire_dtype) is not None


@DTYPES
def test_infinity_on_both_sides_is_no_change(wire_dtype: str) -> None:
    assert rounded_change({"w": floats(np.inf)}, {"w": floats(np.inf)}, {}, wire_dtype) is None


def test_change_by_hand() -> None:
    new, base = {"w": floats(3.5, 1 + 2**-9)}, {"w": floats(1.0, 0.0)}
    change = rounded_change(new, base, {}, "bfloat16")
    assert change is not None
    assert change.rounded == ("w",)
    np.testing.assert_array_equal(change.bits["w"], np.array([0x4020, 0x3F80], np.uint16))
    np.testing.assert_array_equal(change.error["w"], floats(0, 2**-9))
    reached = changed(base, change.bits, change.rounded, "bfloat16")
    np.testing.assert_array_equal(reached["w"], floats(3.5, 1.0))
    # The error is in the next change: 2^-9 + 2^-9 is what two such rounds lack of 2^-8.
    again = rounded_change(
        {"w": floats(0, 1 + 2**-9)}, {"w": floats(0, 0)}, change.error, "bfloat16"
    )
    assert again is not None
    # 1 + 2^-8 is a tie, and goes to 1.
    np.testing.assert_array_equal(again.error["w"], floats(0, 2**-8))


@DTYPES
@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.floats(-4, 1).map(lambda exponent: 10.0**exponent),
)
def test_sum_of_decoded_changes_stays_within_one_rounding(
    wire_dtype: str, seed: int, rounds: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    zeros = {"w": np.zeros(50, np.float32)}
    carried: dict[str, np.ndarray] = {}
    true, decoded, largest = np.zeros(50), np.zeros(50), 0.0
    for _ in range(rounds):
        new = {"w": (scale * rng.standard_normal(50)).astype(np.float32)}
        change = rounded_change(new, zeros, carried, wire_dtype)
        assert change is not None
        carried = dict(change.error)
        true += new["w"]
        decoded += from_16_bits(change.bits["w"], wire_dtype)
        largest = max(largest, float(np.abs(new["w"]).max()))
    one_rounding = 1.02 * HALF_STEP[wire_dtype] * largest + 2.0**-25
    float32_sums = rounds * 2.0**-23 * largest
    assert np.abs(true - decoded).max() <= one_rounding + float32_sums


@DTYPES
def test_without_feedback_the_same_sum_drifts_away(wire_dtype: str) -> None:
    """So the property above is not one that any rounding has."""
    step = floats(1 + 0.8 * HALF_STEP[wire_dtype])
    carried: dict[str, np.ndarray] = {}
    with_feedback = without = 0.0
    for _ in range(100):
        kept = rounded_change({"w": step}, {"w": floats(0)}, carried, wire_dtype)
        lost = rounded_change({"w": step}, {"w": floats(0)}, {}, wire_dtype)
        assert kept is not None
        assert lost is not None
        carried = dict(kept.error)
        with_feedback += float(from_16_bits(kept.bits["w"], wire_dtype)[0])
        without += float(from_16_bits(lost.bits["w"], wire_dtype)[0])
    true = 100 * float(step[0])
    assert abs(true - with_feedback) < 2 * HALF_STEP[wire_dtype]
    assert abs(true - without) > 50 * HALF_STEP[wire_dtype]


@DTYPES
@pytest.mark.parametrize("dtype", ["int64", "uint8", "float64", "float16", ">f4", "bool"])
def test_other_dtypes_travel_as_they_are(wire_dtype: str, dtype: str) -> None:
    new, base = {"n": np.array([1, 0, 1], dtype)}, {"n": np.array([0, 0, 1], dtype)}
    change = rounded_change(new, base, {}, wire_dtype)
    assert change is not None
    assert change.rounded == ()
    reached = changed(base, change.bits, change.rounded, wire_dtype)
    assert reached["n"].dtype == new["n"].dtype
    np.testing.assert_array_equal(reached["n"], new["n"])


@DTYPES
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_shapes_are_kept_and_arrays_stay_arrays(wire_dtype: str, shape: tuple[int, ...]) -> None:
    new, base = {"w": np.full(shape, 2.5, np.float32)}, {"w": np.full(shape, 2.0, np.float32)}
    change = rounded_change(new, base, {}, wire_dtype)
    assert change is not None
    reached = changed(base, change.bits, change.rounded, wire_dtype)["w"]
    assert isinstance(reached, np.ndarray), "torch.from_numpy takes no numpy scalar"
    assert reached.shape == shape
    np.testing.assert_array_equal(reached, new["w"])


def test_base_stays_as_it_is() -> None:
    base = {"w": floats(1, 2)}
    change = rounded_change({"w": floats(2, 3)}, base, {}, "bfloat16")
    assert change is not None
    changed(base, change.bits, change.rounded, "bfloat16")
    np.testing.assert_array_equal(base["w"], floats(1, 2))


def test_relative_error_by_hand() -> None:
    # sqrt((3^2 + 4^2) / (6^2 + 8^2)); tensors without an error do not count.
    model = {"a": floats(6), "b": floats(8), "n": np.array([1000])}
    assert relative_error({"a": floats(3), "b": floats(4)}, model) == pytest.approx(0.5)
    assert relative_error({"a": floats(0)}, {"a": floats(0)}) == 0
    assert relative_error({}, {}) == 0


def test_same_layout_is_names_shapes_and_dtypes() -> None:
    model = {"w": floats(1, 2)}
    assert same_layout(model, {"w": floats(5, 6)})
    assert not same_layout(model, {"v": floats(1, 2)})
    assert not same_layout(model, {"w": floats(1, 2, 3)})
    assert not same_layout(model, {"w": np.array([1.0, 2.0])})
    assert not same_layout(model, {})
