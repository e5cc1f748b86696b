"""Arrays in shared memory: what is sent arrives, and no block is used twice at once."""

import gc
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flower_blsgd.engines.local.shared_memory import (
    BlockMemory,
    BufferPool,
    PlacedRecords,
    pack,
)
from flower_blsgd.flower.array_records import (
    ArrayView,
    Layout,
    PrivateArray,
    flat_record,
    view_record,
)

from .channels import Side, bytes_of, mapped_sizes, open_files, two_sides
from .processes import needs_proc

BIG = 5000
"""Elements of float64: large enough for a block of its own."""

arrays_of_any_kind = npst.arrays(
    dtype=st.one_of(
        npst.boolean_dtypes(),
        npst.integer_dtypes(endianness="?"),
        npst.floating_dtypes(endianness="?"),
        npst.complex_number_dtypes(endianness="?"),
        npst.datetime64_dtypes(endianness="?"),
        npst.timedelta64_dtypes(endianness="?"),
        npst.byte_string_dtypes(),
        npst.unicode_string_dtypes(endianness="?"),
        st.just(np.dtype([("a", "<i4"), ("b", ">f8", (2,))])),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


def big(value: float = 1.0) -> np.ndarray:
    return np.full(BIG, value)


def sent(content: object) -> Any:
    """Return an object as the receiver gets it."""
    with two_sides() as (here, there):
        here.send(content)
        return there.receive()


def placed(pool: BufferPool, array: np.ndarray) -> BlockMemory:
    """Put an array into the pool; its block is in use as long as what is returned lives."""
    memory = pool.new_memory(Layout.of([("x", array.dtype.str, array.shape)]))
    np.ndarray(array.shape, array.dtype, memory)[...] = array
    return memory


def in_pool(pool: BufferPool, value: float) -> ArrayRecord:
    """Return a record of views on a block of the pool."""
    layout = Layout.of([("x", "float64", (BIG,))])
    record = flat_record(layout, new_memory=pool.new_memory)
    record["x"].numpy()[...] = value
    return record


def order(**records: object) -> Message:
    return Message(RecordDict(dict(records)), 100, "train")


def same_elements(one: np.ndarray, two: np.ndarray) -> bool:
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(two).tobytes()
    )


# --- what is sent arrives -------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(arrays_of_any_kind, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_every_dtype_and_shape_arrives(
    arrays: list[np.ndarray], as_views: bool, views: bool
) -> None:
    arrays.append(big())  # else most records would be small enough to be pickled
    form = ArrayView if as_views else Array
    arrays += [np.asfortranarray(array) for array in arrays]
    record = ArrayRecord()
    for i, array in enumerate(arrays):
        record[f"{i}"] = form(array)
    with two_sides(views) as (here, there):
        here.send(order(a=record))
        got = there.receive().content["a"]
        assert list(got) == [f"{i}" for i in range(len(arrays))]
        for array, arrived in zip(arrays, got.values(), strict=True):
            assert same_elements(arrived.numpy(), array)
            assert (arrived.dtype, arrived.shape) == (str(array.dtype), array.shape)
        there.send(Message(RecordDict({"a": got}), reply_to=_with_id(order())))
        back = here.receive().content["a"]
        assert all(same_elements(a.numpy(), b) for a, b in zip(back.values(), arrays, strict=True))


def _with_id(message: Message) -> Message:
    message.metadata.__dict__["_message_id"] = "1"
    return message


def with_bytes(dtype: str, shape: tuple[int, ...], array: np.ndarray, more: bytes = b"") -> Array:
    return Array(dtype, shape, "numpy.ndarray", Array(array).data + more)


