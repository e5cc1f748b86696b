"""Arrays that are views: to Flower, and to whoever reads them, they are plain arrays."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flower_blsgd.array_view import ArrayView, PrivateArray, record_of, view_record

KINDS = [ArrayView, PrivateArray]
SAMPLES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float16": np.array([0.5, -0.0, np.inf, 65504.0], np.float16),
    "float64-nan": np.array([np.nan, 1.0]),
    "int64-0d": np.array(7, np.int64),
    "bool": np.array([[True], [False]]),
    "uint8-empty": np.zeros((0, 3), np.uint8),
    "complex64": np.array([1 + 2j], np.complex64),
    "big-endian": np.array([1, 2], ">i4"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10.0)[::3],
    "reversed": np.arange(4.0)[::-1],
    "transposed": np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
    "read-only": np.broadcast_to(np.float32(2.0), (2, 2)),
}
numbers = npst.arrays(
    dtype=st.one_of(
        npst.boolean_dtypes(),
        npst.integer_dtypes(endianness="?"),
        npst.floating_dtypes(endianness="?"),
        npst.complex_number_dtypes(),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@pytest.fixture(params=KINDS, ids=["view", "private"])
def kind(request: pytest.FixtureRequest) -> type[ArrayView]:
    return request.param


@pytest.fixture(params=SAMPLES.values(), ids=SAMPLES)
def sample(request: pytest.FixtureRequest) -> np.ndarray:
    return request.param


def test_it_says_what_a_plain_array_says(kind: type[ArrayView], sample: np.ndarray) -> None:
    plain, ours = Array(sample), kind(sample)
    assert isinstance(ours, Array)
    assert (ours.dtype, ours.shape, ours.stype) == (plain.dtype, plain.shape, plain.stype)
    assert type(ours.shape) is tuple
    assert ours.data == plain.data
    np.testing.assert_array_equal(ours.numpy(), plain.numpy())
    assert ours.numpy().dtype == sample.dtype
    assert ours.numpy().shape == sample.shape


def test_it_has_the_bytes_and_the_name_of_a_plain_array_on_the_wire(
    kind: type[ArrayView], sample: np.ndarray
) -> None:
    plain, ours = Array(sample), kind(sample)
    assert ours.deflate() == plain.deflate()
    assert ours.object_id == plain.object_id
    assert list(ours.children) == list(plain.children)
    assert record_of({"a": ours}).object_id == ArrayRecord({"a": plain}).object_id


@given(numbers)
def test_any_numbers(array: np.ndarray) -> None:
    plain, ours = Array(array), ArrayView(array)
    assert ours == plain
    assert plain == ours
    assert ours.data == plain.data
    assert pickle.loads(pickle.dumps(ours)) == plain
    assert ours.object_id == plain.object_id


def test_equality_with_plain_arrays_both_ways(kind: type[ArrayView], sample: np.ndarray) -> None:
    plain, ours = Array(sample), kind(sample)
    assert plain == ours
    assert ours == plain
    assert ours == ArrayView(sample)
    assert ours == PrivateArray(sample)


@pytest.mark.parametrize(
    "other",
    [
        np.array([1.0, 2.5]),
        np.array([1.0, 2.0], np.float32),
        np.array([[1.0, 2.0]]),
        np.array([1.0]),
        np.array([1, 2]),
    ],
    ids=["value", "dtype", "shape", "size", "kind"],
)
def test_inequality(kind: type[ArrayView], other: np.ndarray) -> None:
    ours = kind(np.array([1.0, 2.0]))
    for theirs in (Array(other), ArrayView(other), PrivateArray(other)):
        assert ours != theirs
        assert theirs != ours
    assert ours != "a text"
    assert ours != Array(ours.dtype, ours.shape, "other", ours.data)


def test_equality_is_of_bits_as_flowers_is() -> None:
    """A NaN equals itself, and 0.0 is not -0.0."""
    assert ArrayView(np.array([np.nan])) == Array(np.array([np.nan]))
    assert ArrayView(np.array([0.0])) != Array(np.array([-0.0]))


def test_a_view_cannot_be_hashed_because_it_can_change(kind: type[ArrayView]) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(kind(np.zeros(1)))


# --- memory ---------------------------------------------------------------------------------


def test_numpy_of_a_view_is_the_memory() -> None:
    memory = np.zeros(3)
    view = ArrayView(memory)
    assert view.numpy() is memory
    assert view.memory is memory
    view.numpy()[1] = 5.0
    assert memory.tolist() == [0.0, 5.0, 0.0]
    assert Array(memory) == view


def test_numpy_of_a_private_array_is_a_copy_each_time() -> None:
    memory = np.zeros(3)
    private = PrivateArray(memory)
    first, second = private.numpy(), private.numpy()
    first[:] = 1.0
    assert not np.shares_memory(first, memory)
    assert not np.shares_memory(first, second)
    assert first.flags.writeable
    assert private.memory is memory
    assert private.numpy().tolist() == second.tolist() == [0.0, 0.0, 0.0]


def test_numpy_of_a_private_array_can_be_written_even_if_the_memory_cannot() -> None:
    memory = np.zeros(2)
    memory.flags.writeable = False
    PrivateArray(memory).numpy()[0] = 1.0


def test_what_is_said_follows_the_memory() -> None:
    memory = np.zeros(3, np.float32)
    view = ArrayView(memory)
    before = view.data
    memory[0] = 1.0
    assert view.data != before
    assert view == Array(np.array([1, 0, 0], np.float32))
    assert view.is_dirty
    view.is_dirty = False
    assert view.is_dirty


def test_dtype_may_be_told() -> None:
    assert ArrayView(np.zeros(1, np.float32), "float32") == Array(np.zeros(1, np.float32))


# --- copies ---------------------------------------------------------------------------------

COPIES: dict[str, Callable[[object], object]] = {
    **{
        f"pickle {protocol}": lambda it, protocol=protocol: pickle.loads(pickle.dumps(it, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_plain_array(
    kind: type[ArrayView], sample: np.ndarray, copied: Callable[[Array], Array]
) -> None:
    memory = sample.copy(order="K")
    twin = copied(kind(memory))
    assert type(twin) is Array
    assert twin == Array(sample)
    if memory.size:
        memory[...] = 0
    np.testing.assert_array_equal(twin.numpy(), sample)


@pytest.mark.parametrize("copied", [COPIES["deepcopy"], COPIES["pickle 5"]])
def test_a_copied_record_holds_plain_arrays(copied: Callable[[ArrayRecord], ArrayRecord]) -> None:
    record = view_record({"a": np.ones(2), "b": np.array(3)})
    twin = copied(record)
    assert [type(array) for array in twin.values()] == [Array, Array]
    assert twin == record


def test_objects_are_refused_where_flower_refuses_them(kind: type[ArrayView]) -> None:
    objects = np.array([{}, None], object)
    with pytest.raises(ValueError, match="allow_pickle"):
        Array(objects)
    with pytest.raises(ValueError, match="allow_pickle"):
        pickle.dumps(kind(objects))


# --- records --------------------------------------------------------------------------------


def records() -> tuple[ArrayRecord, ArrayRecord]:
    tensors = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "steps": np.array(3, np.int64),
        "none": np.zeros((0,), np.float16),
    }
    return view_record(tensors), ArrayRecord({name: Array(t) for name, t in tensors.items()})


def test_view_record_shares_the_memory() -> None:
    memory = np.zeros(2)
    record = view_record({"a": memory})
    assert record["a"].numpy() is memory
    assert type(record) is ArrayRecord


def test_view_record_behaves_as_a_record_that_was_made_by_the_rules() -> None:
    ours, plain = records()
    assert ours == plain
    assert plain == ours
    assert list(ours) == list(ours.keys()) == list(plain.keys()) == ["w", "steps", "none"]
    assert list(ours.items()) == list(plain.items())
    assert len(ours) == 3
    assert "w" in ours
    assert "v" not in ours
    assert ours.count_bytes() == plain.count_bytes()
    assert ours.deflate() == plain.deflate()
    assert ours.object_id == plain.object_id
    assert [a.tolist() for a in ours.to_numpy_ndarrays()] == [
        a.tolist() for a in plain.to_numpy_ndarrays()
    ]
    ours_torch, plain_torch = ours.to_torch_state_dict(), plain.to_torch_state_dict()
    assert list(ours_torch) == list(plain_torch)
    assert all(torch.equal(ours_torch[name], plain_torch[name]) for name in plain_torch)


def test_to_torch_state_dict_of_views_and_of_private_arrays() -> None:
    memory = np.zeros(2)
    record_of({"a": ArrayView(memory)}).to_torch_state_dict()["a"][0] = 1.0
    record_of({"a": PrivateArray(memory)}).to_torch_state_dict()["a"][1] = 1.0
    assert memory.tolist() == [1.0, 0.0]


def test_view_record_can_be_changed_and_still_checks() -> None:
    record, _ = records()
    record["w"] = Array(np.ones(1))
    record["new"] = ArrayView(np.ones(2))
    del record["steps"]
    assert record.pop("none").shape == (0,)
    assert list(record) == ["w", "new"]
    with pytest.raises(TypeError):
        record["bad"] = np.ones(1)  # type: ignore[assignment]
    with pytest.raises(TypeError):
        record[1] = Array(np.ones(1))  # type: ignore[index]


def test_records_do_not_share_their_books() -> None:
    arrays: dict[str, Array] = {"a": Array(np.ones(1))}
    first, second = record_of(arrays), record_of(arrays)
    first["b"] = Array(np.ones(1))
    assert list(second) == list(arrays) == ["a"]
    assert record_of({}) == ArrayRecord()


def test_flowers_own_constructor_makes_plain_arrays_of_views() -> None:
    """So does a copy by Flower's rules; this is why `view_record` exists."""
    record = ArrayRecord({"a": ArrayView(np.ones(2))})
    assert type(record["a"]) is Array
    assert record == view_record({"a": np.ones(2)})


def test_views_travel_over_flowers_wire() -> None:
    ours, plain = records()
    ours["private"] = PrivateArray(np.arange(3))
    plain["private"] = Array(np.arange(3))
    content = message_from_proto(
        message_to_proto(Message(RecordDict({"arrays": ours}), 5, "train"))
    ).content
    assert content["arrays"] == plain
    assert {type(array) for array in content["arrays"].values()} == {Array}


@pytest.mark.parametrize("keep_input", [True, False])
def test_to_numpy_keeps_or_empties_the_record(keep_input: bool) -> None:
    record, _ = records()
    arrays = record.to_numpy_ndarrays(keep_input=keep_input)
    assert [array.shape for array in arrays] == [(2, 3), (), (0,)]
    assert len(record) == (3 if keep_input else 0)
