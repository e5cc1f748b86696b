"""Which models can be averaged, and what a refusal says."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flower_blsgd.model_check import ModelShape
from flower_blsgd.wire import ProtocolError

from .in_process_grid import tensors_of, toy_arrays


def changed(**tensors: np.ndarray | None) -> ArrayRecord:
    arrays = toy_arrays(1.0)
    for name, tensor in tensors.items():
        if tensor is None:
            del arrays[name]
        else:
            arrays[name] = Array(tensor)
    return arrays


def test_checked_returns_the_tensors() -> None:
    found = ModelShape(toy_arrays()).checked(toy_arrays(2.0))
    expected = tensors_of(toy_arrays(2.0))
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert np.array_equal(tensor, expected[name])


def test_checked_ignores_the_order_of_the_tensors() -> None:
    backwards = ArrayRecord(dict(reversed(toy_arrays(2.0).items())))
    assert set(ModelShape(toy_arrays()).checked(backwards)) == {"weight", "bias", "counter"}


def test_num_bytes_counts_every_tensor() -> None:
    assert ModelShape(toy_arrays()).num_bytes == 2 * 4 + 8 + 8


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bias": None}, "lacks tensor 'bias'"),
        ({"bias": None, "counter": None}, "lacks tensor 'bias'"),
        ({"mask": np.zeros(2)}, "extra tensor 'mask'"),
        ({"weight": np.zeros((1, 2), np.float32)}, r"'weight' is float32 of shape \(1, 2\)"),
        ({"weight": np.zeros((2,), np.float32)}, r"not float32 of shape \(2, 1\)"),
        ({"weight": np.zeros((2, 1), np.float64)}, "'weight' is float64"),
        ({"counter": np.array(7, np.int32)}, "'counter' is int32"),
        ({"counter": np.array(7.0)}, "'counter' is float64"),
        ({"weight": np.array([[1.0], [np.nan]], np.float32)}, "'weight' is not finite"),
        ({"bias": np.array([np.inf])}, "'bias' is not finite"),
        ({"bias": np.array([-np.inf])}, "'bias' is not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_checked_refuses_by_name(changes: dict[str, np.ndarray | None], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        ModelShape(toy_arrays()).checked(changed(**changes))


def test_checked_refuses_data_of_another_shape_than_it_claims() -> None:
    arrays = toy_arrays()
    data = Array(np.zeros(3, np.float32)).data
    arrays["weight"] = Array(dtype="float32", shape=(2, 1), stype="numpy.ndarray", data=data)
    with pytest.raises(ProtocolError, match="weight"):
        ModelShape(toy_arrays()).checked(arrays)


def record_of(**tensors: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor) for name, tensor in tensors.items()})


def test_checked_passes_integers_and_large_numbers() -> None:
    model = record_of(
        counter=np.array(2**62),
        flag=np.array([True]),
        large=np.array([np.finfo(np.float32).max], np.float32),
    )
    assert ModelShape(model).checked(model)["counter"] == 2**62


def test_checked_looks_into_complex_numbers() -> None:
    model = record_of(spin=np.array([complex(0, np.nan)]))
    with pytest.raises(ProtocolError, match="'spin'"):
        ModelShape(model).checked(model)


def test_checked_part_may_leave_tensors_out_but_adds_none() -> None:
    shape = ModelShape(record_of(a=np.zeros(2), b=np.ones(3)))
    assert list(shape.checked_part(record_of(b=np.full(3, 2.0)))) == ["b"]
    with pytest.raises(ProtocolError, match="extra tensor 'c'"):
        shape.checked_part(record_of(c=np.zeros(1)))
    with pytest.raises(ProtocolError, match="lacks tensor 'a'"):
        shape.checked(record_of(b=np.ones(3)))
