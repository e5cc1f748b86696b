"""Uniform draws and shuffles of very many samples, block by block.

Numpy's own shuffle swaps each element with any other: beyond the processor's cache it waits for
memory at every swap, and its own draw without replacement makes an 8-byte index of everything.
Here the random accesses stay within a block that fits the cache, and what goes from block to
block goes in order. The law is the same: every order, or every subset, is as likely (as far as
numpy's binomial draws are, which count in float64). Where one block holds everything, these are
numpy's own draws, bit for bit.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

BLOCK_SAMPLES = 2**17
"""Samples of a block: their indices, 1 MiB as int64, fit the cache of a core."""


def blocks(length: int) -> list[slice]:
    """Cut [0, length) into blocks."""
    starts = range(0, length, BLOCK_SAMPLES)
    return [slice(start, min(start + BLOCK_SAMPLES, length)) for start in starts]


def share_out(sizes: Int64Array, count: int, rng: np.random.Generator) -> Int64Array:
    """Draw how many samples each block gives if `count` are drawn from all, without replacement.

    Multivariate hypergeometric, as numpy's own, which refuses a sum of 10^9.

    Parameters
    ----------
    sizes : numpy.ndarray
        int64; samples that each block holds.
    count : int
        In [0, sum of the sizes].
    rng : numpy.random.Generator
        Source of the draw.

    Returns
    -------
    numpy.ndarray
        int64 of the same shape; sums to `count`.
    """
    if len(sizes) == 1:
        return np.array([count], np.int64)
    drawn = rng.binomial(sizes, count / max(1, sizes.sum()))
    missing = count - int(drawn.sum())
    # Given their sum, independent binomials are hypergeometric, whatever their probability. So
    # what is missing is drawn from those left, or what is too much from those drawn.
    changed_from = sizes - drawn if missing > 0 else drawn
    places = rng.choice(int(changed_from.sum()), abs(missing), replace=False, shuffle=False)
    of_block = np.searchsorted(np.cumsum(changed_from), places, side="right")
    change = np.bincount(of_block, minlength=len(sizes))
    return drawn + change if missing > 0 else drawn - change


def shuffle_into(
    out: npt.NDArray[np.int32],
    pieces: Iterable[Int64Array],
    sizes: Int64Array,
    rng: np.random.Generator,
) -> None:
    """Fill `out` with the elements of all pieces in random order.

    Each element is dealt to a bucket drawn for it, and each bucket is shuffled (Rao 1961,
    Sandelius 1962). Only how many elements of a piece go to each bucket is drawn; which ones,
    the shuffle of the piece decides.

    Parameters
    ----------
    out : numpy.ndarray
        int32; as long as all pieces together.
    pieces : iterable of numpy.ndarray
        int64; each is read, and shuffled in place, before the next one is asked for.
    sizes : numpy.ndarray
        int64; their lengths.
    rng : numpy.random.Generator
        Source of the order.
    """
    num_buckets = max(1, len(blocks(len(out))))
    dealt = rng.multinomial(sizes, np.full(num_buckets, 1 / num_buckets))
    bucket_ends = np.cumsum(dealt.sum(axis=0)).tolist()
    bucket_starts = [0, *bucket_ends[:-1]]
    filled = bucket_starts.copy()
    for piece, counts in zip(pieces, dealt, strict=True):
        if num_buckets > 1:
            rng.shuffle(piece)
        start = 0
        for bucket, stop in enumerate(np.cumsum(counts).tolist()):
            end = filled[bucket] + stop - start
            out[filled[bucket] : end] = piece[start:stop]
            filled[bucket], start = end, stop
    memory = np.empty(dealt.sum(axis=0).max(), np.int64)  # numpy swaps 8 bytes faster than 4
    for begin, end in zip(bucket_starts, bucket_ends, strict=True):
        in_bucket = memory[: end - begin]
        in_bucket[:] = out[begin:end]
        rng.shuffle(in_bucket)
        out[begin:end] = in_bucket
