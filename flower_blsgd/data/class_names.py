"""What the classes of images are called, and whether their labels can be meant so."""

import logging
from collections.abc import Sequence

import numpy as np

from ..errors import UsageError
from .image_split import ImageSplit

_log = logging.getLogger(__name__)

_FEW_CLASSES = 1000
_PLACES_PER_CLASS = 10
"""Labels that name no class may leave gaps: so many places for each class that occurs."""

_MOST_SHOWN = 5


def class_names(
    said: str, splits: Sequence[ImageSplit], expected: int | None, instead: str
) -> tuple[str, ...]:
    """Return the name of each class, its number where the data do not name it.

    Parameters
    ----------
    said : str
        The setting that names the data, as messages begin.
    splits : sequence of ImageSplit
        All of them.
    expected : int, optional
        How many classes there must be; None for any number.
    instead : str
        Which they are and what else could be done, for messages.

    Raises
    ------
    UsageError
        If splits name different classes, labels lie beyond the names, or the number is wrong.
    """
    told = {split.class_names for split in splits if split.class_names}
    if len(told) > 1:
        raise UsageError(
            f"{said}: train and test have different classes; both need the same, in the same order"
        )
    names = told.pop() if told else ()
    highest = {split.name: int(split.labels.max()) for split in splits}
    beyond = [(name, label) for name, label in highest.items() if names and label >= len(names)]
    for name, label in beyond:
        raise UsageError(
            f"{said}: {name} has the label {label}, but there are {len(names)} names of classes, "
            "counted from 0; mend the labels or the names"
        )
    count = len(names) or 1 + max(highest.values())
    if expected is not None and count != expected:
        raise UsageError(
            f"{said}: wrong number of classes: found {count}, expected the {expected} of {instead}"
        )
    if not names and expected is None:
        _refuse_gaps(said, splits, count)
    return names or tuple(str(label) for label in range(count))


def tell_of_unused(said: str, name: str, labels: np.ndarray, count: int) -> None:
    """Say which classes no image of a split shows: labels that count from 1 leave one such."""
    unused = np.setdiff1d(np.arange(count), labels).tolist()
    if unused:
        shown = ", ".join(map(str, unused[:_MOST_SHOWN])) + ", ..." * (len(unused) > _MOST_SHOWN)
        _log.warning(
            "%s: no image of %s has the label %s; there are %d classes, and labels count from 0",
            said,
            name,
            shown,
            count,
        )


def _refuse_gaps(said: str, splits: Sequence[ImageSplit], count: int) -> None:
    used = len(np.unique(np.concatenate([np.unique(split.labels) for split in splits])))
    if count > max(_FEW_CLASSES, _PLACES_PER_CLASS * used):
        raise UsageError(
            f"{said}: labels go up to {count - 1}, but only {used} different ones occur; number "
            "the classes from 0 without gaps"
        )