ODD_ARRAYS = {
    "another form": Array("float64", (BIG,), "other.form", bytes(8 * BIG)),
    "a wrong dtype": with_bytes("float32", (BIG,), big()),
    "no dtype": with_bytes("no such type", (BIG,), big()),
    "a wrong shape": with_bytes("float64", (BIG // 2, 2), big()),
    "too many bytes": with_bytes("float64", (BIG,), big(), b"\0"),
    "named fields": Array(np.zeros(BIG, [("a", "<i4"), ("b", "<f8")])),
}


@pytest.mark.parametrize("odd", ODD_ARRAYS.values(), ids=ODD_ARRAYS)
def test_an_array_that_is_not_what_it_says_travels_unharmed(odd: Array) -> None:
    """Among others, which keep their order."""
    among = ArrayRecord()
    among["first"], among["odd"], among["last"] = Array(big(1)), odd, Array(big(2))
    got = sent(among)
    assert list(got) == ["first", "odd", "last"]
    assert type(got["odd"]) is Array
    assert got["odd"].data == odd.data
    assert got == among


def test_views_arrive_as_views_and_copies_as_private_arrays() -> None:
    record = ArrayRecord({"x": Array(big())})
    assert type(sent(record)["x"]) is ArrayView
    with two_sides(views=False) as (here, there):
        shared = in_pool(here.pool, 1.0)
        here.send([record, shared])
        got = [arrived["x"] for arrived in there.receive()]
        assert [type(array) for array in got] == [PrivateArray] * 2
        for array in got:
            array.numpy()[:] = 7.0  # a copy
            with pytest.raises(ValueError, match="read-only"):
                array.memory[:] = 7.0
            assert array.numpy()[0] == shared["x"].numpy()[0] == 1.0


@needs_proc
def test_block_that_cannot_be_made_leaves_no_file_open() -> None:
    record, files = ArrayRecord({"x": Array(big())}), open_files()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            pack(record, BufferPool())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files() == files


# --- placed once ----------------------------------------------------------------------------


def test_a_record_of_several_messages_is_placed_once() -> None:
    record, pool = ArrayRecord({"x": Array(big())}), BufferPool()
    placed_records: PlacedRecords = {}
    payloads = [
        pack(order(arrays=record, c=ConfigRecord({"i": i})), pool, placed_records) for i in range(5)
    ]
    assert bytes_of(pool) == big().nbytes
    assert len({number for payload in payloads for number in payload.memories}) == 1
    assert all(len(payload.content) < 2000 for payload in payloads)


def test_a_record_that_is_gone_does_not_lend_its_place_to_the_next() -> None:
    """Records come and go while messages are pushed; Python reuses their addresses."""
    pool, placed_records = BufferPool(), PlacedRecords()
    payloads = [pack(ArrayRecord({"x": Array(big(i))}), pool, placed_records) for i in range(20)]
    with two_sides() as (here, there):
        for i, payload in enumerate(payloads):
            here.channel.send(payload)
            assert there.receive()["x"].numpy()[0] == i


def test_arrays_that_are_in_the_pool_already_are_not_copied() -> None:
    with two_sides() as (here, there):
        shared = in_pool(here.pool, 2.0)
        size = bytes_of(here.pool)
        here.send(shared)
        assert bytes_of(here.pool) == size
        got = there.receive()["x"].numpy()
        shared["x"].numpy()[0] = 3.0
        assert got[:2].tolist() == [3.0, 2.0]


# --- blocks are used again, but never while somebody looks ----------------------------------

HOLDS: dict[str, Callable[[ArrayRecord], Any]] = {
    "the record": lambda record: record,
    "the array": lambda record: record["x"],
    "the ndarray": lambda record: record["x"].numpy(),
    "a view of a view": lambda record: record["x"].numpy().reshape(-1, 2).T[0][3:][::2],
    "a memoryview": lambda record: memoryview(record["x"].numpy())[4:8],
    "numpy of a torch tensor": lambda record: torch.from_numpy(record["x"].numpy())[1:].numpy(),
    "a state dict": lambda record: record.to_torch_state_dict(),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_receivers_block_waits_for_every_view(hold: Callable[[ArrayRecord], object]) -> None:
    with two_sides() as (here, there):
        for i in range(3):  # settle
            exchange(here, there, i)
        size = bytes_of(here.pool)
        assert size == big().nbytes

        here.send(view_record({"x": big(77)}))
        record = there.receive()
        kept, expected = hold(record), content_of(hold(record))
        del record
        gc.collect()
        there.send(None)
        here.receive()
        for i in range(4):
            exchange(here, there, i)
            assert content_of(kept) == expected
        assert bytes_of(here.pool) == 2 * size  # one is kept, one goes to and fro

        del kept
        gc.collect()
        for i in range(4):
            exchange(here, there, i)
        assert bytes_of(here.pool) == 2 * size


def content_of(kept: Any) -> bytes:
    if isinstance(kept, dict | ArrayRecord):
        kept = kept["x"]
    return (kept.numpy() if hasattr(kept, "numpy") else kept).tobytes()


def exchange(here: Side, there: Side, value: float = 0.0) -> None:
    """Send, look at it, forget it, and answer."""
    here.send(view_record({"x": big(value)}))
    assert there.receive()["x"].numpy()[-1] == value
    there.send(None)
    here.receive()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("sr"), st.integers(0, 3), st.integers(0, 2)), max_size=40)
)
def test_nothing_that_is_kept_ever_changes(steps: list[tuple[str, int, int]]) -> None:
    """Any play of sending, keeping and dropping: whatever is kept on either side holds."""
    sizes = (600, 5000, 200_000)
    with two_sides() as (here, there):
        kept: dict[tuple[str, int], tuple[np.ndarray, int]] = {}

        def check() -> None:
            for array, value in kept.values():
                assert array[0] == array[-1] == value

        for number, (who, slot, size) in enumerate(steps):
            sender, receiver = (here, there) if who == "s" else (there, here)
            name = "there" if who == "s" else "here"
            sent_on = kept.get(("here" if who == "s" else "there", slot))
            # Half of them are what this side holds itself, sent again or sent on.
            again = sent_on is not None and number % 2
            value = sent_on[1] if again and sent_on else number
            array = sent_on[0] if again and sent_on else np.full(sizes[size], float(number))
            sender.send(view_record({"x": array}))
            kept[name, slot] = receiver.receive()["x"].numpy()[1:-1], value
            receiver.send(None)
            sender.receive()
            check()
            if size == 2:
                kept.pop((name, (slot + 1) % 4), None)
        limit = sum(8 * s for s in sizes) * 12 + (4 << 20)
        assert bytes_of(here.pool) + bytes_of(there.pool) <= limit


