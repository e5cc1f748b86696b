"""Lists of samples: the hardest and a random rest, or one permutation after another."""

import numpy as np
import numpy.typing as npt

from .block_draws import Int64Array, blocks, share_out, shuffle_into
from .loss_table import FloatArray, IntArray, highest_losses
from .randomness import generator

BoolArray = npt.NDArray[np.bool_]


def draw_samples(
    losses: FloatArray, count: int, high_loss_ratio: float, rng: np.random.Generator
) -> IntArray:
    """Draw `count` samples, a share of them those with the highest loss.

    Where `count` exceeds N, the result is all N samples shuffled, followed by a list of the
    excess that the same rule chose: no index comes twice within one such list. Beside the result
    it needs a byte per sample.

    Parameters
    ----------
    losses : numpy.ndarray
        float32 of shape (N,); infinity for a sample that was never seen.
    count : int
        How many to draw, >= 0.
    high_loss_ratio : float
        Share, in [0, 1], chosen by loss; the rest is uniform among the others.
    rng : numpy.random.Generator
        Source of the draw.

    Returns
    -------
    numpy.ndarray
        int32 of shape (count,), each list of it shuffled.
    """
    drawn = np.empty(count, np.int32)
    for start in range(0, count, len(losses)):
        _fill_list(drawn[start : start + len(losses)], losses, high_loss_ratio, rng)
    return drawn


def _fill_list(
    out: IntArray, losses: FloatArray, high_loss_ratio: float, rng: np.random.Generator
) -> None:
    if len(out) == len(losses):
        shuffle_all_into(out, rng)
        return
    num_high = int(high_loss_ratio * len(out) + 0.5)
    high = highest_losses(losses, num_high, rng)
    parts = blocks(len(losses))
    high_counts = count_marked(high)
    other_counts = np.array([part.stop - part.start for part in parts]) - high_counts
    rest_counts = share_out(other_counts, len(out) - num_high, rng)

    sizes = high_counts + rest_counts
    memory = np.empty(sizes.max(), np.int64)

    def piece(part: slice, num_high: int, size: int) -> Int64Array:
        chosen = memory[:size]
        chosen[:num_high] = np.flatnonzero(high[part])
        others = np.flatnonzero(~high[part])
        chosen[num_high:] = rng.choice(others, size - num_high, replace=False, shuffle=False)
        chosen += part.start
        return chosen

    shuffle_into(out, map(piece, parts, high_counts.tolist(), sizes.tolist()), sizes, rng)


def shuffle_all_into(out: IntArray, rng: np.random.Generator) -> None:
    """Fill `out` with the indices of all samples, shuffled."""
    parts = blocks(len(out))
    sizes = np.array([part.stop - part.start for part in parts])
    shuffle_into(out, (np.arange(part.start, part.stop) for part in parts), sizes, rng)


def shuffled_marked(marked: BoolArray, rng: np.random.Generator) -> IntArray:
    """Return the indices of the samples that are marked, int32, shuffled."""
    sizes = count_marked(marked)
    out = np.empty(sizes.sum(), np.int32)
    pieces = (np.flatnonzero(marked[part]) + part.start for part in blocks(len(marked)))
    shuffle_into(out, pieces, sizes, rng)
    return out


def count_marked(marked: BoolArray) -> Int64Array:
    """Return how many samples of each block are marked."""
    return np.array([np.count_nonzero(marked[part]) for part in blocks(len(marked))])


def mark(marked: BoolArray, indices: IntArray) -> None:
    """Mark these samples. Numpy would turn all indices into 8 bytes at once."""
    for part in blocks(len(indices)):
        marked[indices[part]] = True


def permutation_stream(seed: int, num_samples: int, start: int, count: int) -> IntArray:
    """Return places [start, start + count) of the endless stream of permutations of N samples."""
    out = np.empty(count, np.int32)
    permutation = np.empty(num_samples, np.int32)
    filled = 0
    while filled < count:
        number, offset = divmod(start + filled, num_samples)
        shuffle_all_into(permutation, generator(seed, "permutation", number))
        piece = permutation[offset : offset + count - filled]
        out[filled : filled + len(piece)] = piece
        filled += len(piece)
    return out
