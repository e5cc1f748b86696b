"""Records in one piece of memory: where each array is, and when a record is no longer one."""

import copy
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.array_view import ArrayView, PrivateArray, view_record
from flower_blsgd.flat_record import (
    FlatTensors,
    Layout,
    common_runs,
    flat_like,
    flat_of,
    flat_record,
    tensors_of,
)

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


def test_arrays_begin_at_cache_lines_one_behind_the_other() -> None:
    layout = Layout.of(KINDS)
    # 60 bytes end at 64, 64 at 128, 8 at 192, and nothing needs nothing
    assert layout.offsets == (0, 64, 128, 192)
    assert layout.num_bytes == 192
    assert layout.gaps == [(60, 64), (136, 192)]


def test_runs_join_neighbours_of_one_dtype() -> None:
    layout = Layout.of(KINDS)
    found = [(str(dtype), offset, count) for dtype, offset, count in layout.runs]
    # w, its gap of one element, b; then the counter; then the empty one
    assert found == [("float32", 0, 32), ("int64", 128, 1), ("float32", 192, 0)]


def test_runs_are_the_memory_and_gaps_are_zero() -> None:
    record = filled()
    flat = flat_of(record)
    assert flat is not None
    run = flat.runs()["0"]
    assert run.tolist() == [0.0] * 15 + [0.0] + [1.0] * 16
    run += 5
    assert record["b"].numpy().tolist() == [6.0] * 16


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
        run[...] = 1
    assert all((array.numpy() == 1).all() for array in record.values())
    counted = sum(run.size * run.itemsize for run in flat.runs().values())
    assert counted >= sum(array.numpy().nbytes for array in record.values())
    for array in record.values():
        assert array.numpy().__array_interface__["data"][0] % 64 == 0 or not array.numpy().size


def test_an_array_that_is_replaced_ends_it() -> None:
    record = filled()
    record["b"] = Array(np.ones(16, np.float32))
    assert flat_of(record) is None
    record = filled()
    del record["b"]
    assert flat_of(record) is None
    record = filled()
    record["b"] = record.pop("b")  # the same arrays in another order
    assert flat_of(record) is not None or tuple(record) != Layout.of(KINDS).names
    renamed = filled()
    first, second = renamed.pop("w"), renamed.pop("b")
    renamed["b"], renamed["w"] = first, second
    assert flat_of(renamed) is None


def test_what_is_written_to_an_array_does_not() -> None:
    record = filled()
    record["w"].numpy()[...] = 7
    assert flat_of(record) is not None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_has_arrays_of_its_own(duplicate: object) -> None:
    record = filled()
    copied = duplicate(record)  # type: ignore[operator]
    assert copied == record
    assert flat_of(copied) is None
    record["w"].numpy()[...] = 9
    assert copied["w"].numpy()[0, 0] == 0


def test_plain_records_are_not_flat() -> None:
    assert flat_of(ArrayRecord()) is None
    assert flat_of(view_record({"w": np.zeros(3)})) is None


def test_flat_like_asks_for_memory_of_the_same_kind() -> None:
    asked = []

    def new_memory(layout: Layout) -> tuple[np.ndarray, int]:
        asked.append(layout)
        return np.zeros(layout.num_bytes + 64, np.uint8), 64

    record = flat_record(Layout.of(KINDS), new_memory=new_memory)
    again = flat_like(flat_like(record))
    assert asked == [Layout.of(KINDS)] * 3
    flat = flat_of(again)
    assert flat is not None
    assert flat.base == 64
    assert np.shares_memory(flat.bytes, again["w"].numpy())


def test_flat_like_a_plain_record() -> None:
    plain = ArrayRecord({"w": Array(np.ones((2, 3))), "n": Array(np.array(4))})
    made = flat_like(plain)
    assert {name: (a.dtype, a.shape) for name, a in made.items()} == {
        "w": ("float64", (2, 3)),
        "n": ("int64", ()),
    }
    assert type(made["w"]) is ArrayView


def test_common_runs_only_where_all_lie_alike() -> None:
    one, two = filled(), filled(start=10)
    runs = common_runs(tensors_of(one), tensors_of(two))
    assert runs is not None
    assert [run["128"].tolist() for run in runs] == [[2], [12]]
    other = filled([("w", "float32", (3, 5)), ("b", "float32", (17,))])
    assert common_runs(tensors_of(one), tensors_of(other)) is None
    plain = {name: array.numpy() for name, array in two.items()}
    assert common_runs(tensors_of(one), plain) is None
    assert common_runs(plain, tensors_of(one)) is None


def test_tensors_of() -> None:
    record = filled()
    tensors = tensors_of(record)
    assert isinstance(tensors, FlatTensors)
    assert np.shares_memory(tensors["w"], record["w"].numpy())
    assert tensors_of(ArrayRecord({"w": Array(np.ones(2))}))["w"].tolist() == [1, 1]


def test_private_arrays_stay_private() -> None:
    record = flat_record(Layout.of(KINDS), kind=PrivateArray)
    record["w"].numpy()[...] = 3
    assert not record["w"].numpy().any()
