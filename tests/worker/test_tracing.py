"""What a ClientApp records of an order: only if it is asked to, and without touching the result."""

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict

from flower_blsgd.protocol import TRACE, Operators, TrainOrder, TrainReport, WorkerTrace
from flower_blsgd.protocol.tracing import (
    COLLECT,
    GET_READY,
    LOAD_MODEL,
    READ_PROFILER,
    SLOWDOWN,
    START_PROFILER,
    STEPS,
    TraceLevel,
    ask_for_trace,
)
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.worker import operators as operators_module
from flower_blsgd.worker.gate import gate_of
from flower_blsgd.worker.local_sgd import LocalSGD
from flower_blsgd.worker.operators import OperatorProfiler, operators_in
from flower_blsgd.worker.slowdown import Slowdown
from flower_blsgd.worker.tracing import OrderTrace

CPU = WorkerSpec("cpu")
NUM_SAMPLES, BATCH_SIZE, STEPS_ORDERED = 24, 4, 5


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(6, 3)


def local_sgd(**changes: Any) -> LocalSGD:
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(NUM_SAMPLES, 6, generator=draw), torch.arange(NUM_SAMPLES) % 3
    return LocalSGD(model(), data, **changes)


def order_message(level: TraceLevel = "", steps: int = STEPS_ORDERED) -> Message:
    order = TrainOrder(
        round=1,
        epoch=1,
        local_steps=steps,
        batch_size=BATCH_SIZE,
        learning_rate=0.1,
        seed=5,
        deadline_seconds=0.0,
        momentum_policy="reset",
        indices=(np.arange(steps * BATCH_SIZE) % NUM_SAMPLES).astype(np.int32),
        arrays=ArrayRecord(model().state_dict()),
    )
    records = order.to_records()
    if level:
        ask_for_trace(records, "config", level)
    return Message(records, 7, "train")


def answered(
    level: TraceLevel = "", worker: WorkerSpec = CPU, sgd: LocalSGD | None = None
) -> tuple[Message, TrainReport]:
    message = order_message(level)
    message.metadata.__dict__["_message_id"] = "1"
    trace = OrderTrace(message)
    sgd = sgd or local_sgd(slowdown=worker.slowdown)
    with trace.around_steps(worker):
        report = sgd.run(TrainOrder.from_message(message))
    return trace.reply(report, message), report


def trace_of(reply: Message) -> WorkerTrace:
    trace = WorkerTrace.from_content(reply.content)
    assert trace is not None
    return trace


def spans_of(trace: WorkerTrace) -> dict[str, list[tuple[int, int]]]:
    spans: dict[str, list[tuple[int, int]]] = {}
    start = trace.began_ns
    for name, end in trace.stages:
        spans.setdefault(name, []).append((start, end))
        start = end
    return spans


@pytest.fixture(autouse=True)
def _profiler_is_free_afterwards() -> Iterator[None]:
    yield
    assert operators_module._ONE_AT_A_TIME.acquire(blocking=False)
    operators_module._ONE_AT_A_TIME.release()


def test_nobody_asks_so_nothing_is_recorded() -> None:
    reply, _ = answered()
    assert set(reply.content) == {"arrays", "metrics", "losses"}


def test_model_and_losses_are_the_same_to_the_bit_whatever_is_asked() -> None:
    def result(level: TraceLevel) -> dict[str, bytes]:
        reply, report = answered(level)
        arrays = reply.content.array_records["arrays"]
        model = {name: array.numpy().tobytes() for name, array in arrays.items()}
        return {**model, "losses": report.losses.tobytes()}

    assert result("") == result("spans") == result("operators")


def test_stages_are_those_of_the_order_and_agree_with_its_report() -> None:
    before = time.time_ns()
    reply, report = answered("spans")
    trace = trace_of(reply)
    assert [name for name, _ in trace.stages] == [GET_READY, LOAD_MODEL, STEPS, COLLECT, COLLECT]
    assert before <= trace.began_ns <= trace.ended_ns <= time.time_ns()
    ((started, ended),) = spans_of(trace)[STEPS]
    assert started == pytest.approx(report.started_at * 1e9, abs=1e6)
    assert ended == pytest.approx(report.ended_at * 1e9, abs=1e6)
    assert len(trace.step_ends_ns) == STEPS_ORDERED
    assert all(started < end <= ended + 1_000_000 for end in trace.step_ends_ns)
    assert trace.packed_operators == b""


