"""The sums of models: their bits depend neither on chunks nor on the number of threads."""

import os
import sys
import time
import tracemalloc
from threading import Barrier, Lock, get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from flower_blsgd.algorithm import tensor_sum
from flower_blsgd.algorithm.tensor_sum import (
    CHUNK_BYTES,
    first_not_finite,
    move,
    num_threads,
    share,
    threads_for,
)

_SIZES = (3, 40_000, 1, 0, 450_001, 77, 8192)


def tensors(seed: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=size).astype(dtype) for size in _SIZES]


def summed(models: list[list[np.ndarray]], scales: list[float]) -> list[np.ndarray]:
    first, *others = ({str(i): t for i, t in enumerate(model)} for model in models)
    return list(move(first, others, scales).values())


def bits(arrays: list[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(tensor_sum, "threads_for", lambda num_bytes: request.param)


# sums


def of_whole_tensors(models: list[list[np.ndarray]], scales: list[float]) -> list[np.ndarray]:
    """Return the same operations on whole tensors: what every cut must give to the bit."""
    found = []
    for first, *others in zip(*models, strict=True):
        number = first.dtype.type
        total, waiting = np.zeros_like(first), None
        for i, (other, scale) in enumerate(zip(others, scales, strict=True)):
            if scale < max(scales):
                assert waiting is None, "a case for this test: equal ones stand side by side"
                total = total + (other - first) * number(scale / max(scales))
            elif waiting is not None:
                total, waiting = (total + waiting) + other - (first + first), None
            elif scales[i + 1 : i + 2] == [max(scales)]:
                waiting = other
            else:
                total = total + other - first
        found.append(total * number(max(scales)) + first)
    return found


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
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
    expected = bits(of_whole_tensors(models, scales))
    assert bits(summed(models, scales)) == expected
    # nor does it depend on which tensors there are
    assert bits(summed([[np.concatenate(model)] for model in models], scales)) == expected


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.usefixtures("threads")
def test_sum_of_numbers_near_the_largest_is_finite(recwarn: pytest.WarningsRecorder) -> None:
    """Their differences are not, in float32; what lies beside them keeps its bits."""
    models = [tensors(seed) for seed in range(3)]
    plain = summed(models, [0.5, 0.25])
    largest = np.finfo(np.float32).max
    elements = [(0, 1), (1, 39_999), (4, 70_000)]
    for i, (tensor, index) in enumerate(elements):
        for model, sign in zip(models, np.roll([1, -1, -1], i), strict=True):
            model[tensor][index] = sign * largest
    found = summed(models, [0.5, 0.25])
    # 1 - 0.5 x 2 - 0.25 x 2 = -0.5; -1 + 0.5 x 2 + 0 = 0; -1 + 0 + 0.25 x 2 = -0.5
    assert [found[t][i] for t, i in elements] == [-largest / 2, 0, -largest / 2]
    for tensor, index in elements:
        found[tensor][index] = plain[tensor][index]
    assert bits(found) == bits(plain)
    assert not recwarn.list


def test_sum_of_what_is_not_finite_is_not_and_warns_of_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    models = [[np.array([1, 1, np.inf, 1], np.float32)] for _ in range(3)]
    models[1][0][:2] = np.nan, -np.inf
    (found,) = summed(models, [0.25, 0.25])
    # inf - inf is nan
    np.testing.assert_array_equal(found, np.array([np.nan, -np.inf, np.nan, 1], np.float32))
    assert not recwarn.list


def test_sum_with_scales_far_apart() -> None:
    models = [[np.array([value], np.float32)] for value in (1, 3, 5)]
    assert summed(models, [0.5, 1e-60])[0] == 2
    assert summed(models, [1e-60, 0.5])[0] == 3


def test_sum_allocates_nothing_of_the_models_size() -> None:
    first, *others = ({"x": np.ones(4_000_000, np.float32)} for _ in range(3))
    out = {"x": np.zeros(4_000_000, np.float32)}
    move(first, others, [0.5, 0.25], out)  # makes the scratch buffers
    tracemalloc.start()
    move(first, others, [0.5, 0.25], out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < CHUNK_BYTES


# threads


def test_share_works_in_several_threads_at_once_and_with_one_in_the_caller() -> None:
    all_three = Barrier(3)
    share(range(3), lambda _: all_three.wait(timeout=60), 3)  # raises unless three come
    seen: list[int] = []
    share(range(2), lambda _: seen.append(get_ident()), 1)
    assert seen == [get_ident()] * 2


def test_share_raises_the_error_of_a_thread_when_all_have_ended() -> None:
    both, done, lock = Barrier(2), [], Lock()

    def work(part: int) -> None:
        both.wait(timeout=60)
        with lock:
            if part == 0:
                raise ValueError("in a thread")
        time.sleep(0.05)
        done.append(part)

    with pytest.raises(ValueError, match="in a thread"):
        share(range(2), work, 2)
    assert done == [1]


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_share_works_in_a_fork() -> None:
    """Which has none of the threads that its parent had."""
    share(range(10), str, 4)
    child = os.fork()
    if child == 0:
        both = Barrier(2)
        try:
            share(range(2), lambda _: both.wait(60), 2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("cores", "of_torch", "expected"), [(4, 2, 2), (2, 64, 2), (64, 64, 8), (3, None, 3)]
)
def test_num_threads_is_what_the_machine_and_torch_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, of_torch: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    if of_torch is None:  # it is not imported for that
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        loaded = SimpleNamespace(get_num_threads=lambda: of_torch)
        monkeypatch.setitem(sys.modules, "torch", loaded)
    assert num_threads() == expected
    assert ("torch" in sys.modules) is (of_torch is not None)
    # four models of ResNet20, and their average
    assert [threads_for(size) for size in (5_400_000, 220_000_000)] == [1, expected]


# what is not finite


def named_tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"large": (300, 1000), "a": (3,), "b": (2, 2), "scalar": (), "none": (0, 3)}
    floating = {name: np.asarray(rng.normal(size=s)).astype(dtype) for name, s in sizes.items()}
    return {"counter": np.array(2**62), **floating, "mask": np.array([True])}


@pytest.mark.parametrize("threads", [1, 4], indirect=True)
@pytest.mark.parametrize(
    ("name", "index"),
    [("large", 0), ("large", 131_072), ("large", -1), ("a", 2), ("b", 0), ("scalar", 0)],
)
@pytest.mark.usefixtures("threads")
def test_any_element_that_is_not_finite_is_found(name: str, index: int) -> None:
    for value in (np.nan, np.inf, -np.inf):
        model = named_tensors()
        model[name].reshape(-1)[index] = value
        assert first_not_finite(model) == name


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_finite_model_has_none_though_its_sum_is_infinite(
    dtype: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = named_tensors(dtype)
    assert first_not_finite(model) is None
    model["large"][:] = model["a"][:] = np.finfo(dtype).max
    assert first_not_finite(model) is None
    model["a"][1] = complex(0, np.nan) if dtype.startswith("complex") else np.inf
    assert first_not_finite(model) == "a"
    model["large"][0, :2] = np.inf, -np.inf  # they do not cancel
    assert first_not_finite(model) == "large"
    assert not recwarn.list


def test_first_in_order_is_named_whatever_its_dtype_and_memory_order() -> None:
    model = {"a": np.ones(6, np.float32).reshape(3, 2).T, "double": np.array([1, np.nan, 2])[::2]}
    assert first_not_finite(model) is None
    model |= {"double": np.array([np.nan]), "b": np.array([np.nan], np.float32)}
    assert first_not_finite(model) == "double"
    model["a"][0, 1] = np.inf
    assert first_not_finite(model) == "a"
