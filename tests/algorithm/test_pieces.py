import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.pieces import PIECE_BYTES, Piece, cut, scratch

from .teams import QUICK

_LONGEST = PIECE_BYTES // 4  # elements of float32


def test_cut_worked() -> None:
    # float32: a piece has at most 131,072 elements, and below 8,192 a tensor is small
    sizes = (100, 300_000, 0, 200, 8192)
    assert cut(sizes, 4) == (
        Piece((1,), 0, 100_000),
        Piece((1,), 100_000, 200_000),
        Piece((1,), 200_000, 300_000),
        Piece((4,), 0, 8192),
        Piece((0, 3), 0, 300),
    )


def test_cut_makes_more_pieces_for_more_threads() -> None:
    assert len(cut((131_072,), 4)) == 1
    assert len(cut((131_072,), 4, parts=8)) == 8
    assert len(cut((131_072,), 4, parts=1000)) == 16  # none of them small


def test_cut_small_tensors_share_pieces_that_are_full() -> None:
    pieces = cut((8000,) * 40, 4)
    # 16 of them are 128,000 elements; a 17th would be too many
    assert [len(piece.tensors) for piece in pieces] == [16, 16, 8]


@QUICK
@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, 400_000)), max_size=40),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 64),
)
def test_cut_covers_every_element_once(sizes: list[int], itemsize: int, parts: int) -> None:
    covered = [0] * len(sizes)
    for piece in cut(tuple(sizes), itemsize, parts):
        assert 0 < piece.size * itemsize <= PIECE_BYTES
        if len(piece.tensors) == 1:
            (tensor,) = piece.tensors
            assert piece.start == covered[tensor]
            covered[tensor] = piece.stop
        else:
            assert piece.start == 0
            assert piece.stop == sum(sizes[tensor] for tensor in piece.tensors)
            for tensor in piece.tensors:
                assert covered[tensor] == 0
                covered[tensor] = sizes[tensor]
    assert covered == sizes


def test_loaded_is_the_memory_itself_where_it_can_be() -> None:
    flat = [np.arange(10, dtype=np.float32)]
    buffer = np.zeros(10, np.float32)
    loaded = Piece((0,), 2, 5).loaded(flat, buffer)
    assert loaded.tolist() == [2, 3, 4]
    assert np.shares_memory(loaded, flat[0])
    assert not buffer.any()


def test_loaded_is_end_to_end_and_in_the_dtype_of_the_buffer() -> None:
    buffer = np.full(10, 9, np.float32)
    several = Piece((0, 2), 0, 3).loaded([np.ones(2), np.ones(4), np.zeros(1)], buffer)
    assert several.tolist() == [1, 1, 0]
    half = Piece((0,), 1, 3).loaded([np.array([1, 2, 3], np.float16)], buffer)
    assert (half.tolist(), half.dtype) == ([2, 3], np.float32)
    assert np.shares_memory(half, buffer)


def test_store_is_the_way_back() -> None:
    flat = [np.zeros(2, np.float16), np.zeros(3, np.float16), np.zeros(1, np.float16)]
    Piece((0, 2), 0, 3).store(np.array([1.5, 2.5, 3.5], np.float32), flat)
    Piece((1,), 1, 3).store(np.array([4.0, 5.0], np.float32), flat)
    assert [tensor.tolist() for tensor in flat] == [[1.5, 2.5], [0, 4, 5], [3.5]]


def test_scratch_is_used_again_and_never_by_two() -> None:
    with scratch(np.float32) as one, scratch(np.float64) as other:
        assert one.shape == (4, _LONGEST)
        assert other.shape == (4, _LONGEST // 2)
        assert not np.shares_memory(one, other)
        first = {each.__array_interface__["data"][0] for each in (one, other)}
    with scratch(np.int8) as one, scratch(np.int8) as other:
        assert {each.__array_interface__["data"][0] for each in (one, other)} == first


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "g", "i1", "?"])
def test_scratch_holds_a_piece_of_any_dtype(dtype: str) -> None:
    itemsize = np.dtype(dtype).itemsize
    with scratch(dtype) as buffers:
        longest = max(piece.size for piece in cut((1 << 20,), itemsize))
        assert buffers.dtype == dtype
        assert buffers.shape[1] >= longest
