"""Measuring each worker alone and all together: the orders, the medians, what is left behind."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message

from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import WorkerSpec, parse_workers, workers_text
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.calibration import Speeds, Spread, measure, without_speeds
from flower_blsgd.protocol import ProfileQuery, TrainOrder, TrainReport, WorkerProfile

from ..in_process_grid import FailureKind, InProcessGrid

WORKERS = (
    WorkerSpec("cpu", (0,), tier="fast"),
    WorkerSpec("cpu", (1,), tier="slow", slowdown=4.0, batch_size=4, precision="bfloat16"),
)
MODEL = ArrayRecord(numpy_ndarrays=[np.zeros(3, np.float32)])
NUM_SAMPLES = 50
CORE = usable_cores()[0]


BATCHES = 16, 4


class ScriptedGrid(InProcessGrid):
    """Two workers that report these seconds per step, one after another, and compute nothing."""

    def __init__(self, alone: Sequence[Sequence[float]], loaded: Sequence[Sequence[float]]) -> None:
        super().__init__({100: self._scripted, 101: self._scripted})
        self.workers = WORKERS
        self._alone = [list(seconds) for seconds in alone]
        self._loaded = [list(seconds) for seconds in loaded]
        self.calls: list[int] = []
        self.orders: list[tuple[int, TrainOrder]] = []
        self.lines: list[str] = []

    def _scripted(self, message: Message, node_id: int) -> Message:
        index = node_id - 100
        self.calls.append(index)
        if message.metadata.message_type == "query.profile":
            query = ProfileQuery.from_message(message)
            assert (query.calibrate, query.batch_size) == (True, BATCHES[index])
            seconds = self._alone[index].pop(0)
            return WorkerProfile("cpu", seconds_per_step=seconds).to_reply(message)
        order = TrainOrder.from_message(message)
        self.orders.append((index, order))
        took = self._loaded[index].pop(0) * order.local_steps
        losses = np.zeros(len(order.indices), np.float32)
        size = order.batch_size
        report = TrainReport(order.local_steps, size, took, 1000.0, 1000.0, losses, order.arrays)
        return report.to_reply(message)

    def measured(self) -> Speeds:
        return measure(cast(LocalGrid, self), 16, MODEL, NUM_SAMPLES, self.lines.append)


# The first of each is not counted.
ALONE = [[9.0, 0.01, 0.03, 0.02, 0.05, 0.04], [9.0, 0.2, 0.1, 0.1, 0.1, 0.1]]
LOADED = [[9.0, 0.02, 0.03, 0.02, 0.02, 0.9], [9.0, 0.25, 0.25, 0.5, 0.25, 0.3]]


def test_medians_hand_worked() -> None:
    """Each is measured alone first, then all together."""
    grid = ScriptedGrid(ALONE, LOADED)
    speeds = grid.measured()
    assert grid.calls == [0] * 6 + [1] * 6 + [0, 1] * 6
    assert grid.lines == [
        "worker 1 of 2 (cpu:0), alone",
        "worker 2 of 2 (cpu:1), alone",
        "all 2 workers together",
    ]
    assert speeds.alone == [Spread(0.03, 0.01, 0.05), Spread(0.1, 0.1, 0.2)]
    for spread, expected in zip(speeds.loaded, ((0.02, 0.02, 0.9), (0.25, 0.25, 0.5)), strict=True):
        assert (spread.median, spread.low, spread.high) == pytest.approx(expected)
    assert 0 <= speeds.overhead.low <= speeds.overhead.high < 30


def test_orders_keep_everybody_busy_for_as_long_and_leave_nothing_behind() -> None:
    """Of 0.7 s: 23 steps of 30 ms, 7 of 100 ms."""
    grid = ScriptedGrid(ALONE, LOADED)
    grid.measured()
    assert [(index, order.local_steps) for index, order in grid.orders] == [(0, 23), (1, 7)] * 6
    for index, order in grid.orders:
        assert (order.learning_rate, order.momentum_policy) == (0.0, "reset")
        assert (order.deadline_seconds, order.batch_size) == (0.0, BATCHES[index])
        assert len(order.indices) == order.local_steps * BATCHES[index]
        assert 0 <= order.indices.min() <= order.indices.max() < NUM_SAMPLES
    drawn = {order.indices.tobytes() for _, order in grid.orders}
    assert len(drawn) == 12  # no worker trains on what is in its cache
    grid = ScriptedGrid([[0.1] * 6, [3.0] * 6], [[0.1] * 6, [3.0] * 6])
    grid.measured()  # a step of 3 s is longer than a round
    assert {(index, order.local_steps) for index, order in grid.orders} == {(0, 30), (1, 1)}


@pytest.mark.parametrize("speed", [0.0, math.nan])
def test_worker_without_a_speed_is_named(speed: float) -> None:
    grid = ScriptedGrid([[0.1] * 6, [0.1, 0.1, speed]], LOADED)
    with pytest.raises(
        UsageError, match=r"speed of worker 2 of 2 \(cpu:1\) cannot be measured: .*(mea|nan)"
    ):
        grid.measured()


@pytest.mark.parametrize(
    ("kind", "words"), [("raises", "RuntimeError: the fan"), ("missing", "it did not answer in")]
)
def test_worker_that_fails_in_a_round_is_named_in_one_line(kind: FailureKind, words: str) -> None:
    grid = ScriptedGrid([[0.1] * 6] * 2, [[0.1] * 6] * 2)
    send = grid.send_and_receive

    def fails_later(messages: Any, *, timeout: float | None = None) -> Any:
        if len(grid.calls) == 14:  # the second round
            grid.fail_at(1, 0, kind)
        return send(messages, timeout=timeout)

    grid.send_and_receive = fails_later  # type: ignore[method-assign]
    with pytest.raises(UsageError) as error:
        grid.measured()
    assert str(error.value).startswith(
        f"worker 2 of 2 (cpu:1) failed during the measurement: {words}"
    )
    assert "\n" not in str(error.value)


def test_speeds_become_options_that_a_specification_has() -> None:
    """On the wall clock, those under load; a given speed stays, unless it is removed."""
    spread = [Spread(s, s, s) for s in (0.0123456, 0.00002, 3.0)]
    speeds = Speeds(spread, [replace(s, median=2 * s.median) for s in spread], spread[0])
    workers = parse_workers(
        f"2x cpu:{CORE} fast name=v1.0 batch=4; cpu:{CORE} slowdown=2.5 seconds-per-step=7"
    )
    for clock, times in (("wall", (0.02469, 0.00004, 7)), ("device", (0.01235, 0.00002, 7))):
        given = speeds.given_to(workers, cast(Any, clock))
        assert [worker.seconds_per_step for worker in given] == list(times)
        assert [worker.seconds_per_step_alone for worker in given] == [0.01235, 0.00002, 0]
        assert parse_workers(workers_text(given)) == given
    assert workers_text(given).startswith(
        f"cpu:{CORE} fast batch=4 seconds-per-step=0.01235 seconds-per-step-alone=0.01235 "
        f"name=v1.0-0; cpu:{CORE} fast batch=4 seconds-per-step=2e-05 "
    )
    anew = speeds.given_to(without_speeds(workers), "wall")
    assert (anew[2].seconds_per_step, anew[2].slowdown) == (6, 2.5)
