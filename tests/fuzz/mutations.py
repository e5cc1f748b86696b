"""Messages and files as a broken or hostile program would send and write them."""

import contextlib
import functools
import io
import json
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import settings
from hypothesis import strategies as st

from ..in_process_grid import over_the_wire

_Test = TypeVar("_Test", bound=Callable[..., Any])


_EXAMPLES = 1000 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 10


def thoroughly(times: int) -> Callable[[_Test], _Test]:
    """Draw more examples than of properties of our own: `make fuzz` so many thousands."""
    return settings(max_examples=times * _EXAMPLES)  # type: ignore[return-value]


HUGE = (2**31, 2**32 + 1, 2**63 - 1, -(2**63), 10**400)
NAMES = st.sampled_from(
    [
        *("", "x", "model", "arrays", "config", "metrics", "losses", "momentum", "sums", "profile"),
        *("0/arrays", "1/arrays", "0/order", "1/order", "00/order", "0/failure", "1/metrics"),
        *("0/profile", "1/profile", "0/losses", "host", "9" * 5000 + "/x", "²/order", "-1/order"),
    ]
)
SCALARS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from(HUGE),
    st.sampled_from([np.nan, np.inf, -np.inf, -0.0, -1.0, 0.5, 1e308, 5e-324]),
    st.floats(),
    st.booleans(),
    st.text(max_size=6),
    st.sampled_from(
        ["fast", "slow", "keep", "reset", "average", "load", "equal", "a\nb", "\x1b[2J"]
    ),
    st.binary(max_size=12),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.none()


# --- bytes ------------------------------------------------------------------------------------


@st.composite
def changed_bytes(draw: st.DrawFn, raw: bytes) -> bytes:
    """Cut, lengthen or overwrite some bytes."""
    kind = draw(st.sampled_from(["cut", "longer", "flip", "middle", "other"]))
    place = draw(st.integers(0, max(0, len(raw) - 1)))
    if kind == "cut":
        return raw[:place]
    if kind == "longer":
        return raw + draw(st.binary(min_size=1, max_size=9))
    if kind == "flip":
        return raw[:place] + bytes([draw(st.integers(0, 255))]) + raw[place + 1 :]
    if kind == "middle":
        return raw[:place] + raw[place + draw(st.integers(1, 8)) :]
    return draw(st.binary(max_size=40))


# --- arrays -----------------------------------------------------------------------------------

_ARCHIVE = io.BytesIO()
np.savez(_ARCHIVE, a=np.zeros(3))
_OBJECTS = io.BytesIO()
np.save(_OBJECTS, np.array([{}, None], object), allow_pickle=True)
_GIANT = (
    np.lib.format.magic(1, 0)
    + (
        b"v\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
    )
    + b"\n"
)
_FOREIGN = (_ARCHIVE.getvalue(), _OBJECTS.getvalue(), _GIANT, b"cos\nsystem\n(S'true'\ntR.", b"")

_SHAPES = st.sampled_from([(), (0,), (1,), (2,), (2, 1), (1, 2), (2, 1, 1), (3,)])
_DTYPES = st.sampled_from(["f4", "f8", "f2", "i8", "i4", "u1", "?", "c8", "S3", ">f4", "M8[s]"])


@st.composite
def any_array(draw: st.DrawFn) -> Array:
    """Return an array whose elements, or whose header, may be wrong."""
    tensor = np.ones(draw(_SHAPES), draw(_DTYPES))
    if tensor.dtype.kind == "f" and tensor.size and draw(st.booleans()):
        tensor.flat[-1] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    array = Array(tensor)
    if draw(st.booleans()):
        return array
    data = draw(changed_bytes(array.data) | st.sampled_from(_FOREIGN))
    dtype = draw(st.sampled_from([array.dtype, "float32", "float64", "object", "nonsense", ""]))
    shape = draw(st.just(array.shape) | _SHAPES | st.just((-1,)) | st.just((2**40,)))
    return Array(dtype, shape, draw(st.sampled_from(["numpy.ndarray", "pickle", ""])), data)


# --- records ----------------------------------------------------------------------------------

_EMPTY = (ArrayRecord, ConfigRecord, MetricRecord)


@st.composite
def hostile(draw: st.DrawFn, make: Callable[[], RecordDict], by_wire: bool = False) -> RecordDict:
    """Return what `make` returns with one to three things wrong, or none.

    Values go into the records without Flower's checks, unless they have to come `by_wire`.
    """
    made = make()
    # What is shared between messages stays as it is.
    content = RecordDict({name: record.copy() for name, record in made.items()})
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, 0]))):
        _spoil(draw, content)
    return as_received(content) if by_wire else content


def as_received(content: RecordDict) -> RecordDict:
    """Return a content as Flower's wire brings it, without the values that cannot travel."""
    kept = RecordDict()
    for name, record in content.items():
        kept[name] = type(record)()
        for key, value in record.items():
            one = type(record)()
            with contextlib.suppress(TypeError, ValueError):
                one[key] = value
                sent = Message(RecordDict({"": one}), 1, "train")
                kept[name][key] = over_the_wire(sent).content[""][key]
    return kept


def _spoil(draw: st.DrawFn, content: RecordDict) -> None:
    records = content.__dict__["_data"]
    kind = draw(st.sampled_from(["value"] * 5 + ["array", "remove", "add", "replace", "rename"]))
    if kind == "add" or not records:
        records[draw(NAMES)] = draw(st.sampled_from(_EMPTY))()
        return
    name = draw(st.sampled_from(sorted(records)))
    if kind == "remove":
        del records[name]
    elif kind == "replace":
        records[name] = draw(st.sampled_from(_EMPTY))()
    elif kind == "rename":
        records[draw(NAMES)] = records.pop(name)
    else:
        _spoil_record(draw, records[name])


def _spoil_record(draw: st.DrawFn, record: Any) -> None:
    values = record.__dict__["_data"]
    key = draw(st.sampled_from([*sorted(values), "more"]))
    if isinstance(record, ArrayRecord):
        if draw(st.integers(0, 4)) == 0:
            values.pop(key, None)
        else:
            values[key] = draw(any_array())
    elif key in values and draw(st.integers(0, 4)) == 0:
        del values[key]
    elif isinstance(values.get(key), bytes) and draw(st.booleans()):
        values[key] = draw(changed_bytes(values[key]))
    else:
        values[key] = draw(VALUES)


# --- files ------------------------------------------------------------------------------------


GONE = object()


@st.composite
def changed_json(draw: st.DrawFn, text: str) -> bytes:
    """Return a JSON file with one to three values changed or gone, or with other bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(changed_bytes(text.encode()))
    root = json.loads(text)
    paths = st.sampled_from(list(_paths(root)))
    values = (
        st.just(GONE) | st.none() | SCALARS.filter(_in_json) | st.builds(list) | st.builds(dict)
    )
    for path, value in draw(st.lists(st.tuples(paths, values), min_size=1, max_size=3)):
        with contextlib.suppress(LookupError, TypeError):  # what it was in is changed already
            place = functools.reduce(operator.getitem, path[:-1], root)
            if value is GONE:
                del place[path[-1]]
            else:
                place[path[-1]] = value
    return json.dumps(root).encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*path, key))


def _in_json(value: object) -> bool:
    return not isinstance(value, bytes)
