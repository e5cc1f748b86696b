"""``x + sum_i s_i (x_i - x)`` for whole models: every tensor by the rule of its dtype."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .fast_sum import maximum_into, sum_into
from .pieces import AnyArray


def move(
    first: Mapping[str, AnyArray],
    others: Sequence[Mapping[str, AnyArray]],
    scales: Sequence[float],
    out: Mapping[str, AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Return ``x + sum_i s_i (x_i - x)`` of floating tensors, and the maximum of all others.

    Parameters
    ----------
    first : mapping
        x by name.
    others : sequence of mapping
        x_i by name, at least the same names, with the same shapes and dtypes.
    scales : sequence of float
        s_i > 0.
    out : mapping, optional
        Tensors that the result is written to; new ones by default.

    Raises
    ------
    ValueError
        If a tensor's shapes or dtypes differ, also from those of `out`.
    TypeError
        If `out` holds something that is no array.
    """
    names = list(first)
    models = [_tensors(model, names) for model in (first, *others)]
    if out is None:
        moved = [np.empty(tensor.shape, tensor.dtype) for tensor in models[0]]
    else:
        moved = [out[name] for name in names]
        for name, tensor in zip(names, moved, strict=True):
            if not isinstance(tensor, np.ndarray):  # a numpy scalar would be written to in vain
                raise TypeError(f"tensor {name!r} is a {type(tensor).__name__}, not an array")
    _require_alike(names, [*models, moved])
    places: dict[np.dtype[Any], list[int]] = {}
    for place, tensor in enumerate(models[0]):
        places.setdefault(tensor.dtype, []).append(place)
    for dtype, chosen in places.items():
        flat_out, *flat = (_flat(tensors, chosen, dtype) for tensors in (moved, *models))
        if dtype.kind in "fc":
            sum_into(flat_out, flat, scales)
        else:
            maximum_into(flat_out, flat)
        for place, result in zip(chosen, flat_out, strict=True):
            if not moved[place].flags.c_contiguous:  # what was written to is a copy
                moved[place][...] = result.view(dtype).reshape(moved[place].shape)
    return dict(zip(names, moved, strict=True))


def _tensors(model: Mapping[str, AnyArray], names: Sequence[str]) -> list[AnyArray]:
    return list(map(model.__getitem__, names))


def _flat(
    tensors: Sequence[AnyArray], chosen: Sequence[int], dtype: np.dtype[Any]
) -> list[AnyArray]:
    """Return the elements of each in one run, a copy only if they are not; complex ones as two."""
    if dtype.kind == "c":
        return [tensors[place].ravel().view(tensors[place].real.dtype) for place in chosen]
    return [tensors[place].ravel() for place in chosen]


def _require_alike(names: Sequence[str], models: Sequence[Sequence[AnyArray]]) -> None:
    shapes, *other_shapes = ([tensor.shape for tensor in tensors] for tensors in models)
    dtypes, *other_dtypes = ([tensor.dtype for tensor in tensors] for tensors in models)
    for what, kinds, others in (("shapes", shapes, other_shapes), ("dtypes", dtypes, other_dtypes)):
        for other in others:
            if other != kinds:
                place = next(i for i, kind in enumerate(kinds) if kind != other[i])
                raise ValueError(
                    f"tensor {names[place]!r} has {what} {kinds[place]} and {other[place]}"
                )
