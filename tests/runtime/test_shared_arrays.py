"""Arrays in shared memory: what is sent arrives, and no block is used twice at once."""

import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flower_blsgd.array_view import ArrayView, PrivateArray, view_record
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime import memory
from flower_blsgd.runtime.shared_arrays import Packer, share_views, unpack
from flower_blsgd.runtime.shared_pool import Pool

from .channels import Side, mapped_sizes, open_files, two_sides

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="this system has no /proc"
)
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


def sent(content: object, views: bool = True) -> object:
    """Return an object as the receiver gets it."""
    with two_sides(views) as (here, there):
        here.send(content)
        return there.receive()


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


LAYOUTS = {
    "fortran": lambda: np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "transposed": lambda: np.arange(6000.0).reshape(10, 20, 30).transpose(2, 0, 1),
    "reversed": lambda: np.arange(6000.0)[::-1],
    "every third": lambda: np.arange(18000.0)[::3],
    "broadcast": lambda: np.broadcast_to(np.arange(100.0), (60, 100)),
    "unaligned": lambda: np.frombuffer(bytes(range(200)) * 300, np.uint8)[1:48001].view("<f8"),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("form", [Array, ArrayView, PrivateArray])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_every_memory_layout_arrives(
    make: Callable[[], np.ndarray], form: type[Array], views: bool
) -> None:
    array, record = make(), ArrayRecord()
    record["x"] = form(array)
    got = sent(record, views)
    assert same_elements(got["x"].numpy(), array)
    assert got["x"].shape == array.shape


def test_views_arrive_as_views_and_copies_as_private_arrays() -> None:
    record = ArrayRecord({"x": Array(big())})
    with two_sides(views=True) as (here, there):
        here.send(record)
        got = there.receive()
        assert type(got["x"]) is ArrayView
        assert got["x"].numpy() is got["x"].numpy()
    with two_sides(views=False) as (here, there):
        here.send(record)
        got = there.receive()
        assert type(got["x"]) is PrivateArray
    with two_sides(views=False) as (here, there):
        shared = share_views(view_record({"x": big()}), here.pool)
        assert shared is not None
        here.send(shared)
        got = there.receive()["x"]
        got.numpy()[:] = 7.0  # a copy
        with pytest.raises(ValueError, match="read-only"):
            got.memory[:] = 7.0
        assert got.numpy()[0] == shared["x"].numpy()[0] == 1.0


@pytest.mark.parametrize("count", [1, 504, 505, 513])
def test_a_record_at_the_size_where_shared_memory_begins(count: int) -> None:
    """4096 bytes in whole cache lines are 505 to 512 elements."""
    with two_sides() as (here, there):
        here.send(ArrayRecord({"x": Array(np.arange(float(count)))}))
        assert there.receive()["x"].numpy().tolist() == list(range(count))
        assert bool(here.pool.num_bytes) == (count >= 505)


def test_an_empty_record_and_no_record() -> None:
    assert sent(ArrayRecord()) == ArrayRecord()
    got = sent(order(a=ArrayRecord(), c=ConfigRecord({"x": 1})))
    assert got.content["a"] == ArrayRecord()
    assert got.content["c"]["x"] == 1


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


ODD_ARRAYS = {
    "another form": Array("float64", (BIG,), "other.form", bytes(8 * BIG)),
    "a wrong dtype": Array("float32", (BIG,), "numpy.ndarray", saved(big())),
    "a wrong dtype of the same size": Array("int64", (BIG,), "numpy.ndarray", saved(big())),
    "no dtype": Array("no such type", (BIG,), "numpy.ndarray", saved(big())),
    "a python type": Array("object", (BIG,), "numpy.ndarray", saved(big())),
    "a wrong shape": Array("float64", (BIG // 2, 2), "numpy.ndarray", saved(big())),
    "a longer shape": Array("float64", (BIG + 1,), "numpy.ndarray", saved(big())),
    "a negative shape": Array("float64", (-1,), "numpy.ndarray", saved(big())),
    "too few bytes": Array("float64", (BIG,), "numpy.ndarray", saved(big())[:-1]),
    "too many bytes": Array("float64", (BIG,), "numpy.ndarray", saved(big()) + b"\0"),
    "no bytes": Array("float64", (BIG,), "numpy.ndarray", b""),
    "nonsense": Array("float64", (BIG,), "numpy.ndarray", b"\x93NUMPY" + bytes(8 * BIG)),
    "another version of the header": Array(
        "float64", (BIG,), "numpy.ndarray", saved(big(), version=(2, 0))
    ),
    "the order of Fortran": Array(np.asfortranarray(np.arange(6000.0).reshape(60, 100))),
    "named fields": Array(np.zeros(BIG, [("a", "<i4"), ("b", "<f8")])),
}


@pytest.mark.parametrize("odd", ODD_ARRAYS.values(), ids=ODD_ARRAYS)
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_an_array_that_is_not_what_it_says_travels_unharmed(odd: Array, views: bool) -> None:
    """Alone, and among others, which keep their order."""
    alone = ArrayRecord()
    alone["odd"] = odd
    assert sent(alone, views) == alone
    among = ArrayRecord()
    among["first"] = Array(big(1))
    among["odd"] = odd
    among["last"] = Array(big(2))
    got = sent(among, views)
    assert list(got) == ["first", "odd", "last"]
    assert type(got["odd"]) is Array
    assert got["odd"] == odd
    assert got["odd"].data == odd.data
    assert got == among


def test_objects_are_refused_instead_of_sending_their_addresses() -> None:
    """Flower refuses them in `Array(...)` already."""
    record = view_record({"x": np.array([{}] * BIG, object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        Packer(Pool()).pack(record)
    assert share_views(record, Pool()) is None


def test_named_fields_keep_their_names() -> None:
    fields = np.zeros(BIG, [("a", "<i4"), ("b", "<f8")])
    fields["b"] = 2.5
    got = sent(view_record({"x": fields}))["x"].numpy()
    assert got["b"].sum() == 2.5 * BIG


def test_a_record_of_the_apps_own_class_travels_as_it_is() -> None:
    record = OwnRecord({"x": Array(big())})
    got = sent(record)
    assert type(got) is OwnRecord
    assert got == record


class OwnRecord(ArrayRecord):
    pass


# --- placed once ----------------------------------------------------------------------------


def test_a_record_of_several_messages_is_placed_once() -> None:
    record, pool = ArrayRecord({"x": Array(big())}), Pool()
    packer = Packer(pool)
    parcels = [packer.pack(order(arrays=record, c=ConfigRecord({"i": i}))) for i in range(5)]
    assert pool.num_bytes == big().nbytes
    assert len({number for parcel in parcels for number in parcel.blocks}) == 1
    assert all(len(parcel.payload) < 2000 for parcel in parcels)


def test_a_record_twice_in_one_message_is_placed_once_and_stays_one() -> None:
    record = ArrayRecord({"x": Array(big())})
    with two_sides() as (here, there):
        here.send(order(a=record, b=record))
        content = there.receive().content
        assert here.pool.num_bytes == big().nbytes
        assert content["a"] == content["b"] == record
        assert np.shares_memory(content["a"]["x"].numpy(), content["b"]["x"].numpy())


def test_equal_records_are_not_the_same_record() -> None:
    packer = Packer(pool := Pool())
    parcels = [packer.pack(ArrayRecord({"x": Array(big())})) for _ in range(2)]
    assert pool.num_bytes == 2 * big().nbytes
    assert len({number for parcel in parcels for number in parcel.blocks}) == 2


def test_a_record_that_is_gone_does_not_lend_its_place_to_the_next() -> None:
    """Records come and go while messages are pushed; Python reuses their addresses."""
    pool = Pool()
    packer = Packer(pool)
    parcels = [packer.pack(ArrayRecord({"x": Array(big(i))})) for i in range(20)]
    for i, parcel in enumerate(parcels):
        assert unpack(parcel.payload, parcel.blocks, True)["x"].numpy()[0] == i


def test_arrays_that_are_in_the_pool_already_are_not_copied() -> None:
    pool = Pool()
    shared = share_views(view_record({"a": big(), "b": big(2)}), pool)
    assert shared is not None
    size = pool.num_bytes
    parcel = Packer(pool).pack(shared)
    assert pool.num_bytes == size
    got = unpack(parcel.payload, parcel.blocks, True)
    assert np.shares_memory(got["b"].numpy(), shared["b"].numpy())
    part = view_record({"tail": shared["b"].numpy()[-BIG // 2 :]})  # any part of it as well
    got = unpack((parcel := Packer(pool).pack(part)).payload, parcel.blocks, True)
    assert np.shares_memory(got["tail"].numpy(), shared["b"].numpy())
    assert pool.num_bytes == size


def test_arrays_of_two_blocks_are_copied_into_one() -> None:
    pool = Pool()
    one, two = (share_views(view_record({"x": big(v)}), pool) for v in (1, 2))
    assert one is not None
    assert two is not None
    both = view_record({"one": one["x"].numpy(), "two": two["x"].numpy()})
    parcel = Packer(pool).pack(both)
    assert len(parcel.blocks) == 1
    got = unpack(parcel.payload, parcel.blocks, True)
    assert (got["one"].numpy()[0], got["two"].numpy()[-1]) == (1.0, 2.0)
    assert not np.shares_memory(got["one"].numpy(), one["x"].numpy())


def test_another_processs_memory_is_copied_before_it_is_sent_on() -> None:
    with two_sides() as (here, there):
        here.send(view_record({"x": big(3)}))
        got = there.receive()
        there.send(got)
        back = here.receive()
        assert back == got
        assert there.pool.num_bytes == big().nbytes


def test_arrays_begin_at_cache_lines() -> None:
    record = view_record({str(i): np.full(i, i % 250, np.uint8) for i in (1, 63, 64, 65, 5000)})
    got = sent(record)
    assert got == record
    addresses = [array.numpy().__array_interface__["data"][0] for array in got.values()]
    assert all(address % 64 == 0 for address in addresses)


# --- share_views: what a node keeps ---------------------------------------------------------


def test_share_views_takes_views_only() -> None:
    pool = Pool()
    assert share_views(ArrayRecord(), pool) is None
    assert share_views(ArrayRecord({"x": Array(big())}), pool) is None
    mixed = view_record({"x": big()})
    mixed["y"] = Array(big())
    assert share_views(mixed, pool) is None
    assert pool.num_bytes == 0


def test_share_views_keeps_values_names_and_order() -> None:
    tensors = {"b": np.array(1.5), "a": np.arange(6).reshape(2, 3), "none": np.zeros((0, 2))}
    shared = share_views(view_record(tensors), pool := Pool())
    assert shared == view_record(tensors)
    assert shared is not None
    assert list(shared) == ["b", "a", "none"]
    again = share_views(shared, pool)
    assert again is not None
    assert np.shares_memory(again["a"].numpy(), shared["a"].numpy())


def test_share_views_of_private_arrays_stay_private() -> None:
    """A foreign app may keep what came in a message; it must be as harmless as Flower's."""
    record = ArrayRecord()
    record["x"] = PrivateArray(big())
    shared = share_views(record, Pool())
    assert shared is not None
    shared["x"].numpy()[:] = 9.0
    assert shared["x"].numpy()[0] == 1.0


# --- blocks are used again, but never while somebody looks ----------------------------------

HOLDS: dict[str, Callable[[ArrayRecord], object]] = {
    "the record": lambda record: record,
    "the array": lambda record: record["x"],
    "the ndarray": lambda record: record["x"].numpy(),
    "a view of it": lambda record: record["x"].numpy()[10:20],
    "a view of a view": lambda record: record["x"].numpy().reshape(-1, 2).T[0][3:][::2],
    "a scalar view": lambda record: record["x"].numpy()[5:6].reshape(()),
    "a memoryview": lambda record: memoryview(record["x"].numpy())[4:8],
    "an array on a memoryview": lambda record: np.asarray(memoryview(record["x"].numpy()))[1:],
    "a torch tensor": lambda record: torch.from_numpy(record["x"].numpy()),
    "a slice of a torch tensor": lambda record: torch.from_numpy(record["x"].numpy())[3:].view(-1),
    "numpy of a torch tensor": lambda record: torch.from_numpy(record["x"].numpy())[1:].numpy(),
    "a state dict": lambda record: record.to_torch_state_dict(),
    "another record with it": lambda record: view_record({"y": record["x"].numpy()[1:]}),
    "a masked array": lambda record: np.ma.asarray(record["x"].numpy()),
    "a matrix": lambda record: record["x"].numpy().view(np.matrix),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_receivers_block_waits_for_every_view(hold: Callable[[ArrayRecord], object]) -> None:
    with two_sides() as (here, there):
        for i in range(3):  # settle
            exchange(here, there, i)
        size = here.pool.num_bytes
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
        assert here.pool.num_bytes == 2 * size  # one is kept, one goes to and fro

        del kept
        gc.collect()
        exchange(here, there)  # tells that it is free
        blocks = here.pool.num_bytes
        for i in range(4):
            exchange(here, there, i)
        assert here.pool.num_bytes == blocks == 2 * size


def content_of(kept: object) -> bytes:
    if isinstance(kept, ArrayRecord):
        return next(iter(kept.values())).numpy().tobytes()
    if isinstance(kept, Array):
        return kept.numpy().tobytes()
    if isinstance(kept, torch.Tensor):
        return kept.numpy().tobytes()
    if isinstance(kept, dict):
        return kept["x"].numpy().tobytes()
    return kept.tobytes()  # type: ignore[attr-defined]


def exchange(here: Side, there: Side, value: float = 0.0) -> None:
    """Send, look at it, forget it, and answer."""
    here.send(view_record({"x": big(value)}))
    assert there.receive()["x"].numpy()[-1] == value
    there.send(None)
    here.receive()


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_senders_own_block_waits_for_every_view(hold: Callable[[ArrayRecord], object]) -> None:
    """Such as momentum: its node keeps a view on its own block, nobody else does."""
    pool = Pool()
    shared = share_views(view_record({"x": big(5)}), pool)
    assert shared is not None
    kept = hold(shared)
    expected = content_of(kept)
    del shared
    gc.collect()
    for i in range(3):
        pool.place([big(i)])
    assert content_of(kept) == expected
    assert pool.num_bytes == 2 * big().nbytes
    del kept
    gc.collect()
    placements = [pool.place([big(i)]) for i in range(2)]
    assert pool.num_bytes == 2 * big().nbytes
    assert len({placement.block.number for placement in placements}) == 2


def test_a_parcel_that_waits_to_be_sent_keeps_its_block() -> None:
    pool = Pool()
    waiting = Packer(pool).pack(view_record({"x": big(1)}))
    for i in range(3):
        Packer(pool).pack(view_record({"x": big(9 + i)}))
    assert unpack(waiting.payload, waiting.blocks, True)["x"].numpy()[0] == 1.0
    assert pool.num_bytes == 2 * big().nbytes


@needs_proc
def test_fifty_rounds_need_no_more_memory_nor_files_than_three() -> None:
    with two_sides() as (here, there):
        model = view_record({"x": big(0)})
        seen = set()
        for i in range(50):
            here.send(order(arrays=model))
            got = there.receive().content["arrays"]
            reply = view_record({"x": got["x"].numpy() + 1})
            del got
            there.send(reply)
            model = here.receive()  # kept over the next round, as a strategy does
            assert model["x"].numpy().min() == model["x"].numpy().max() == i + 1
            if i >= 3:
                sizes = here.pool.num_bytes, there.pool.num_bytes
                seen.add((*sizes, open_files(), tuple(mapped_sizes())))
        assert len(seen) == 1
        assert max(sizes) <= 2 * big().nbytes


def test_a_strategy_that_keeps_every_reply_has_them_all_unharmed() -> None:
    with two_sides() as (here, there):
        kept = []
        for i in range(6):
            here.send(i)
            there.send(view_record({"x": big(there.receive())}))
            kept.append(here.receive())
        assert [record["x"].numpy().tolist()[:: BIG - 1] for record in kept] == [
            [float(i)] * 2 for i in range(6)
        ]
        assert there.pool.num_bytes == 6 * big().nbytes
        kept.clear()
        for i in range(8):
            here.send(i)
            there.send(view_record({"x": big(there.receive())}))
            assert here.receive()["x"].numpy()[0] == i
        assert there.pool.num_bytes == 6 * big().nbytes


def test_a_block_that_comes_again_before_its_end_was_told_is_still_kept() -> None:
    """The receiver drops the record between two messages, and gets the same block once more."""
    with two_sides() as (here, there):
        shared = share_views(view_record({"x": big(1)}), here.pool)
        here.send(shared)
        first = there.receive()
        there.send(None)  # `first` is still looked at
        here.receive()
        del first  # between two messages
        here.send(shared)
        second = there.receive()
        there.send(None)  # must not say that the block is free
        here.receive()
        del shared
        for i in range(3):
            exchange(here, there, 50 + i)
        assert second["x"].numpy().min() == second["x"].numpy().max() == 1.0
        del second
        for i in range(6):
            exchange(here, there, i)
        assert here.pool.num_bytes == 2 * big().nbytes


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
        assert here.pool.num_bytes + there.pool.num_bytes <= limit


# --- blocks that are given up ---------------------------------------------------------------


def test_a_block_that_a_parcel_on_its_way_refers_to_is_still_kept() -> None:
    """Two messages are sent ahead; "no longer in use" comes with the reply to the first."""
    with two_sides() as (here, there):
        packer = Packer(here.pool)
        record = view_record({"x": big(1)})
        for _ in range(2):
            here.channel.send(packer.pack(record))
        del packer
        first = there.receive()
        del first
        there.send("done, and nobody here looks at it")
        kept = there.receive()
        assert here.receive() == "done, and nobody here looks at it"
        here.send(view_record({"x": big(2)}))  # must not go where the second one is read
        assert there.receive()["x"].numpy()[0] == 2
        assert kept["x"].numpy()[0] == 1
        del kept
        there.send("now")
        assert here.receive() == "now"
        size = here.pool.num_bytes
        here.send(view_record({"x": big(3)}))
        assert here.pool.num_bytes == size  # and now it is used again


def test_what_cannot_be_taken_in_breaks_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(connection: object) -> int:
        raise RuntimeError("received 0 items of ancdata")

    with two_sides() as (here, there):
        here.send(view_record({"x": big()}))
        monkeypatch.setattr("flower_blsgd.runtime.channel.recv_handle", fail)
        with pytest.raises(OSError, match="out of step"):
            there.receive()


def test_a_refusal_leaves_a_pool_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, what: str) -> None:
        raise UsageError("no memory")

    pool = Pool()
    pool.place([big()])  # free at once
    with monkeypatch.context() as patch:
        patch.setattr("flower_blsgd.runtime.shared_pool.require_bytes", refuse)
        with pytest.raises(UsageError):
            pool.place([np.zeros(10 << 20, np.uint8)])
    assert pool.found([big()]) is None
    assert pool.place([big(7)]).block.size == big().nbytes


@needs_proc
def test_blocks_of_a_model_that_is_sent_no_more_are_unmapped_on_both_sides() -> None:
    def model(megabytes: int) -> ArrayRecord:
        return view_record({"x": np.zeros(megabytes << 17)})

    def rounds(here: Side, there: Side, megabytes: int) -> None:
        for _ in range(3):
            here.send(model(megabytes))
            there.receive()
            there.send(None)
            here.receive()

    gc.collect()
    maps, files = mapped_sizes(), open_files()
    with two_sides() as (here, there):
        rounds(here, there, 30)
        assert here.pool.num_bytes == 30 << 20
        rounds(here, there, 7)
        gc.collect()
        assert here.pool.num_bytes == 7 << 20
        ours = list(mapped_sizes())
        for size in maps:
            ours.remove(size)
        assert ours == [7 << 20] * 2  # here and there
        rounds(here, there, 30)
        gc.collect()
        assert here.pool.num_bytes == 30 << 20
    del here, there
    gc.collect()
    assert mapped_sizes() == maps
    assert open_files() <= files + 2  # the pytest fixture's own sockets may come and go


def test_a_free_block_is_used_if_it_is_not_much_too_large() -> None:
    pool = Pool()
    pool.place([np.zeros(10 << 20, np.uint8)])
    for size in (10 << 20, 9 << 20, 5 << 20):  # half of it, or less
        assert pool.place([np.zeros(size, np.uint8)]).block.size == 10 << 20
    assert pool.num_bytes == 10 << 20
    assert pool.place([np.zeros(4 << 20, np.uint8)]).block.size == 4 << 20
    assert pool.num_bytes == 4 << 20


def test_the_smallest_block_that_fits_is_taken() -> None:
    pool = Pool()
    both = [pool.place([np.zeros(size, np.uint8)]) for size in (896_000, 300_032)]
    del both
    assert pool.place([np.zeros(200_000, np.uint8)]).block.size == 300_032
    assert pool.place([np.zeros(500_000, np.uint8)]).block.size == 896_000


def test_a_block_that_is_in_use_is_not_given_up() -> None:
    pool = Pool()
    kept = pool.place([big(1)])
    pool.place([np.zeros(20 << 20, np.uint8)])
    assert not kept.block.retired
    pool.place([np.zeros(50 << 20, np.uint8)])
    assert pool.num_bytes == big().nbytes + (50 << 20)


# --- ends -----------------------------------------------------------------------------------


def test_close_frees_what_the_other_end_held() -> None:
    pool = None
    with two_sides() as (here, there):
        pool = here.pool
        here.send(view_record({"x": big(1)}))
        kept = there.receive()
        pool.place([big(2)])
        assert pool.num_bytes == 2 * big().nbytes
    del kept
    both = [pool.place([big(3)]), pool.place([big(4)])]
    assert pool.num_bytes == 2 * big().nbytes
    assert both[0].block is not both[1].block


def test_a_block_that_could_not_be_sent_is_not_lost() -> None:
    """The other process has died: every attempt would else cost a model's memory."""
    with two_sides() as (here, there):
        there.channel.close()
        with pytest.raises(OSError, match="Broken pipe"):
            here.send(view_record({"x": big()}))
        gc.collect()
        assert any(block.in_use for block in here.pool._blocks.values())
    assert not any(block.in_use for block in here.pool._blocks.values())


def test_receive_at_the_end() -> None:
    with two_sides() as (here, there):
        here.channel.close()
        with pytest.raises(EOFError):
            there.channel.receive()


def test_a_content_that_cannot_be_read_does_not_break_the_channel() -> None:
    with two_sides() as (here, there):
        here.send([view_record({"x": big()}), Unreadable()])
        with pytest.raises(ZeroDivisionError):
            there.receive()
        gc.collect()
        there.send(None)
        here.receive()
        for i in range(4):
            exchange(here, there, i)
        assert here.pool.num_bytes <= 2 * big().nbytes


def _fails() -> None:
    raise ZeroDivisionError


class Unreadable:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _fails, ()


@needs_proc
def test_two_hundred_rounds_and_twenty_channels_leak_no_files() -> None:
    def talk(rounds: int) -> None:
        with two_sides() as (here, there):
            for i in range(rounds):
                here.send(view_record({"x": big(i), "y": np.zeros(100 * i)}))
                there.send(there.receive())
                here.receive()

    talk(2)
    gc.collect()
    before, maps = open_files(), mapped_sizes()
    talk(200)
    for _ in range(20):
        talk(2)
    gc.collect()
    assert open_files() == before
    assert mapped_sizes() == maps


# --- memory is short ------------------------------------------------------------------------


def test_not_enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("sharing the model")
    monkeypatch.setattr(memory, "free_bytes", lambda: 30_000)
    gc.collect()
    files = open_files() if Path("/proc/self/fd").is_dir() else 0
    said = r"not enough memory: sharing the model needs 40.0 kB, but only 30.0 kB is free"
    for _ in range(3):
        with pytest.raises(UsageError, match=said):
            Packer(pool).pack(order(a=view_record({"x": big()})))
    assert pool.num_bytes == 0
    assert files in (0, open_files())
    monkeypatch.setattr(memory, "free_bytes", lambda: 40_000)
    Packer(pool).pack(order(a=view_record({"x": big()})))
    assert pool.num_bytes == 40_000


def test_a_free_block_needs_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    pool.place([big()])
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    pool.place([big()])


def test_free_memory_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert Pool().place([big()]).block.size == 40_000


def test_payload_is_small_and_pickled_once_for_all() -> None:
    """An envelope of many arrays is a few hundred bytes more per message, not per array."""
    record = view_record({f"layer{i}.weight": big(i) for i in range(50)})
    packer = Packer(Pool())
    payload = packer.pack(order(a=record)).payload
    assert len(payload) < 10_000
    assert b"layer49.weight" in payload
    pickle.loads(pickle.dumps(payload))
