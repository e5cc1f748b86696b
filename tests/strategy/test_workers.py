"""The registry of workers: ranks, tiers, nodes that come and go, speeds that change (DESIGN 3)."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.local_steps import BalancedBatches, SystemAwareSteps
from flower_blsgd.protocol import TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.strategy.cost_model import predict_run
from flower_blsgd.strategy.round import Outcome
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.strategy.workers import DEAD_BAND, WorkerRegistry, rank_key

from ..in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    slow_profile,
    toy_arrays,
    train_rounds,
    unnamed_profile,
)
from ..log_capture import captured_log
from ..refusal import refusal
from .orders import connected, planner_of, play_round


def named(name: str, tier: str = "fast", **values: object) -> WorkerProfile:
    return WorkerProfile("cpu", tier=tier, name=name, **values)  # type: ignore[arg-type]


def grid_of(*profiles: WorkerProfile | None) -> InProcessGrid:
    return InProcessGrid({100 + i: ToyWorker(profile) for i, profile in enumerate(profiles)})


# --- worker index


def test_rank_named_slow_last_then_partition_id_then_name_then_device() -> None:
    in_order = [
        WorkerProfile("cuda:9", tier="fast", partition_id=2),
        WorkerProfile("cuda:8", tier="", partition_id=9),
        WorkerProfile("cuda:7", tier="fast", partition_id=10),
        WorkerProfile("cuda:6", tier="fast", name="anna"),
        WorkerProfile("cuda:5", tier="", name="berta"),
        WorkerProfile("cuda:3", tier="fast"),
        WorkerProfile("cuda:4", tier=""),
        WorkerProfile("cpu:0", tier="slow", partition_id=0),
        WorkerProfile("cpu:1", tier="slow", name="adam"),
        WorkerProfile("cpu:2", tier="slow"),
        WorkerProfile("cpu:3", tier="fast", partition_id=0, role="evaluate"),
    ]
    assert sorted(set(in_order), key=rank_key) == in_order
    registry = WorkerRegistry.of_profiles(in_order[::-1])
    assert [worker.profile for worker in registry.workers] == in_order
    assert [worker.index for worker in registry.workers] == list(range(11))


def test_worker_that_evaluates_is_no_training_worker() -> None:
    one = WorkerProfile("cpu:0", role="evaluate", seconds_per_step=0.5, partition_id=0)
    registry = WorkerRegistry.of_profiles([one, fast_profile(1), slow_profile(2)])
    assert [worker.index for worker in registry.active] == [0, 1]
    (evaluating,) = registry.evaluating
    assert (evaluating.label, evaluating.index) == ("evaluate-2 (cpu:0)", 2)
    line = refusal(WorkerRegistry.of_profiles, [one])
    assert line.startswith("workers: all have role=evaluate; remove it from")


# --- tiers


@pytest.mark.parametrize(
    ("profiles", "fast"),
    [
        ([fast_profile(0, seconds_per_step=8.0), slow_profile(1, seconds_per_step=1.0)], [1, 0]),
        (
            [unnamed_profile(0, 1.0), unnamed_profile(1, 1.25), unnamed_profile(2, 1.5)],
            [1, 1, 0],
        ),  # 0.8 and 2/3
        ([unnamed_profile(0, 7.0), unnamed_profile(1, 10.0)], [1, 0]),  # exactly 0.7 is slow
        ([unnamed_profile(0, 9.0), unnamed_profile(1, 1.0)], [0, 1]),  # and keeps its index
        ([WorkerProfile("cpu:0"), WorkerProfile("cpu:1")], [1, 1]),  # no speed is known
    ],
)
def test_tier_is_as_named_else_by_speed(profiles: list[WorkerProfile], fast: list[int]) -> None:
    registry = WorkerRegistry.of_profiles(profiles)
    assert [worker.profile for worker in registry.workers] == profiles
    assert [worker.fast for worker in registry.workers] == [bool(each) for each in fast]


# --- the profile query


def test_update_waits_for_enough_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = grid_of(fast_profile(0))
    slept = []

    def connect_another(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            grid.connect(200, ToyWorker(slow_profile(1)))

    monkeypatch.setattr("flower_blsgd.strategy.connector.time.sleep", connect_another)
    assert len(connected(grid, min_workers=2).registry.active) == 2
    assert len(slept) == 2


def test_update_nodes_without_profile_handler_count_as_fast_workers_with_a_warning() -> None:
    with captured_log() as log:
        registry = connected(grid_of(None, None)).registry
    assert [(worker.fast, worker.profile.steps) for worker in registry.active] == [(True, 0)] * 2
    warning, repeatable = log.warnings
    assert "node 100, node 101" in warning
    assert "answer_profile" in warning  # the way out
    assert "repeated runs may differ" in repeatable


def _silent(message: Message, node_id: int) -> Message:
    return None  # type: ignore[return-value]  # the grid has no reply of it


def _raises(message: Message, node_id: int) -> Message:
    raise OSError("no such disk")


def _sends_no_profile(message: Message, node_id: int) -> Message:
    return Message(RecordDict({"config": ConfigRecord()}), reply_to=message)


def _has_several_devices_and_names_none(message: Message, node_id: int) -> Message:
    return Message(RecordDict({"host": ConfigRecord()}), reply_to=message)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (_silent, "did not answer in time"),
        (_raises, "no such disk"),
        (_sends_no_profile, "no profile"),
        (_has_several_devices_and_names_none, "no profile"),
    ],
)
def test_update_node_without_a_usable_answer_takes_no_part(
    handler: Callable[[Message, int], Message], reason: str
) -> None:
    grid = InProcessGrid({100: ToyWorker(fast_profile(0)), 101: handler})
    with captured_log() as log:
        connector = connected(grid, min_workers=1)
        registry = connector.registry
        connector.refresh(grid)
    assert [worker.node_id for worker in registry.active] == [100]
    (error,) = log.errors
    assert "node 101" in error
    assert reason in error
    assert len(grid.sent_of_type("query.profile")) == 2  # it is not queried again


def test_update_nodes_with_two_devices_are_two_workers_each() -> None:
    def two(message: Message, node_id: int) -> Message:
        record = WorkerProfile("cpu", tier="fast").to_reply(message).content["profile"]
        content = {"host": ConfigRecord(), "0/profile": record, "1/profile": record}
        return Message(RecordDict(content), reply_to=message)

    with captured_log() as log:
        registry = connected(InProcessGrid({100: two})).registry
        assert [worker.address for worker in registry.active] == [(100, 0), (100, 1)]
        assert log.lines(30) == []  # equal devices of one node are told apart by their rank
        registry = connected(InProcessGrid({100: two, 101: two})).registry
    assert [w.address for w in registry.active] == [(100, 0), (101, 0), (100, 1), (101, 1)]
    assert len([line for line in log.warnings if "repeat" in line]) == 1


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("data_fingerprint", "slow-1 .* has different training data than fast-0"),
        (
            "model_fingerprint",
            r"slow-1 .* has a different model or different frozen weights than fast-0 .*; create",
        ),
    ],
)
def test_update_nodes_with_other_data_or_models_are_refused(key: str, reason: str) -> None:
    grid = grid_of(fast_profile(0, **{key: "aa"}), slow_profile(1, **{key: "bb"}))
    assert re.search(reason, refusal(connected, grid))
    unknown = grid_of(fast_profile(0), slow_profile(1, **{key: "bb"}), slow_profile(2))
    assert len(connected(unknown).registry.active) == 3


@pytest.mark.parametrize(
    ("profiles", "warnings"),
    [
        ([WorkerProfile("cpu", tier="fast")] * 3, 1),
        ([named("a"), named("b"), fast_profile(0), fast_profile(1)], 0),
    ],
)
def test_workers_that_cannot_be_told_apart_make_one_warning(
    profiles: list[WorkerProfile], warnings: int
) -> None:
    with captured_log() as log:
        registry = connected(grid_of(*profiles)).registry
    assert len(registry.active) == len(profiles)
    assert len(log.warnings) == warnings
    assert all("repeat" in line and "name=" in line for line in log.warnings)


@pytest.mark.parametrize("data", ["aa", "bb"])
def test_node_that_comes_back_under_its_old_id_is_queried_again(data: str) -> None:
    """A SuperNode with a registered key keeps its id, whatever it has after a restart."""
    grid = grid_of(fast_profile(0, data_fingerprint="aa"), slow_profile(1, data_fingerprint="aa"))
    connector = connected(grid)
    registry = connector.registry
    worker = registry.workers[1]
    worker.profile, worker.measured = replace(worker.profile, seconds_per_step=3.0), True
    grid.disconnect(101)
    connector.refresh(grid)
    assert [worker.index for worker in registry.active] == [0]
    assert len(registry.workers) == 2
    grid.connect(101, ToyWorker(slow_profile(1, data_fingerprint=data)))
    connector.refresh(grid)
    takes_part = data == "aa"
    assert [worker.index for worker in registry.active] == ([0, 1] if takes_part else [0])
    assert worker.profile.seconds_per_step == 3.0  # the same device as before
    assert worker.fresh == takes_part
    connector.refresh(grid)
    assert len(grid.sent_of_type("query.profile")) == 3


# --- nodes that go and come


@pytest.mark.parametrize(
    "profile",
    [
        slow_profile(1),
        named("attic", "slow"),
        WorkerProfile("cpu:5", tier="slow", name="b", partition_id=5),
    ],
    ids=["partition id", "name", "both"],
)
def test_node_that_comes_back_under_a_new_id_takes_its_index(profile: WorkerProfile) -> None:
    grid = grid_of(fast_profile(0), profile, slow_profile(7))
    connector = connected(grid)
    registry = connector.registry
    (worker,) = [w for w in registry.workers if w.profile == profile]
    worker.excluded = "RuntimeError: the fan stands still"  # it was started anew
    grid.disconnect(101)
    with captured_log() as log:
        connector.refresh(grid)
        grid.connect(555, ToyWorker(profile))
        connector.refresh(grid)
    assert (worker.node_id, worker.present, worker.excluded) == (555, True, "")
    assert len(registry.workers) == len(registry.active) == 3
    assert log.warnings == [f"{worker.label} is gone", f"{worker.label} is back"]


@pytest.mark.parametrize("key", ["data_fingerprint", "model_fingerprint"])
def test_node_that_comes_later_with_other_data_or_another_model_takes_no_part(key: str) -> None:
    grid = grid_of(fast_profile(0, **{key: "aa"}), slow_profile(1, **{key: "aa"}))
    connector = connected(grid)
    registry = connector.registry
    grid.disconnect(101)
    grid.connect(555, ToyWorker(slow_profile(1, **{key: "bb"})))  # instead of the one that went
    grid.connect(556, ToyWorker(slow_profile(2, **{key: "bb"})))
    with captured_log() as log:
        connector.refresh(grid)
    assert [worker.node_id for worker in registry.active] == [100]
    assert len(registry.workers) == 2
    assert [line.split(" does not")[0] for line in log.errors] == ["node 555", "node 556"]


def _leaves(grid: InProcessGrid, strategy: BiasedLocalSGD) -> None:
    grid.disconnect(100)


def _is_excluded(grid: InProcessGrid, strategy: BiasedLocalSGD) -> None:
    strategy.registry.workers[0].excluded = "RuntimeError: the fan stands still"
    grid.handlers[100] = _raises


@pytest.mark.parametrize("loses", [_leaves, _is_excluded])
def test_speeds_are_relative_to_the_workers_that_are_there_at_the_epochs_plan(
    loses: Callable[[InProcessGrid, BiasedLocalSGD], None],
) -> None:
    """1, 4 and 8 s a step. Without the first, gamma is 4 / 4 and 4 / 8: 32 and 16 steps."""
    seconds = {"seconds_per_step": 1.0}, {"seconds_per_step": 4.0}, {"seconds_per_step": 8.0}
    profiles = fast_profile(0, **seconds[0]), fast_profile(1, **seconds[1])
    grid = grid_of(*profiles, slow_profile(2, **seconds[2]))
    strategy = BiasedLocalSGD(300, 2, 32, min_available_nodes=2)

    def steps_of_round(server_round: int) -> list[int]:
        orders, _ = play_round(strategy, grid, server_round)
        return [order.local_steps for order in orders]

    assert steps_of_round(1) == [32, 8, 4]
    loses(grid, strategy)
    second = steps_of_round(2)
    assert (strategy.planner.progress.epoch, second) == (
        1,
        [8, 4],
    )  # within an epoch nothing changes
    while not strategy.planner.epoch_ended:
        steps_of_round(3)
    assert steps_of_round(4) == [32, 16]
    assert strategy.planner.progress.epoch == 2


def test_tiers_of_unnamed_workers_are_those_among_the_workers_that_are_there() -> None:
    """1, 4 and 5 s a step: two slow ones; without the first both are fast (1 and 0.8)."""
    grid = grid_of(unnamed_profile(0, 1.0), unnamed_profile(1, 4.0), unnamed_profile(2, 5.0))
    connector = connected(grid)
    registry = connector.registry
    assert [worker.fast for worker in registry.workers] == [True, False, False]
    grid.disconnect(100)
    grid.connect(300, ToyWorker(unnamed_profile(3, 8.0)))
    connector.refresh(grid)  # within an epoch: only the new one gets a tier
    assert [worker.fast for worker in registry.workers] == [True, False, False, False]
    assert [worker.speed_ratio for worker in registry.active] == [0.25, 0.2, 0.5]
    registry.assign_tiers()
    assert [worker.fast for worker in registry.active] == [True, True, False]
    assert [worker.speed_ratio for worker in registry.active] == [1.0, 0.8, 0.5]
    assert [worker.index for worker in registry.workers] == [0, 1, 2, 3]


# --- rebalancing, in whole runs

Pace = Callable[[int], float]
"""Epoch -> seconds per step of the common batch size, 2."""


class Paced(ToyWorker):
    """Reports that its steps took as long as its pace says."""

    def __init__(self, profile: WorkerProfile, pace: Pace) -> None:
        super().__init__(profile)
        self.pace = pace

    def report(self, order: TrainOrder) -> TrainReport:
        report = super().report(order)
        seconds = self.pace(order.epoch) * report.num_examples / 2
        object.__setattr__(report, "compute_seconds", seconds)
        return report

    @property
    def steps_of_epochs(self) -> list[int]:
        """Its steps in each epoch; the same in all rounds of one."""
        found: dict[int, set[int]] = {}
        for order in self.orders:
            found.setdefault(order.epoch, set()).add(order.local_steps)
        assert all(len(steps) == 1 for steps in found.values()), "steps changed within an epoch"
        return [steps.pop() for steps in found.values()]


def four_times_slower(epoch: int) -> float:
    return 2.0 if epoch <= 2 else 8.0


Played = tuple[Paced, Paced, BiasedLocalSGD, list[RoundRecord]]


def play(profile: WorkerProfile, slow_pace: Pace, epochs: int, **arguments: Any) -> Played:
    """A fast worker with 16 steps of 1 s and a slow one, of an epoch of 240 samples."""
    fast = Paced(fast_profile(0, seconds_per_step=1.0), lambda epoch: 1.0)
    slow, records = Paced(profile, slow_pace), list[RoundRecord]()
    arguments = {"rebalance": True} | arguments
    strategy = BiasedLocalSGD(240, 2, SystemAwareSteps(16), min_available_nodes=2, **arguments)
    grid = InProcessGrid({10: fast, 20: slow})
    train_rounds(strategy, grid, handle=records.append, epochs=epochs)
    return fast, slow, strategy, records


def test_worker_that_becomes_four_times_slower_does_fewer_steps_within_two_epochs() -> None:
    profile = slow_profile(1, seconds_per_step=2.0)
    _, slow, *_ = play(profile, four_times_slower, 6, rebalance=False)
    assert slow.steps_of_epochs == [8] * 6
    with captured_log() as log:
        fast, slow, strategy, _ = play(profile, four_times_slower, 6)
    assert fast.steps_of_epochs == [16] * 6
    # Five rounds at 0.4 of the newest: 8 - 0.6^5 x 6 = 7.53 s, gamma 0.133: 2.13 of 16 steps.
    # The last 0.5 s come in epoch 4: gamma 0.126 is 5 % off, within the dead band.
    assert slow.steps_of_epochs == [8, 8, 8, 2, 2, 2]
    (logged,) = [line for line in log.lines() if line.startswith("speeds changed")]
    assert "7.5 s a step measured, gamma 0.13" in logged
    prediction = predict_run(strategy, strategy.registry.active)
    assert prediction is not None
    assert [row.local_steps for row in prediction.workers] == [16, 2]
    shares = [prediction.waiting_share(fast) for fast in (True, False)]
    assert all(share is not None and share < 0.1 for share in shares)
    per_round = 2 * (16 + 2)
    assert 6 * 240 - per_round < strategy.planner.progress.samples_planned <= 6 * 240


def test_worker_without_times_in_the_last_epoch_keeps_its_share() -> None:
    """4 s a step in epoch 1, no answer in epoch 2: 13 and 3 of 16 samples in epochs 2 and 3."""
    fast, slow = Paced(fast_profile(0), lambda _: 1.0), Paced(slow_profile(1), lambda _: 4.0)
    strategy = BiasedLocalSGD(64, 8, BalancedBatches(), min_available_nodes=2)
    grid = InProcessGrid({10: fast, 20: slow})
    for server_round in (5, 6, 7, 8):
        grid.fail_at(1, server_round, "missing")
    strategy.fit(grid, toy_arrays(), epochs=3)
    assert [order.batch_size for order in fast.orders] == [8] * 4 + [13] * 8


@pytest.mark.parametrize(
    ("policy", "batch", "reason"),
    [
        (BalancedBatches(), 4, r"slow-1 \(cpu:1\) has batch=4, but this algorithm"),
        (
            SystemAwareSteps(4, 1),
            41,
            r"slow-1 \(cpu:1\) has batch=41, more than the 40 training samples",
        ),
    ],
)
def test_batch_that_cannot_be_is_refused_and_of_a_late_node_leaves_it_out(
    policy: Any, batch: int, reason: str
) -> None:
    strategy = BiasedLocalSGD(40, 2, policy)
    grid = grid_of(fast_profile(0), slow_profile(1, batch_size=batch))
    assert re.search(reason, refusal(strategy.connector.refresh, grid))
    strategy, grid = BiasedLocalSGD(40, 2, policy), grid_of(fast_profile(0), slow_profile(1))

    def connect(record: RoundRecord) -> None:
        if record.round == 1:
            grid.connect(300, ToyWorker(slow_profile(2, batch_size=batch)))

    with captured_log() as log:
        train_rounds(strategy, grid, handle=connect, epochs=2)
    assert log.errors[0].startswith(f"node 300 does not take part: has batch={batch}, ")
    assert len(strategy.registry.workers) == 2


@pytest.mark.parametrize("mode", ["samples", "table"])
def test_late_node_for_whose_batch_the_data_are_too_small_waits_for_room(mode: Any) -> None:
    """Three batches of 8 fit into 24 samples."""
    grid = grid_of(fast_profile(0), slow_profile(1))
    strategy = BiasedLocalSGD(24, 8, 1, local_steps_slow=1, epoch=mode)
    trained: list[list[int]] = []

    def change(record: RoundRecord) -> None:
        trained.append([row.worker for row in record.workers])
        if record.round == 1:
            grid.connect(300, ToyWorker(slow_profile(2)))
            grid.connect(400, ToyWorker(fast_profile(3)))
        if record.epoch == 4:
            grid.handlers.pop(101, None)

    with captured_log() as log:
        train_rounds(strategy, grid, handle=change, epochs=6)
    kinds = [workers for workers, _ in itertools.groupby(trained)]
    # By index: the workers that join are fast-2 and slow-3.
    assert kinds == [[0, 1], [0, 1, 2], [0, 2, 3]]
    (warning,) = [line for line in log.warnings if "epoch" in line]
    assert warning.startswith(
        "slow-3 (cpu:2) is left out of epoch 2: batch-size = 8 is too large: "
    )


# --- rebalancing, its parts


def outcome(worker: Any, seconds: float, samples: int = 4, traced: int = 0) -> Outcome:
    """Return the outcome of an order in which steps of 2 samples took so many seconds."""
    report = SimpleNamespace(
        num_examples=samples,
        compute_seconds=seconds * samples / 2,
        losses=np.empty(0, np.float32),
        traced=traced,
    )
    order = SimpleNamespace(indices=np.arange(samples), round=1)
    return Outcome(worker, order, SimpleNamespace(report=report))  # type: ignore[arg-type]


def test_follow_speeds_keeps_given_ones_as_those_of_the_worker_alone() -> None:
    registry = WorkerRegistry.of_profiles([unnamed_profile(place, 1.0) for place in range(3)])
    first, second, third = registry.workers
    second.measured = True  # its 1 s were measured with others
    for seconds in (8.0, 16.0):
        pairs = (first, 1.0), (second, 1.0), (third, seconds)
        planner_of().record([outcome(*pair) for pair in pairs])
        registry.follow_speeds(*DEAD_BAND)
        alone = [worker.profile.seconds_per_step_alone for worker in registry.workers]
        assert alone == [1.0, 0.0, 1.0]
    assert [worker.fast for worker in registry.workers] == [True, True, False]
    assert third.speed_ratio == pytest.approx(1 / (8 + 0.4 * 8))
    assert (first.measured, third.measured) == (True, True)


def test_time_of_a_traced_order_is_not_a_speed() -> None:
    (worker,) = WorkerRegistry.of_profiles([unnamed_profile(0, 1.0)]).workers
    for seconds, traced in ((2.0, 0), (50.0, 1)):
        planner_of().record([outcome(worker, seconds, traced=traced)])
    assert worker.training_seconds_per_step == 2.0


def test_times_of_a_worker_that_is_gone_are_forgotten() -> None:
    grid = grid_of(fast_profile(0, seconds_per_step=1.0), slow_profile(1, seconds_per_step=4.0))
    connector = connected(grid)
    registry = connector.registry
    fast, slow = registry.workers
    connector.planner.record([outcome(fast, 1.0), outcome(slow, 99.0)])
    handler = grid.disconnect(101)
    connector.refresh(grid)
    grid.connect(101, handler)
    connector.refresh(grid)
    registry.follow_speeds(*DEAD_BAND)
    assert slow.profile.seconds_per_step == 4.0
    connector.planner.record([outcome(slow, 8.0)])
    registry.follow_speeds(*DEAD_BAND)
    assert slow.profile.seconds_per_step == 8.0
