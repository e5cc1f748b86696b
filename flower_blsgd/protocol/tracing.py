"""What a worker did when, within one round: asked for with its order, sent along with its reply.

It comes from the network, so it is limited in size and checked before anything is made of it.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flwr.app import ConfigRecord, RecordDict

from ..wire import ProtocolError
from .hosting import is_order
from .names import TRACE

TraceLevel = Literal["", "spans", "operators"]
"""What is asked for: nothing, what a worker did when, or each operator of its steps as well."""

GET_READY = "order received: get ready"
START_PROFILER = "start the profiler"
LOAD_MODEL = "load the global model"
STEPS = "steps"
SLOWDOWN = "deliberate slowdown: sleep"
COLLECT = "collect the result"
READ_PROFILER = "read the profiler"
STAGES = (GET_READY, START_PROFILER, LOAD_MODEL, STEPS, SLOWDOWN, COLLECT, READ_PROFILER)
"""All that a worker does of a round; a stage may come more than once."""

MAX_OPERATORS = 50_000
"""Of one worker; what comes after is counted and left out."""

MAX_STEPS = 50_000
MAX_LANES = 64
LONGEST_NAME = 200
_MAX_STAGES = 100
_MAX_SPANS_BYTES = 2 << 20
_MAX_PACKED_BYTES = 4 << 20
_MAX_UNPACKED_BYTES = 8 << 20
_LONGEST_NANOSECONDS = 1 << 62
_SPANS, _OPERATORS = "spans", "operators"


@dataclass(frozen=True)
class Operators:
    """Operators and kernels of one worker's steps.

    Parameters
    ----------
    lanes : sequence of str
        Where they ran: a thread or a stream each.
    names : sequence of str
        The different names.
    events : sequence of (int, int, int, int)
        Lane, name, Unix time of the start and duration, both in nanoseconds.
    left_out : int (default: 0)
        How many more there were.
    """

    lanes: Sequence[str]
    names: Sequence[str]
    events: Sequence[tuple[int, int, int, int]]
    left_out: int = 0

    def pack(self) -> bytes:
        """Return them as bytes."""
        began = min((start for _, _, start, _ in self.events), default=0)
        columns = [list(column) for column in zip(*self.events, strict=True)] or [[], [], [], []]
        columns[2] = [start - began for start in columns[2]]
        told = [list(self.lanes), list(self.names), began, columns, self.left_out]
        return zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> "Operators":
        """Read what `pack` wrote; ProtocolError if it is not such."""
        if len(packed) > _MAX_PACKED_BYTES:
            raise ProtocolError(f"its operators are {len(packed):,} bytes")
        reader = zlib.decompressobj()
        try:
            text = reader.decompress(packed, _MAX_UNPACKED_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"its operators cannot be read: {error}") from None
        if not reader.eof:
            raise ProtocolError("its operators are too many, or not whole")
        lanes, names, began, columns, left_out = _list_of(_json(text), 5)
        _require_names(lanes, MAX_LANES)
        _require_names(names, MAX_OPERATORS)
        _require_numbers([began, left_out])
        columns = _list_of(columns, 4)
        for column in columns:
            _require_numbers(column, MAX_OPERATORS)
        if len({len(column) for column in columns}) != 1:
            raise ProtocolError("the columns of its operators differ in length")
        lane, name, start, duration = columns
        if any(place >= len(lanes) for place in lane) or any(p >= len(names) for p in name):
            raise ProtocolError("its operators name a lane or a name that is not there")
        events = list(zip(lane, name, [began + s for s in start], duration, strict=True))
        return cls(lanes, names, events, left_out)


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker did of one order, by its own clock; all times in nanoseconds of Unix time.

    Parameters
    ----------
    began_ns : int
        When its ClientApp was called.
    stages : sequence of (str, int)
        One after another, each of `STAGES` with its end; it starts where the one before ended.
    step_ends_ns : sequence of int (default: none)
        The end of each local step, where that is known: on a CPU.
    packed_operators : bytes (default: none)
        See `Operators.pack`.
    note : str (default: "")
        Why there are no operators although they were asked for.
    """

    began_ns: int
    stages: Sequence[tuple[str, int]]
    step_ends_ns: Sequence[int] = ()
    packed_operators: bytes = b""
    note: str = ""

    @property
    def ended_ns(self) -> int:
        """The end of the last stage."""
        return self.stages[-1][1] if self.stages else self.began_ns

    def operators(self) -> Operators | None:
        """Return the operators, if there are any; ProtocolError if they cannot be read."""
        return Operators.unpack(self.packed_operators) if self.packed_operators else None

    def to_record(self) -> ConfigRecord:
        """Return the record that goes with the reply."""
        stages = [[STAGES.index(name), end] for name, end in self.stages]
        steps = list(self.step_ends_ns[:MAX_STEPS])
        spans = json.dumps([self.began_ns, stages, steps, self.note[:LONGEST_NAME]])
        record = ConfigRecord({_SPANS: spans.encode()})
        if self.packed_operators:
            record[_OPERATORS] = self.packed_operators
        return record

    @classmethod
    def from_content(cls, content: RecordDict) -> "WorkerTrace | None":
        """Read the trace in a worker's reply; None if there is none.

        Raises
        ------
        ProtocolError
            If it is too large, or not what `to_record` makes.
        """
        record = content.config_records.get(TRACE)
        if record is None:
            return None
        spans, packed = record.get(_SPANS), record.get(_OPERATORS, b"")
        if not isinstance(spans, bytes) or not isinstance(packed, bytes):
            raise ProtocolError("its trace holds no bytes")
        if len(spans) > _MAX_SPANS_BYTES:
            raise ProtocolError(f"its trace is {len(spans):,} bytes")
        began, stages, steps, note = _list_of(_json(spans), 4)
        if not isinstance(stages, list) or not 0 < len(stages) <= _MAX_STAGES:
            raise ProtocolError("its trace has no stages, or too many")
        pairs = [_list_of(stage, 2) for stage in stages]
        _require_numbers([place for place, _ in pairs])
        if any(place >= len(STAGES) for place, _ in pairs):
            raise ProtocolError("its trace has a stage that is not known")
        _require_ascending([began, *(end for _, end in pairs)])
        _require_numbers(steps, MAX_STEPS)
        _require_ascending([began, *steps])
        if not isinstance(note, str) or len(note) > LONGEST_NAME:
            raise ProtocolError("the note of its trace is no short text")
        return cls(began, [(STAGES[place], end) for place, end in pairs], steps, packed, note)