def test_deliberate_slowdown_is_a_stage_of_its_own_behind_the_last_step() -> None:
    worker = WorkerSpec("cpu", slowdown=8.0)
    sgd = local_sgd()
    sgd.run(TrainOrder.from_message(order_message()))  # what torch does once is not slowed down
    sgd._slowdown = Slowdown(worker.slowdown)
    reply, report = answered("spans", worker, sgd)
    trace = trace_of(reply)
    spans = spans_of(trace)
    ((_, steps_ended),) = spans[STEPS]
    ((sleep_began, sleep_ended),) = spans[SLOWDOWN]
    assert steps_ended == sleep_began == trace.step_ends_ns[-1]
    assert sleep_ended == pytest.approx(report.ended_at * 1e9, abs=1e6)
    assert sleep_ended - sleep_began > 0


def test_steps_of_other_threads_and_before_the_first_one_do_not_count() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([parameter], lr=0.1)
    message = order_message("spans")
    trace = OrderTrace(message)
    sgd = local_sgd()
    with trace.around_steps(CPU):
        other.step()  # as where a compiled model is tried out
        beside = threading.Thread(target=other.step)
        beside.start()
        beside.join()
        report = sgd.run(TrainOrder.from_message(message))
    assert len(trace_of(trace.reply(report, message)).step_ends_ns) == STEPS_ORDERED
    other.step()
    assert len(trace._step_ends_ns) == STEPS_ORDERED + 1, "the hook was not taken away"


def test_on_an_accelerator_the_host_does_not_know_when_a_step_ends() -> None:
    """The steps run on the CPU here; only what is recorded is looked at."""
    message = order_message("spans")
    trace = OrderTrace(message)
    with trace.around_steps(WorkerSpec("cuda:0", slowdown=3.0)):
        report = local_sgd().run(TrainOrder.from_message(message))
    found = trace_of(trace.reply(report, message))
    assert list(found.step_ends_ns) == []
    assert SLOWDOWN not in spans_of(found)


def test_operators_are_those_of_the_steps_on_the_same_clock() -> None:
    trace = trace_of(answered("operators")[0])
    names = [name for name, _ in trace.stages]
    assert names == [GET_READY, START_PROFILER, LOAD_MODEL, STEPS, COLLECT, READ_PROFILER, COLLECT]
    operators = trace.operators()
    assert operators is not None
    assert operators.lanes == ["operators"]
    assert operators.left_out == 0
    ((started, ended),) = spans_of(trace)[STEPS]
    linear = [e for e in operators.events if operators.names[e[1]] == "aten::linear"]
    assert len(linear) == STEPS_ORDERED
    for (_, _, start, duration), step_end in zip(linear, trace.step_ends_ns, strict=True):
        assert started - 2_000_000 <= start <= start + duration <= ended + 2_000_000
        assert start < step_end
    updates = [e for e in operators.events if operators.names[e[1]].startswith("Optimizer.step")]
    ends = [start + duration for _, _, start, duration in updates]
    # The hook is called within the profiled call, so just before its end.
    off = [abs(end - step) for end, step in zip(ends, trace.step_ends_ns, strict=True)]
    assert statistics.median(off) < 2_000_000
    assert trace.note == ""


def test_two_at_once_only_the_first_is_profiled() -> None:
    with operators_module._ONE_AT_A_TIME:
        trace = trace_of(answered("operators")[0])
    assert trace.operators() is None
    assert "another worker" in trace.note
    assert trace_of(answered("operators")[0]).operators() is not None


@pytest.mark.parametrize("when", ["start", "stop"])
def test_profiler_that_fails_costs_the_operators_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUPTI is not there\nand more")

    name = "_started" if when == "start" else "operators_in"
    monkeypatch.setattr(operators_module, name, fail)
    reply, report = answered("operators")
    trace = trace_of(reply)
    assert trace.note == f"no operators: torch's profiler did not {when}: CUPTI is not there"
    assert trace.operators() is None
    assert report.completed_steps == STEPS_ORDERED
    assert len(trace.step_ends_ns) == STEPS_ORDERED


