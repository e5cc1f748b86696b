"""Measuring each worker alone and all at once: what is asked, what is made of it, what is left."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments import calibration
from flower_blsgd.experiments.calibration import calibrate
from flower_blsgd.experiments.speed_profile import ProfileKey, SpeedProfile, Spread
from flower_blsgd.own_grid import own_grid
from flower_blsgd.protocol import ProfileQuery, TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.runtime.devices import WorkerSpec, parse_workers
from flower_blsgd.runtime.flower_internals import become_server
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.model_state import state_record

from ..in_process_grid import FailureKind, InProcessGrid, same_bits
from ..runtime.processes import is_alive, wait_until

CORES = usable_cores()
KEY = ProfileKey.here(RunConfig())  # batch size 16
WORKERS = (WorkerSpec("cpu", (0,), "fast"), WorkerSpec("cpu", (1,), "slow", slowdown=4.0))
MODEL = ArrayRecord(numpy_ndarrays=[np.zeros(3, np.float32)])
NUM_SAMPLES = 50


class ScriptedGrid(InProcessGrid):
    """Two workers that tell these seconds per step, one after another, and compute nothing."""

    def __init__(self, alone: Sequence[Sequence[float]], loaded: Sequence[Sequence[float]]) -> None:
        super().__init__({100: self._scripted, 101: self._scripted})
        self.workers = WORKERS
        self._alone = [list(seconds) for seconds in alone]
        self._loaded = [list(seconds) for seconds in loaded]
        self.asked: list[int] = []
        self.orders: list[tuple[int, TrainOrder]] = []

    def _scripted(self, message: Message, node_id: int) -> Message:
        place = node_id - 100
        self.asked.append(place)
        if message.metadata.message_type == "query.profile":
            query = ProfileQuery.from_message(message)
            assert (query.calibrate, query.batch_size) == (True, 16)
            seconds = self._alone[place].pop(0)
            return WorkerProfile("cpu", seconds_per_step=seconds).to_reply(message)
        order = TrainOrder.from_message(message)
        self.orders.append((place, order))
        took = self._loaded[place].pop(0) * order.local_steps
        losses = np.zeros(len(order.indices), np.float32)
        report = TrainReport(order.local_steps, 16, took, 1000.0, 1000.0, losses, order.arrays)
        return report.to_reply(message)


def measured(grid: ScriptedGrid, told: list[str] | None = None) -> SpeedProfile:
    lines: list[str] = [] if told is None else told
    return calibrate(cast(LocalGrid, grid), KEY, MODEL, NUM_SAMPLES, lines.append)


# The first of each is not counted.
ALONE = [[9.0, 0.01, 0.03, 0.02, 0.05, 0.04], [9.0, 0.2, 0.1, 0.1, 0.1, 0.1]]
LOADED = [[9.0, 0.02, 0.03, 0.02, 0.02, 0.9], [9.0, 0.25, 0.25, 0.5, 0.25, 0.3]]


def test_medians_hand_worked() -> None:
    profile = measured(ScriptedGrid(ALONE, LOADED))
    fast, slow = profile.workers
    assert fast.alone == Spread(0.03, 0.01, 0.05, 5)
    assert slow.alone == Spread(0.1, 0.1, 0.2, 5)
    for spread, expected in ((fast.loaded, (0.02, 0.02, 0.9)), (slow.loaded, (0.25, 0.25, 0.5))):
        assert (spread.median, spread.low, spread.high) == pytest.approx(expected)
        assert spread.count == 5
    assert [(w.device, w.slowdown) for w in profile.workers] == [("cpu:0", 1.0), ("cpu:1", 4.0)]
    assert profile.key is KEY
    assert profile.overhead_seconds.count == 5
    assert 0 <= profile.overhead_seconds.low <= profile.overhead_seconds.high < 30


def test_each_is_asked_alone_first_and_then_all_at_once() -> None:
    told: list[str] = []
    grid = ScriptedGrid(ALONE, LOADED)
    measured(grid, told)
    assert grid.asked == [0] * 6 + [1] * 6 + [0, 1] * 6
    assert told == [
        "worker 1 of 2 (cpu:0), alone",
        "worker 2 of 2 (cpu:1), alone",
        "all 2 workers at once",
    ]


def test_orders_keep_everybody_busy_for_as_long_and_leave_nothing_behind() -> None:
    """Of 0.7 s: 23 steps of 30 ms, 7 of 100 ms."""
    grid = ScriptedGrid(ALONE, LOADED)
    measured(grid)
    assert [(place, order.local_steps) for place, order in grid.orders] == [(0, 23), (1, 7)] * 6
    for _, order in grid.orders:
        assert (order.learning_rate, order.momentum_policy, order.deadline_seconds) == (
            *(0.0, "reset", 0.0),
        )
        assert order.batch_size == 16
        assert len(order.indices) == order.local_steps * 16
        assert 0 <= order.indices.min() <= order.indices.max() < NUM_SAMPLES
    drawn = {order.indices.tobytes() for _, order in grid.orders}
    assert len(drawn) == 12  # no worker trains on what is in its cache


def test_worker_that_needs_longer_than_a_round_does_one_step() -> None:
    grid = ScriptedGrid([[0.1] * 6, [3.0] * 6], [[0.1] * 6, [3.0] * 6])
    measured(grid)
    assert {(place, order.local_steps) for place, order in grid.orders} == {(0, 30), (1, 1)}


@pytest.mark.parametrize(
    ("speed", "told"), [(0.0, "does not measure"), (math.nan, "does not measure")]
)
def test_worker_that_tells_no_speed_is_named(speed: float, told: str) -> None:
    grid = ScriptedGrid([[0.1] * 6, [0.1, 0.1, speed]], LOADED)
    with pytest.raises(UsageError) as error:
        measured(grid)
    assert str(error.value).startswith("the speed of worker 2 of 2 (cpu:1) is not known: ")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("raises", "worker 2 of 2 (cpu:1) failed while it was measured: RuntimeError: the fan"),
        ("dies", "worker 2 of 2 (cpu:1) failed while it was measured: the process was killed"),
        ("missing", "worker 2 of 2 (cpu:1) did not answer while it was measured"),
    ],
)
def test_worker_that_fails_in_a_round_is_named_in_one_line(kind: FailureKind, told: str) -> None:
    grid = ScriptedGrid([[0.1] * 6] * 2, [[0.1] * 6] * 2)
    asks = grid.send_and_receive

    def fails_later(messages: Any, *, timeout: float | None = None) -> Any:
        if len(grid.asked) == 14:  # the second round
            grid.fail_at(1, 0, kind)
        return asks(messages, timeout=timeout)

    grid.send_and_receive = fails_later  # type: ignore[method-assign]
    with pytest.raises(UsageError) as error:
        measured(grid)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


# --- with real processes


@dataclass
class Real:
    profile: SpeedProfile
    before: bytes
    after: bytes
    states: list[Any]
    trained: list[ArrayRecord]
    pids: list[int]


def small_order(arrays: ArrayRecord, server_round: int) -> TrainOrder:
    indices = np.arange(48, dtype=np.int32) + 48 * server_round
    return TrainOrder(server_round, 1, 3, 16, 0.05, 0, 0.0, "keep", indices, arrays)


def bytes_of(arrays: ArrayRecord) -> bytes:
    return b"".join(array.numpy().tobytes() for array in arrays.values())


def trained_by(grid: LocalGrid, arrays: ArrayRecord) -> list[ArrayRecord]:
    """Return every node's model after two orders that keep momentum in between."""
    for server_round in (1, 2):
        orders = {node: small_order(arrays, server_round) for node in grid.get_node_ids()}
        messages = [Message(order.to_records(), node, "train") for node, order in orders.items()]
        replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(messages, timeout=60)}
        assert all(not reply.has_error() for reply in replies.values())
        found = [TrainReport.from_reply(replies[node], orders[node]).arrays for node in orders]
    return [ArrayRecord({k: Array(v.numpy().copy()) for k, v in a.items()}) for a in found]


