"""Who is asked for a trace, and what becomes of traces that are missing or wrong."""

from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.protocol import TRACE, WorkerTrace
from flower_blsgd.protocol.tracing import STAGES, STEPS, TraceLevel, asked_level
from flower_blsgd.results.epoch_trace import EpochTrace
from flower_blsgd.traced_strategy import TracedLocalSGD

from .host.host_nodes import HostNode
from .in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    same_bits,
    slow_profile,
    toy_arrays,
)
from .log_capture import captured_log

# (4 + 1) x 4 = 20 samples a round, so an epoch of 60 samples has three rounds.
SETTINGS: dict[str, Any] = {
    "num_samples": 60,
    "batch_size": 4,
    "local_steps": 4,
    "local_steps_slow": 1,
}


class TracingWorker(ToyWorker):
    """Sends this record as its trace if it is asked for one; None for a ClientApp of others."""

    def __init__(self, *arguments: Any, sends: ConfigRecord | None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sends = sends
        self.asked: list[TraceLevel] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        reply = super().__call__(message, node_id)
        if message.metadata.message_type == "train":
            level = asked_level(message.content.config_records["config"])
            self.asked.append(level)
            if level and self.sends is not None:
                reply.content[TRACE] = self.sends
        return reply


GOOD = WorkerTrace(1_000, [(STEPS, 2_000)], [1_500, 2_000]).to_record()


def workers(fast: ConfigRecord | None = GOOD, slow: ConfigRecord | None = GOOD) -> dict[int, Any]:
    return {
        50: TracingWorker(fast_profile(), value=1.0, sends=fast),
        51: TracingWorker(slow_profile(), value=2.0, sends=slow),
    }


def traced(epoch: int, **changes: Any) -> TracedLocalSGD:
    strategy = TracedLocalSGD(**(SETTINGS | changes))
    strategy.trace = EpochTrace(epoch)
    return strategy


def test_only_the_rounds_of_that_epoch_are_traced_and_operators_only_in_the_first() -> None:
    nodes = workers()
    traced(2).fit(InProcessGrid(nodes), toy_arrays(), epochs=3)
    expected = ["", "", "", "operators", "spans", "spans", "", "", ""]
    assert nodes[50].asked == nodes[51].asked == expected


def test_model_is_the_same_to_the_bit_and_so_are_all_other_settings_of_the_orders() -> None:
    def run(strategy: BiasedLocalSGD) -> tuple[Any, list[dict[str, Any]]]:
        grid = InProcessGrid(workers())
        result = strategy.fit(grid, toy_arrays(), epochs=2)
        configs = [m.content.config_records["config"] for m in grid.sent_of_type("train")]
        return result.arrays, [{k: v for k, v in c.items() if k != TRACE} for c in configs]

    plain, plain_orders = run(BiasedLocalSGD(**SETTINGS))
    other, orders = run(traced(1))
    assert same_bits(plain, other)
    assert plain_orders == orders


def kept(strategy: TracedLocalSGD, nodes: dict[int, Any]) -> list[set[int]]:
    """Return whose traces there are in each round of the traced epoch."""
    on_round = strategy.trace.on_round(lambda record: None)
    strategy.fit(InProcessGrid(nodes), toy_arrays(), epochs=1, on_round=on_round)
    return [set(each.traces) for each in strategy.trace._rounds]


def test_traces_are_kept_by_worker() -> None:
    assert kept(traced(1), workers()) == [{0, 1}] * 3


WRONG = {
    "no trace": None,
    "no bytes": ConfigRecord({"spans": "text"}),
    "no json": ConfigRecord({"spans": b"\x80\x04pickle"}),
    "wrong operators": ConfigRecord({**GOOD, "operators": b"no zlib"}),
    "backwards": ConfigRecord({"spans": b'[9, [[0, 3]], [], ""]'}),
    "unknown stage": ConfigRecord({"spans": b'[1, [[%d, 3]], [], ""]' % len(STAGES)}),
}


@pytest.mark.parametrize("sends", WRONG.values(), ids=WRONG)
def test_trace_that_cannot_be_read_costs_one_warning_and_not_the_round(
    sends: ConfigRecord | None,
) -> None:
    strategy = traced(1)
    nodes = workers(slow=sends)
    with captured_log() as log:
        assert kept(strategy, nodes) == [{0}] * 3
    (told,) = log.warnings
    assert told.startswith("no trace of slow-1 (cpu:1) in round 1: ")
    plain = BiasedLocalSGD(**SETTINGS)
    expected = plain.fit(InProcessGrid(workers()), toy_arrays(), epochs=1)
    again = traced(1).fit(InProcessGrid(workers(slow=sends)), toy_arrays(), epochs=1)
    assert same_bits(expected.arrays, again.arrays)


def test_note_of_a_worker_is_told() -> None:
    noted = WorkerTrace(1_000, [(STEPS, 2_000)], note="no operators: busy").to_record()
    with captured_log() as log:
        kept(traced(1), workers(fast=noted))
    assert "trace of fast-0 (cpu:0): no operators: busy" in log.warnings


def test_worker_that_failed_is_told_of_once_and_not_as_a_missing_trace() -> None:
    strategy = traced(1)
    grid = InProcessGrid(workers())
    grid.fail_at(1, 2, "dies")
    on_round = strategy.trace.on_round(lambda record: None)
    with captured_log() as log:
        strategy.fit(grid, toy_arrays(), epochs=1, on_round=on_round)
    assert [set(each.traces) for each in strategy.trace._rounds] == [{0, 1}, {0}, {0, 1}]
    assert not [line for line in log.warnings if "trace" in line]


def test_workers_behind_one_node_send_a_trace_each() -> None:
    behind = workers(slow=None)
    node = HostNode(behind[50], behind[51])
    strategy = traced(1, min_available_nodes=1, min_train_nodes=1, min_evaluate_nodes=1)
    on_round = strategy.trace.on_round(lambda record: None)
    with captured_log() as log:
        strategy.fit(InProcessGrid({7: node}), toy_arrays(), epochs=1, on_round=on_round)
    assert behind[50].asked == behind[51].asked == ["operators", "spans", "spans"]
    assert [set(each.traces) for each in strategy.trace._rounds] == [{0}] * 3
    told = [line for line in log.warnings if line.startswith("no trace of slow-1 ")]
    assert len(told) == 1