def test_step_that_raises_raises_on_and_the_profiler_is_free_again() -> None:
    trace = OrderTrace(order_message("operators"))
    with pytest.raises(ValueError, match="too hot"), trace.around_steps(CPU):
        raise ValueError("too hot")


def test_clock_that_is_set_back_gives_a_trace_that_can_be_read() -> None:
    message = order_message("spans")
    trace = OrderTrace(message)
    trace._began_ns = trace._ended_ns = trace._ended_ns + 10**9
    with trace.around_steps(CPU):
        report = local_sgd().run(TrainOrder.from_message(message))
    trace._step_ends_ns[2] -= 10_000
    found = trace_of(trace.reply(report, message))
    assert found.ended_ns >= found.began_ns


def test_on_cuda_the_profiler_neither_starts_nor_stops_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopping it waits for the whole device, which a recording does not survive."""
    gate = gate_of(torch.device("cuda:0"))
    seen: list[int] = []

    class StandIn:
        def stop(self) -> None:
            seen.append(gate._computing)

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": [], "baseTimeNanoseconds": 1}')

    def started(device: str) -> StandIn:
        seen.append(gate._computing)
        return StandIn()

    monkeypatch.setattr(operators_module, "_started", started)
    found = OperatorProfiler("cuda:0").stop()
    assert found is not None
    assert found.events == []
    assert seen == [1, 1]
    assert gate._computing == 0


# --- torch's file, with kernels made up by hand


def event(cat: str, name: str, tid: int, ts: str, dur: str, **values: Any) -> dict[str, Any]:
    from decimal import Decimal

    times = {"ts": Decimal(ts), "dur": Decimal(dur)}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, **values}


def kernel(name: str, correlation: int, ts: str) -> dict[str, Any]:
    return event("kernel", name, 7, ts, "2.5", args={"correlation": correlation}) | {"pid": 0}


def launch(tid: int, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return event("cuda_runtime", "cudaLaunchKernel", tid, "3.000", "1.000", args=args)


BASE = 1_790_000_000_000_000_000
OP = event("cpu_op", "aten::mm", 40, "4434685557157.956", "255.781")


def read(*events: dict[str, Any]) -> Operators:
    return operators_in({"traceEvents": events, "baseTimeNanoseconds": BASE}, thread=40)


def test_time_is_exact_where_a_float_is_not() -> None:
    found = read(OP)
    assert found.events == [(0, 0, BASE + 4_434_685_557_157_956, 255_781)]
    assert (found.lanes, found.names) == (["operators"], ["aten::mm"])


def test_kernels_have_a_lane_per_stream_and_threads_one_each() -> None:
    backward = event("cpu_op", "MmBackward0", 41, "2.000", "1.000")
    found = read(OP, backward, launch(40, 5), kernel("gemm", 5, "9.000"))
    told = [(found.lanes[lane], found.names[name]) for lane, name, _, _ in found.events]
    assert told == [
        ("operators, thread 41", "MmBackward0"),
        ("operators", "cudaLaunchKernel"),
        ("device 0, stream 7", "gemm"),
        ("operators", "aten::mm"),
    ]


def test_kernels_of_a_worker_beside_this_one_are_left_out() -> None:
    events = (OP, launch(40, 5), launch(99, 6), kernel("ours", 5, "1"), kernel("theirs", 6, "2"))
    assert {"cudaLaunchKernel", "ours", "aten::mm"} == set(read(*events).names)
    # Where calls cannot be told apart by their thread, a kernel too many is better than none.
    assert {"ours", "theirs"} <= set(read(OP, launch(99, 5), *events[3:]).names)


def test_marks_and_what_the_profiler_says_of_itself_are_left_out() -> None:
    found = read(
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0},
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1, "pid": 1, "tid": 40},
        event("Trace", "PyTorch Profiler (0)", 0, "0", "9"),
    )
    assert (found.names, found.events) == ([], [])


def test_more_operators_than_are_sent_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_module, "MAX_OPERATORS", 2)
    found = read(*(event("cpu_op", f"op {n}", 40, f"{9 - n}.000", "1.000") for n in range(5)))
    assert found.names == ["op 4", "op 3"]
    assert found.left_out == 3


def test_reply_record_is_the_only_one_more() -> None:
    assert set(answered("operators")[0].content) == {"arrays", "metrics", "losses", TRACE}
    assert isinstance(answered("spans")[0].content, RecordDict)
