"""The trace of a worker on the wire: it comes from the network, so it is checked."""

import json
import zlib
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from flower_blsgd.protocol import TRACE, HostOrders, Operators, ProtocolError, WorkerTrace, tracing
from flower_blsgd.protocol.tracing import COLLECT, LOAD_MODEL, STEPS, ask_for_trace, asked_level

TRACE_OF_TWO_STEPS = WorkerTrace(
    1_000, [(LOAD_MODEL, 1_010), (STEPS, 1_050), (COLLECT, 1_055)], [1_030, 1_050], note="a note"
)
OPERATORS = Operators(
    ["operators", "device 0, stream 7"],
    ["aten::mm", "gemm"],
    [(0, 0, 1_700_000_000_000_000_001, 5), (1, 1, 1_700_000_000_000_000_009, 0)],
    3,
)


def content(trace: WorkerTrace = TRACE_OF_TWO_STEPS) -> RecordDict:
    return RecordDict({TRACE: trace.to_record()})


def test_trace_comes_back_as_it_was() -> None:
    assert WorkerTrace.from_content(content()) == TRACE_OF_TWO_STEPS
    assert TRACE_OF_TWO_STEPS.ended_ns == 1_055
    assert TRACE_OF_TWO_STEPS.operators() is None
    assert WorkerTrace.from_content(RecordDict()) is None


def test_operators_come_back_to_the_nanosecond() -> None:
    trace = WorkerTrace(1, [(STEPS, 2)], packed_operators=OPERATORS.pack())
    back = WorkerTrace.from_content(content(trace))
    assert back is not None
    assert back.operators() == OPERATORS
    nothing = Operators(["operators"], [], [])
    assert Operators.unpack(nothing.pack()) == nothing


def spans_of(value: Any) -> RecordDict:
    return RecordDict({TRACE: ConfigRecord({"spans": json.dumps(value).encode()})})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1, [[3, 2]], []], "not made"),
        ([1, {}, [], ""], "stages"),
        ([1, [], [], ""], "stages"),
        ([1, [[3, 2]] * 101, [], ""], "too many"),
        ([1, [[3]], [], ""], "not made"),
        ([1, [[99, 2]], [], ""], "not known"),
        ([1, [[-1, 2]], [], ""], "no time"),
        ([1, [[3, 2.5]], [], ""], "no time"),
        ([1, [[3, True]], [], ""], "no time"),
        ([1, [[3, 1 << 62]], [], ""], "no time"),
        ([5, [[3, 4]], [], ""], "back in time"),
        ([1, [[3, 9], [4, 8]], [], ""], "back in time"),
        ([1, [[3, 9]], [4, 3], ""], "back in time"),
        ([1, [[3, 9]], [2] * 50_001, ""], "too long"),
        ([1, [[3, 9]], "steps", ""], "no list"),
        ([1, [[3, 9]], [], "x" * 201], "no short text"),
        ([1, [[3, 9]], [], None], "no short text"),
    ],
)
def test_trace_that_is_not_what_it_must_be_is_refused(value: Any, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        WorkerTrace.from_content(spans_of(value))


@pytest.mark.parametrize(
    "spans", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5_000, b" " * ((2 << 20) + 1)]
)
def test_trace_that_is_no_json_or_too_large_is_refused(spans: bytes) -> None:
    with pytest.raises(ProtocolError):
        WorkerTrace.from_content(RecordDict({TRACE: ConfigRecord({"spans": spans})}))


def test_trace_that_holds_no_bytes_is_refused() -> None:
    for record in ({"spans": "[]"}, {}, {"spans": b"[]", "operators": 3}):
        with pytest.raises(ProtocolError, match="no bytes"):
            WorkerTrace.from_content(RecordDict({TRACE: ConfigRecord(record)}))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (["operators"], "not made"),
        ([[1], [], 0, [[], [], [], []], 0], "short text"),
        ([["x" * 201], [], 0, [[], [], [], []], 0], "short text"),
        ([["a"] * 65, [], 0, [[], [], [], []], 0], "too many names"),
        ([["a"], ["b"], 0, [[0], [0], [1]], 0], "not made"),
        ([["a"], ["b"], 0, [[0], [0], [1], [1, 2]], 0], "differ"),
        ([["a"], ["b"], 0, [[1], [0], [1], [1]], 0], "not there"),
        ([["a"], ["b"], 0, [[0], [1], [1], [1]], 0], "not there"),
        ([["a"], ["b"], 0, [[0], [0], [1], [-1]], 0], "no time"),
        ([["a"], ["b"], "0", [[0], [0], [1], [1]], 0], "no time"),
    ],
)
def test_operators_that_are_not_what_they_must_be_are_refused(value: Any, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        Operators.unpack(zlib.compress(json.dumps(value).encode()))


def test_operators_that_would_fill_the_memory_are_refused() -> None:
    bomb = zlib.compress(b"[" + b"1," * (8 << 20) + b"1]")
    assert len(bomb) < 1 << 20
    with pytest.raises(ProtocolError, match="too many"):
        Operators.unpack(bomb)
    with pytest.raises(ProtocolError, match="bytes"):
        Operators.unpack(b"x" * ((4 << 20) + 1))
    with pytest.raises(ProtocolError, match="cannot be read"):
        Operators.unpack(b"no zlib")
    with pytest.raises(ProtocolError, match="not whole"):
        Operators.unpack(OPERATORS.pack()[:-5])


def test_the_largest_trace_that_is_sent_is_taken() -> None:
    names = [f"{number:0190}" for number in range(2_000)]
    events = [
        (n % tracing.MAX_LANES, n % 2_000, 10**18 + n * 10**6, n)
        for n in range(tracing.MAX_OPERATORS)
    ]
    lanes = [str(lane) for lane in range(tracing.MAX_LANES)]
    operators = Operators(lanes, names, events)
    assert Operators.unpack(operators.pack()) == operators
    ends = [10**18 + n for n in range(tracing.MAX_STEPS)]
    steps = WorkerTrace(10**18, [(STEPS, ends[-1])], ends)
    assert WorkerTrace.from_content(content(steps)) == steps


# --- asking


def test_order_of_a_worker_is_marked_and_nothing_else_in_its_message() -> None:
    order, other = ConfigRecord({"local-steps": 4}), ConfigRecord()
    ask_for_trace(RecordDict({"config": order, "other": other}), "config", "spans")
    assert asked_level(order) == "spans"
    assert asked_level(other) == asked_level(None) == ""
    assert asked_level(ConfigRecord({TRACE: "everything"})) == ""


def test_orders_behind_a_node_with_several_devices_are_all_marked() -> None:
    orders = {place: RecordDict({"config": ConfigRecord({"place": place})}) for place in (0, 12)}
    records = HostOrders(orders).to_records()
    ask_for_trace(records, "config", "operators")
    marked = {name for name, r in records.config_records.items() if asked_level(r) == "operators"}
    assert marked == {"order-0", "order-12"}