@pytest.fixture(scope="module")
def real() -> Real:
    become_server(run_id=1)
    first, last = CORES[0], CORES[-1]
    config = RunConfig(
        workers=f"1x cpu:{first} fast; 1x cpu:{last} slow slowdown=4", threads=1, batch_size=16
    )
    workers = parse_workers(config.workers)
    task = load_task("digits")
    arrays = state_record(task.initial_model(0))
    before = bytes_of(arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_REPEATS", 2)
        patch.setattr(calibration, "_ALONE_SECONDS", 0.02)
        patch.setattr(calibration, "_ROUND_SECONDS", 0.02)
        with own_grid(config, workers=workers) as grid:
            profile = calibrate(grid, ProfileKey.here(config), arrays, task.num_train)
            nodes = list(grid.get_node_ids())
            states = [dict(grid.state_of(node)) for node in nodes]
            after = bytes_of(arrays)
            trained = trained_by(grid, arrays)
            pids = list(grid.process_ids.values())
            assert all(is_alive(pid) for pid in pids)
    with own_grid(config, workers=workers) as fresh:
        trained += trained_by(fresh, arrays)
        pids += list(fresh.process_ids.values())
    return Real(profile, before, after, states, trained, pids)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_real_workers_give_a_profile_that_holds_here(real: Real) -> None:
    assert len(real.profile.workers) == 2
    for worker in real.profile.workers:
        for spread in (worker.alone, worker.loaded):
            assert 0 < spread.low <= spread.median <= spread.high < 60
            assert spread.count == 2
    assert real.profile.workers[1].slowdown == 4.0
    assert real.profile.overhead_seconds.low >= 0


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_real_measurement_leaves_nothing_in_model_and_momentum(real: Real) -> None:
    assert real.after == real.before
    assert real.states == [{}, {}]
    first_two, fresh_two = real.trained[:2], real.trained[2:]
    for measured_before, fresh in zip(first_two, fresh_two, strict=True):
        assert same_bits(measured_before, fresh)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_real_measurement_leaves_no_process(real: Real) -> None:
    assert len(set(real.pids)) == 4
    assert wait_until(lambda: not any(is_alive(pid) for pid in real.pids))