def ask_for_trace(content: RecordDict, config_key: str, level: TraceLevel) -> None:
    """Ask the worker whose order this is, or all behind that node, for a trace."""
    for name, record in content.items():
        if isinstance(record, ConfigRecord) and (name == config_key or is_order(name)):
            record[TRACE] = level


def asked_level(config: ConfigRecord | None) -> TraceLevel:
    """Return what an order asks for."""
    asked = None if config is None else config.get(TRACE)
    if asked == "operators":
        return "operators"
    return "spans" if asked == "spans" else ""


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("its trace cannot be read") from None


def _list_of(value: Any, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ProtocolError("its trace is not made as it must be")
    return value


def _require_numbers(values: Any, longest: int = MAX_STEPS) -> None:
    if not isinstance(values, list) or len(values) > longest:
        raise ProtocolError("its trace is too long, or holds no list where one must be")
    if not all(type(value) is int and 0 <= value < _LONGEST_NANOSECONDS for value in values):
        raise ProtocolError("its trace holds something that is no time")


def _require_ascending(values: list[Any]) -> None:
    _require_numbers(values, MAX_STEPS + 1)
    if values != sorted(values):
        raise ProtocolError("its trace goes back in time")


def _require_names(values: Any, longest: int) -> None:
    if not isinstance(values, list) or len(values) > longest:
        raise ProtocolError("its trace holds too many names, or none")
    if not all(isinstance(value, str) and len(value) <= LONGEST_NAME for value in values):
        raise ProtocolError("its trace holds a name that is no short text")
