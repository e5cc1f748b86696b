"""Hold out a share of the training data, so that settings are not chosen on the test set."""

import hashlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..algorithm.randomness import generator
from ..errors import UsageError
from ..worker.batches import IndexedSamples, Samples
from .task import Task


def with_validation(task: Task, share: float, seed: int) -> Task:
    """Return the task that trains on a part of the training data and tests on the rest of it.

    Nothing is copied: both parts are lists of indices into `task.train`.

    Parameters
    ----------
    task : Task
        The whole task; its test data is not looked at.
    share : float
        Which share of the training samples becomes the test data, in (0, 1).
    seed : int
        Which ones: a pure function of it.

    Returns
    -------
    Task
        Its fingerprint is another one for another share or seed.

    Raises
    ------
    UsageError
        If one side would be empty.
    """
    if not 0 < share < 1:
        raise UsageError(f"validation-share = {share} must be above 0 and below 1")
    count = task.num_train
    held_out = int(np.floor(share * count + 0.5))
    if not 0 < held_out < count:
        raise UsageError(
            f"validation-share = {share} of {count} training samples leaves "
            f"{held_out} for validation and {count - held_out} for training; both need one"
        )
    order = generator(seed, "validation-share").permutation(count)
    identity = f"{task.fingerprint()} {share!r} {seed}"
    return replace(
        task,
        train=_chosen(task.train, order[held_out:]),
        test=_chosen(task.train, order[:held_out]),
        data_fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def _chosen(samples: Samples, indices: npt.NDArray[np.int64]) -> IndexedSamples:
    indices = np.sort(indices)  # neighbours stay neighbours in a memory map
    if isinstance(samples, IndexedSamples):
        return IndexedSamples(samples.samples, samples.indices[indices])
    return IndexedSamples(samples, indices)
