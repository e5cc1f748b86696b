"""Records: every array comes out as it went in, and a layout that lies is refused."""

import contextlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.stream.frames import FrameError
from flower_blsgd.runtime.stream.records import (
    EncodedRecord,
    decode_arrays,
    decode_records,
    encode_record,
)

DTYPES = [
    *["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    *["float16", "float32", "float64", "complex64", "complex128"],
    *[">f4", ">i8", "datetime64[ms]", "timedelta64[s]", "S5", "U3", ">U2"],
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = np.random.default_rng(7).integers(0, 100, shape)
    return np.asarray(bits).astype(dtype).reshape(shape)


def body_of(encoded: EncodedRecord) -> np.ndarray:
    return np.frombuffer(b"".join(encoded.pieces), np.uint8).copy()


def over_the_wire(record: ArrayRecord, views: bool = False) -> ArrayRecord:
    encoded = encode_record(record)
    description = json.loads(json.dumps(encoded.description))
    body = body_of(encoded)
    assert description["bytes"] == len(body)
    return decode_arrays(description["layout"], body, views)


def record_over_the_wire(record: ConfigRecord | MetricRecord) -> Any:
    encoded = encode_record(record)
    described = json.loads(json.dumps({"r": encoded.description}))
    return decode_records(described, body_of(encoded), no_arrays)["r"]


def no_arrays(name: str, description: Any, part: np.ndarray) -> ArrayRecord:
    raise AssertionError(f"{name} is no record of arrays")


def assert_same(found: Array, expected: np.ndarray) -> None:
    assert found.numpy().dtype == expected.dtype
    assert found.numpy().shape == tuple(found.shape) == expected.shape
    assert np.dtype(found.dtype) == expected.dtype
    assert isinstance(found.numpy(), np.ndarray)
    assert found.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_array_of_any_dtype_and_shape(dtype: str, shape: tuple[int, ...], views: bool) -> None:
    array = values(dtype, shape)
    # As Flower makes it, and as the library's own strategy does.
    for record in (ArrayRecord({"a": Array(array)}), view_record({"a": array})):
        assert_same(over_the_wire(record, views)["a"], array)


def test_arrays_that_are_not_contiguous() -> None:
    whole = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    arrays = {
        "step": whole[:, ::2],
        "transposed": whole.T,
        "reversed": whole[::-1],
        "fortran": np.asfortranarray(whole),
        "one of many": np.broadcast_to(np.float32(3), (2, 3)),
        "0-d": whole[1, 1, 1:2].reshape(()),
    }
    found = over_the_wire(view_record(arrays))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert_same(found[name], array)


def test_model_of_torch() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    found = over_the_wire(ArrayRecord(model.state_dict())).to_torch_state_dict()
    assert list(found) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_each_array_lies_on_an_aligned_place() -> None:
    record = view_record({str(n): np.ones(n, np.int8) for n in (1, 63, 64, 65, 0, 5)})
    encoded = encode_record(record)
    body = body_of(encoded)
    begin = body.__array_interface__["data"][0]
    for array in decode_arrays(encoded.description["layout"], body, views=True).values():
        assert (array.numpy().__array_interface__["data"][0] - begin) % 64 == 0


def test_array_in_a_serialised_form_of_its_own() -> None:
    foreign = Array("float3", (2, 9), "somebody.format", b"abcde")
    found = over_the_wire(ArrayRecord({"before": Array(np.ones(3)), "f": foreign, "e": foreign}))
    for name in "fe":
        array = found[name]
        assert (array.dtype, tuple(array.shape), array.stype, array.data) == (
            *("float3", (2, 9), "somebody.format"),
            b"abcde",
        )
    assert_same(found["before"], np.ones(3))


def test_array_that_is_not_what_it_says_travels_as_its_bytes() -> None:
    """Its receiver fails on it as it would have without the stream."""
    data = Array(np.ones(3)).data
    found = over_the_wire(ArrayRecord({"a": Array("float64", (4,), "numpy.ndarray", data)}))
    assert found["a"].data == data


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    file = tmp_path / "was-unpickled"
    buffer = io.BytesIO()
    objects = np.array([_Evil(file)], object)
    np.save(buffer, objects, allow_pickle=True)
    np.load(io.BytesIO(buffer.getvalue()), allow_pickle=True)  # the bait works
    assert file.exists()
    file.unlink()
    record = ArrayRecord({"a": Array("object", (1,), "numpy.ndarray", buffer.getvalue())})
    found = over_the_wire(record)
    with pytest.raises(ValueError, match="allow_pickle"):
        found["a"].numpy()
    pickled = np.frombuffer(pickle.dumps(_Evil(file)).ljust(128, b"\0"), np.uint8).copy()
    for dtype in ("O", "|O8", "object"):
        with pytest.raises(FrameError):
            decode_arrays([["a", dtype, [1]]], pickled, views=False)
    assert not file.exists()


@pytest.mark.parametrize(
    "layout",
    [
        None,
        7,
        "abc",
        {"a": 1},
        [7],
        [[]],
        [["a"]],
        [["a", "<f4"]],
        [["a", "<f4", 5]],
        [["a", "<f4", None]],
        [["a", "<f4", "12"]],
        [["a", "<f4", [1.5]]],
        [["a", "<f4", ["1"]]],
        [["a", "<f4", [None]]],
        [["a", "<f4", [[1]]]],
        [["a", "<f4", [-1]]],
        [["a", "<f4", [-2, -2]]],
        [["a", "<f4", [33]]],
        [["a", "<f4", [2**40, 2**40]]],
        [["a", "<f4", [2**63]]],
        [["a", "<f4", [2**70, 0]]],
        [["a", "<f4", [0, 2**70]]],
        [["a", "<f4", [1] * 100]],
        [["a", "<f4", [16]], ["b", "<f4", [17]]],  # the second runs over the end
        [["a", "O", [1]]],
        [["a", "no dtype", [1]]],
        [["a", "f4,(", [1]]],
        [["a", "(2", [1]]],
        [["a", ["<f4"], [1]]],
        [["a", {"names": 3}, [1]]],
        [["a", [["x", "O"]], [1]]],
        [["a", "V0", [1]]],
        [["a", "U0", [3]]],
        [["a", "float32", [1], "stype", -1]],
        [["a", "float32", [1], "stype", 129]],
        [["a", "float32", [1], "stype", 2**70]],
        [["a", "float32", [1], "stype", "5"]],
        [["a", "float32", [1], "stype", None]],
        [["a", "float32", [1], "stype"]],
        [["a", "float32", [1], "stype", 3, 4]],
        [["a", "float32", 5, "stype", 3]],
    ],
    ids=str,
)
def test_layout_that_lies_is_refused(layout: Any) -> None:
    with pytest.raises(FrameError):
        decode_arrays(layout, np.zeros(128, np.uint8), views=False)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 9)
    | st.floats()
    | st.sampled_from(["<f4", "|u1", "O", "U3", "f4,f4", "(2,)i4", "M8[s]", "V4", "T"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
LAYOUTS = JSON | st.lists(
    st.tuples(st.text(max_size=2), JSON, JSON | st.lists(st.integers(-1, 6), max_size=3)).map(list)
)


@settings(deadline=None)
@given(LAYOUTS, st.integers(0, 200))
def test_any_layout_gives_arrays_inside_their_part_or_frame_error(layout: Any, size: int) -> None:
    part = np.arange(size, dtype=np.uint8)
    try:
        record = decode_arrays(layout, part, views=True)
    except FrameError:
        return
    for array in record.values():
        assert array.numpy().nbytes <= size
        assert np.may_share_memory(array.numpy(), part) or not array.numpy().nbytes


def test_views_are_the_memory_and_others_are_copies() -> None:
    encoded = encode_record(view_record({"a": np.zeros(4, np.uint8)}))
    body = body_of(encoded)
    view = decode_arrays(encoded.description["layout"], body, views=True)["a"]
    view.numpy()[0] = 9
    assert body[0] == 9
    private = decode_arrays(encoded.description["layout"], body, views=False)["a"]
    private.numpy()[1] = 9
    assert list(private.numpy()) == [9, 0, 0, 0]


def test_settings_and_figures() -> None:
    config = ConfigRecord(
        {"i": -3, "f": float("inf"), "b": True, "s": "ü", "y": b"\0\xff", "l": [1, 2], "e": []}
    )
    found = record_over_the_wire(config)
    assert isinstance(found, ConfigRecord)
    assert dict(found) == dict(config)
    assert type(found["b"]) is bool
    metrics = MetricRecord({"i": 2**40, "f": 0.1, "l": [1.5, 2.5]})
    assert dict(record_over_the_wire(metrics)) == dict(metrics)
    assert np.isnan(record_over_the_wire(MetricRecord({"nan": float("nan")}))["nan"])


def test_records_keep_their_order_and_their_places() -> None:
    records = {
        "z": ConfigRecord({"a": 1}),
        "arrays": view_record({"w": np.arange(3)}),
        "a": MetricRecord({"b": 2.0}),
        "empty": ArrayRecord(),
    }
    encoded = {name: encode_record(record) for name, record in records.items()}
    body = np.concatenate([body_of(record) for record in encoded.values()])
    found = decode_records(
        {name: record.description for name, record in encoded.items()},
        body,
        lambda name, description, part: decode_arrays(description["layout"], part, False),
    )
    assert isinstance(found, RecordDict)
    assert list(found) == list(records)
    assert found["z"]["a"] == 1
    assert found["a"]["b"] == 2.0
    np.testing.assert_array_equal(found["arrays"]["w"].numpy(), np.arange(3))
    assert not found["empty"]


@pytest.mark.parametrize(
    "description",
    [
        None,
        [],
        {},
        {"kind": "config"},
        {"kind": "config", "bytes": -1},
        {"kind": "config", "bytes": 65},
        {"kind": "config", "bytes": 2**70},
        {"kind": "config", "bytes": "3"},
        {"kind": "config", "bytes": 1.0},
        {"kind": "config", "bytes": 64},
        {"kind": "metrics", "bytes": 64},
        {"kind": "pickle", "bytes": 1},
        {"kind": None, "bytes": 1},
        {"kind": ["config"], "bytes": 1},
        {"kind": {}, "bytes": 1},
    ],
    ids=str,
)
def test_record_that_is_not_what_was_promised_is_refused(description: Any) -> None:
    with pytest.raises(FrameError, match="'r'"):
        decode_records({"r": description}, np.full(64, 0xFF, np.uint8), no_arrays)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), st.binary(max_size=40))
def test_any_description_raises_nothing_but_frame_error(descriptions: Any, body: bytes) -> None:
    part = np.frombuffer(body, np.uint8)
    with contextlib.suppress(FrameError):
        decode_records(descriptions, part, lambda *_: ArrayRecord())


@settings(deadline=None)
@given(st.sampled_from(["config", "metrics"]), st.binary(max_size=80))
def test_any_bytes_for_settings_raise_nothing_but_frame_error(kind: str, body: bytes) -> None:
    """Flower's own reading is what is called; whatever it raises is a frame error."""
    description = {"r": {"kind": kind, "bytes": len(body)}}
    try:
        found = decode_records(description, np.frombuffer(body, np.uint8), no_arrays)
    except FrameError:
        return
    assert isinstance(found["r"], ConfigRecord | MetricRecord)