# --- blocks that are given up ---------------------------------------------------------------


@needs_proc
def test_blocks_of_a_model_that_is_sent_no_more_are_unmapped_on_both_sides() -> None:
    gc.collect()
    maps, files = mapped_sizes(), open_files()
    with two_sides() as (here, there):
        for megabytes in (30, 7):
            for _ in range(3):
                here.send(view_record({"x": np.zeros(megabytes << 17)}))
                there.receive()
                there.send(None)
                here.receive()
            gc.collect()
            assert bytes_of(here.pool) == megabytes << 20
        ours = list(mapped_sizes())
        for size in maps:
            ours.remove(size)
        assert ours == [7 << 20] * 2  # here and there
    del here, there
    gc.collect()
    assert mapped_sizes() == maps
    assert open_files() <= files + 2  # the pytest fixture's own sockets may come and go


def test_a_free_block_is_used_or_given_up_if_it_is_much_too_large_but_never_while_in_use() -> None:
    pool = BufferPool()
    placed(pool, np.zeros(10 << 20, np.uint8))
    for size in (10 << 20, 9 << 20, 5 << 20):  # half of it, or less
        assert placed(pool, np.zeros(size, np.uint8)).block.size == 10 << 20
    assert placed(pool, np.zeros(4 << 20, np.uint8)).block.size == 4 << 20
    assert bytes_of(pool) == 4 << 20
    kept = placed(pool, big(1))
    placed(pool, np.zeros(20 << 20, np.uint8))
    assert not kept.block.given_up
    placed(pool, np.zeros(50 << 20, np.uint8))
    assert bytes_of(pool) == big().nbytes + (50 << 20)


def test_memory_that_is_used_again_has_zeros_between_the_arrays() -> None:
    pool = BufferPool()
    memory = pool.new_memory(Layout.of([("x", "uint8", (1000,))]))
    memory[:] = 7
    del memory
    layout = Layout.of([("a", "float32", (3, 5)), ("b", "uint8", (65,)), ("c", "int64", ())])
    again = pool.new_memory(layout)
    assert bytes_of(pool) == 1024  # the same block
    # 60 bytes end at 64, 65 at 192, 8 at 256
    assert [again[a:b].any() for a, b in ((60, 64), (129, 192), (200, 256))] == [False] * 3


# --- ends -----------------------------------------------------------------------------------


def test_close_frees_what_the_other_end_held_or_could_not_be_sent() -> None:
    """The other process has died: every attempt would else cost a model's memory."""
    with two_sides() as (here, there):
        here.send(view_record({"x": big(1)}))
        there.receive()
        there.channel.close()
        with pytest.raises(OSError, match="Broken pipe"):
            here.send(view_record({"x": big()}))
        gc.collect()
        assert bytes_of(here.pool) == 2 * big().nbytes
    both = [placed(here.pool, big(3)), placed(here.pool, big(4))]
    assert bytes_of(here.pool) == 2 * big().nbytes
    assert both[0].block is not both[1].block


class Unreadable:
    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return int, ("no", "number")


def test_a_content_that_cannot_be_read_does_not_break_the_channel() -> None:
    with two_sides() as (here, there):
        here.send([view_record({"x": big()}), Unreadable()])
        with pytest.raises(TypeError):
            there.receive()
        gc.collect()
        there.send(None)
        here.receive()
        for i in range(4):
            exchange(here, there, i)
        assert bytes_of(here.pool) <= 2 * big().nbytes
