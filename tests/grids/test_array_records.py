"""Arrays that are views are plain arrays to Flower; records know whether they lie in one piece."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.flower.array_records import (
    ArrayView,
    Layout,
    PrivateArray,
    common_runs,
    flat_like,
    flat_of,
    flat_record,
    memory_of,
    record_of,
    tensors_of,
    view_record,
)

SAMPLES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float64-nan": np.array([np.nan, 1.0]),
    "int64-0d": np.array(7, np.int64),
    "uint8-empty": np.zeros((0, 3), np.uint8),
    "big-endian": np.array([1, 2], ">i4"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": np.arange(4.0)[::-1],
    "transposed": np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
    "read-only": np.broadcast_to(np.float32(2.0), (2, 2)),
}
COPIES: dict[str, Callable[[object], object]] = {
    "pickle 2": lambda it: pickle.loads(pickle.dumps(it, 2)),
    "pickle 5": lambda it: pickle.loads(pickle.dumps(it, 5)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(params=[ArrayView, PrivateArray], ids=["view", "private"])
def kind(request: pytest.FixtureRequest) -> type[ArrayView]:
    return request.param


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_it_is_a_plain_array_also_on_the_wire_and_copied(
    kind: type[ArrayView], sample: np.ndarray
) -> None:
    plain, ours = Array(sample), kind(sample)
    assert isinstance(ours, Array)
    assert (ours.dtype, ours.shape, ours.stype) == (plain.dtype, plain.shape, plain.stype)
    np.testing.assert_array_equal(ours.numpy(), plain.numpy())
    assert (ours.numpy().dtype, ours.numpy().shape) == (sample.dtype, sample.shape)
    assert ours.deflate() == plain.deflate()
    assert list(ours.children) == list(plain.children)
    assert record_of({"a": ours}).object_id == ArrayRecord({"a": plain}).object_id
    for copied in COPIES.values():
        memory = sample.copy(order="K")
        twin = copied(kind(memory))
        memory[...] = 0
        assert type(twin) is Array
        assert twin == plain


@pytest.mark.parametrize(
    "other",
    [[1.0, 2.5], np.array([1.0, 2.0], np.float32), [[1.0, 2.0]], [1.0], [1, 2]],
    ids=["value", "dtype", "shape", "size", "kind"],
)
def test_inequality(kind: type[ArrayView], other: list[object] | np.ndarray) -> None:
    ours = kind(np.array([1.0, 2.0]))
    for theirs in (Array(np.array(other)), ArrayView(np.array(other))):
        assert ours != theirs
        assert theirs != ours
    assert ours != "a text"
    assert ours != Array(ours.dtype, ours.shape, "other", ours.data)


def test_numpy_of_a_view_is_the_memory_and_of_a_private_array_a_copy_each_time() -> None:
    memory = np.zeros(3)
    view, private = ArrayView(memory), PrivateArray(memory)
    before = view.data
    private.numpy()[1] = 1.0
    assert memory.tolist() == private.numpy().tolist() == [0.0, 0.0, 0.0]
    assert view.numpy() is view.memory is private.memory is memory
    view.numpy()[1] = 5.0
    assert view.data != before
    assert Array(memory) == view == private
    view.is_dirty = False
    assert view.is_dirty
    with pytest.raises(TypeError, match="unhashable"):
        hash(view)


def test_other_elements_than_numbers_times_and_texts_have_no_memory() -> None:
    for elements in (np.zeros(2, "V2"), np.zeros(2, "f4,i4")):
        assert memory_of(Array(elements)) is memory_of(ArrayView(elements)) is None


def test_objects_are_refused_where_flower_refuses_them(kind: type[ArrayView]) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        pickle.dumps(kind(np.array([{}, None], object)))


# --- records in one piece ---------------------------------------------------------------------

KINDS = [
    ("w", "float32", (3, 5)),
    ("b", "float32", (16,)),
    ("count", "int64", ()),
    ("e", "f4", (0, 2)),
]


def filled(kinds: list[tuple[str, str, tuple[int, ...]]] = KINDS, start: float = 0) -> ArrayRecord:
    record = flat_record(Layout.of(kinds))
    for place, array in enumerate(record.values()):
        array.numpy()[...] = start + place
    return record


def test_layout_by_hand() -> None:
    layout = Layout.of(KINDS)
    # 60 bytes end at 64, 64 at 128, 8 at 192, and nothing needs nothing
    assert [offset for *_, offset in layout.places] == [0, 64, 128, 192]
    assert layout.num_bytes == 192
    # w, its gap of one element, b; then the counter and its gap; then the empty one
    found = [(str(dtype), offset, count) for dtype, offset, count in layout.runs]
    assert found == [("float32", 0, 32), ("int64", 128, 8), ("float32", 192, 0)]
    assert Layout.of(iter(KINDS)) is layout


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "float64", "int64", "bool", "float16"]),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
        ),
        max_size=12,
    )
)
def test_runs_hold_every_element_once(kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    record = flat_record(Layout.of((str(i), *kind) for i, kind in enumerate(kinds)))
    flat = flat_of(record)
    assert flat is not None
    for run in flat.runs().values():
        assert not run.any()  # the gaps too
        run[...] = 1
    assert all((array.numpy() == 1).all() for array in record.values())
    counted = sum(run.size * run.itemsize for run in flat.runs().values())
    assert counted == flat.bytes.size
    for array in record.values():
        assert array.numpy().__array_interface__["data"][0] % 64 == 0 or not array.numpy().size


def test_a_record_that_was_changed_is_not_flat() -> None:
    replaced, shorter, renamed = filled(), filled(), filled()
    replaced["b"] = Array(np.ones(16, np.float32))
    del shorter["b"]
    first, second = renamed.pop("w"), renamed.pop("b")
    renamed["b"], renamed["w"] = first, second
    plain = view_record({"w": np.zeros(3)})
    for record in (replaced, shorter, renamed, plain, ArrayRecord()):
        assert flat_of(record) is None


@pytest.mark.parametrize("duplicate", [COPIES["deepcopy"], COPIES["pickle 5"]])
def test_a_copy_has_plain_arrays_of_its_own(duplicate: Callable[[object], object]) -> None:
    record = filled()
    copied = duplicate(record)
    assert isinstance(copied, ArrayRecord)
    assert copied == record
    assert {type(array) for array in copied.values()} == {Array}
    assert flat_of(copied) is None
    record["w"].numpy()[...] = 9
    assert copied["w"].numpy()[0, 0] == 0


def test_flat_like_asks_for_memory_of_the_same_kind() -> None:
    made = []

    def new_memory(layout: Layout) -> np.ndarray:
        made.append(np.zeros(layout.num_bytes + 64, np.uint8))
        return made[-1]

    record = flat_record(Layout.of(KINDS), new_memory=new_memory)
    again = flat_like(flat_like(record))
    assert len(made) == 3
    flat = flat_of(again)
    assert flat is not None
    assert flat.layout is Layout.of(KINDS)
    assert np.shares_memory(flat.bytes, again["w"].numpy())
    assert np.shares_memory(made[-1], again["w"].numpy())


def test_common_runs_only_where_all_lie_alike() -> None:
    one, two = filled(), filled(start=10)
    runs = common_runs(tensors_of(one), tensors_of(two))
    assert [run["128"][0] for run in runs] == [2, 12]
    other = filled([("w", "float32", (3, 5)), ("b", "float32", (17,))])
    plain = {name: array.numpy() for name, array in two.items()}
    first = tensors_of(one)
    for models in ((first, tensors_of(other)), (first, plain), (plain, first)):
        assert common_runs(*models) == models
