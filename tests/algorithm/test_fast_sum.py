"""The kernel: its bits do not depend on how tensors are cut, nor on who computes them."""

import numpy as np
import pytest

from flower_blsgd.algorithm import fast_sum, pieces
from flower_blsgd.algorithm.fast_sum import maximum_into, sum_into

_SIZES = (3, 40_000, 1, 0, 150_001, 77, 8192)


def tensors(seed: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=size).astype(dtype) for size in _SIZES]


def summed(models: list[list[np.ndarray]], scales: list[float]) -> list[np.ndarray]:
    out = [np.full_like(tensor, 99) for tensor in models[0]]
    sum_into(out, models, scales)
    return out


def bits(arrays: list[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(fast_sum, "threads_for", lambda num_bytes: request.param)


def in_one_piece(models: list[list[np.ndarray]], scales: list[float]) -> list[np.ndarray]:
    """Return the same operations, on whole tensors: what every cut must give to the bit."""
    found = []
    for first, *others in zip(*models, strict=True):
        number = first.dtype.type
        total, waiting = np.zeros_like(first), None
        for place, (other, scale) in enumerate(zip(others, scales, strict=True)):
            if scale < max(scales):
                assert waiting is None, "a case for this test: equal ones stand side by side"
                total = total + (other - first) * number(scale / max(scales))
            elif waiting is not None:
                total, waiting = (total + waiting) + other - (first + first), None
            elif scales[place + 1 : place + 2] == [max(scales)]:
                waiting = other
            else:
                total = total + other - first
        found.append(total * number(max(scales)) + first)
    return found


@pytest.mark.parametrize("threads", [1, 2, 3, 8], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "scales",
    [
        [0.25, 0.25, 0.125],
        [0.1, 0.2, 0.3],
        [1.7, 0.0003, 1.7],
        [0.1, 0.3, 0.3],
        [0.3, 0.3, 0.3],
    ],
)
@pytest.mark.usefixtures("threads")
def test_sum_is_the_same_to_the_bit_in_any_number_of_threads(
    dtype: str, scales: list[float]
) -> None:
    models = [tensors(seed, dtype) for seed in range(4)]
    assert bits(summed(models, scales)) == bits(in_one_piece(models, scales))


def test_sum_does_not_depend_on_which_tensors_there_are() -> None:
    models = [tensors(seed) for seed in range(3)]
    whole = [[np.concatenate(model)] for model in models]
    assert bits(summed(models, [0.3, 0.2])) == bits(summed(whole, [0.3, 0.2]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sum_is_right_within_rounding(dtype: str) -> None:
    """Half a last place for the result, and what ten roundings of the differences may add."""
    models = [tensors(seed, dtype) for seed in range(10)]
    scales = [0.1, 0.02, 0.1, 0.1, 0.2, 0.1, 0.03, 0.1, 0.1]
    for place, got in enumerate(summed(models, scales)):
        first, *others = (model[place].astype(np.float64) for model in models)
        exact = first + sum(s * (x - first) for s, x in zip(scales, others, strict=True))
        differences = sum(s * abs(x - first) for s, x in zip(scales, others, strict=True))
        slack = 0.5 * np.spacing(abs(exact).astype(dtype)).astype(np.float64) * 1.01
        assert (abs(got - exact) <= slack + differences * 12 * 2.0**-24).all()


def test_sum_of_close_models_is_nearly_that_of_float64() -> None:
    """As models are after a few steps: their differences are a hundredth of them."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=100_000)
    models = [[(base * (1 + 0.01 * rng.normal(size=base.size))).astype("f4")] for _ in range(8)]
    exact = np.mean([model[0].astype(np.float64) for model in models], axis=0)
    (got,) = summed(models, [1 / 8] * 7)
    nearest = exact.astype(np.float32)
    np.testing.assert_array_max_ulp(got, nearest, 1)
    assert (got != nearest).mean() < 0.2
    # The rounding of the result alone is what float64 has too.
    ours, least = (np.sqrt(np.mean((each - exact) ** 2)) for each in (got, nearest))
    assert ours < 1.3 * least


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.usefixtures("threads")
def test_sum_of_numbers_near_the_largest_is_finite(recwarn: pytest.WarningsRecorder) -> None:
    """Their differences are not, in float32; what lies beside them keeps its bits."""
    models = [tensors(seed) for seed in range(3)]
    plain = summed(models, [0.5, 0.25])
    largest = np.finfo(np.float32).max
    for place, (tensor, index) in enumerate([(0, 1), (1, 39_999), (4, 70_000)]):
        for model, sign in zip(models, np.roll([1, -1, -1], place), strict=True):
            model[tensor][index] = sign * largest
    found = summed(models, [0.5, 0.25])
    # 1 - 0.5 x 2 - 0.25 x 2 = -0.5; -1 + 0.5 x 2 + 0 = 0; -1 + 0 + 0.25 x 2 = -0.5
    assert found[0][1] == -largest / 2
    assert found[1][39_999] == 0
    assert found[4][70_000] == -largest / 2
    for tensor, index in [(0, 1), (1, 39_999), (4, 70_000)]:
        found[tensor][index] = plain[tensor][index]
    assert bits(found) == bits(plain)
    assert not recwarn.list


def test_sum_of_what_is_not_finite_is_not_and_warns_of_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    models = [[np.array([1, 1, np.inf, 1], np.float32)] for _ in range(3)]
    models[1][0][:2] = np.nan, -np.inf
    (found,) = summed(models, [0.25, 0.25])
    assert np.isnan(found[0])
    assert found[1] == -np.inf
    assert np.isnan(found[2])  # inf - inf
    assert found[3] == 1
    assert not recwarn.list


def test_sum_with_scales_far_apart() -> None:
    models = [[np.array([value], np.float32)] for value in (1, 3, 5)]
    assert summed(models, [0.5, 1e-60])[0] == 2
    assert summed(models, [1e-60, 0.5])[0] == 3


def test_sum_allocates_nothing_of_the_models_size() -> None:
    import tracemalloc

    models = [[np.ones(4_000_000, np.float32)] for _ in range(3)]
    out = [np.zeros(4_000_000, np.float32)]
    sum_into(out, models, [0.5, 0.25])  # makes the scratch
    tracemalloc.start()
    sum_into(out, models, [0.5, 0.25])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < pieces.PIECE_BYTES


@pytest.mark.parametrize("threads", [1, 4], indirect=True)
@pytest.mark.usefixtures("threads")
def test_maximum_of_large_and_small_tensors() -> None:
    rng = np.random.default_rng(0)
    models = [[rng.integers(-99, 99, size) for size in _SIZES] for _ in range(3)]
    out = [np.zeros_like(tensor) for tensor in models[0]]
    maximum_into(out, models)
    assert all(
        np.array_equal(got, np.max(each, axis=0))
        for got, *each in zip(out, *models, strict=True)
        if got.size
    )
