import numpy as np
import pytest

from flower_blsgd.algorithm import finite
from flower_blsgd.algorithm.finite import first_not_finite


def model(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"large": (300, 1000), "a": (3,), "b": (2, 2), "scalar": (), "none": (0, 3)}
    tensors = {name: np.asarray(rng.normal(size=s)).astype(dtype) for name, s in sizes.items()}
    return {"counter": np.array(2**62), **tensors, "mask": np.array([True])}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_finite_model_has_none(dtype: str) -> None:
    assert first_not_finite(model(dtype)) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "place"),
    [("large", 0), ("large", 131_072), ("large", -1), ("a", 2), ("b", 0), ("scalar", 0)],
)
def test_any_element_is_found(name: str, place: int, value: float) -> None:
    tensors = model()
    tensors[name].reshape(-1)[place] = value
    assert first_not_finite(tensors) == name


@pytest.mark.parametrize("value", [complex(0, np.nan), complex(np.inf, 0)])
def test_complex_numbers_are_looked_into(value: complex) -> None:
    tensors = model("complex64")
    tensors["b"][1, 1] = value
    assert first_not_finite(tensors) == "b"


def test_first_in_order_is_named_whatever_its_dtype() -> None:
    tensors = {
        "a": np.ones(3, np.float32),
        "double": np.array([np.nan]),
        "b": np.array([np.nan], np.float32),
    }
    assert first_not_finite(tensors) == "double"
    del tensors["double"]
    assert first_not_finite(tensors) == "b"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_large_numbers_whose_sum_is_infinite_are_finite(
    dtype: str, recwarn: pytest.WarningsRecorder
) -> None:
    tensors = model(dtype)
    tensors["large"][:] = np.finfo(dtype).max
    tensors["a"][:] = np.finfo(dtype).max
    assert first_not_finite(tensors) is None
    tensors["a"][1] = np.inf
    assert first_not_finite(tensors) == "a"
    assert not recwarn.list


def test_infinities_of_both_signs_do_not_cancel() -> None:
    tensors = model()
    tensors["large"][0, :2] = np.inf, -np.inf
    assert first_not_finite(tensors) == "large"


def test_tensors_in_another_memory_order() -> None:
    tensors = model()
    tensors["b"] = np.asfortranarray(tensors["b"])
    tensors["a"] = np.array([1, np.nan, 2, 3], np.float32)[::2]
    assert first_not_finite(tensors) is None
    tensors["a"][1] = np.nan
    assert first_not_finite(tensors) == "a"


def test_several_threads_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "threads_for", lambda num_bytes: 4)
    tensors = model()
    assert first_not_finite(tensors) is None
    tensors["b"][0, 0] = np.nan
    tensors["large"][299, 999] = np.nan
    assert first_not_finite(tensors) == "large"
