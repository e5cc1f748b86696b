"""Speeds measured before the first round: when, of whom, and what becomes of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.local_steps import SameSteps
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import ProfileQuery, WorkerProfile
from flower_blsgd.roster import Roster
from flower_blsgd.speeds import SpeedRule, before_measuring

from .in_process_grid import InProcessGrid, ToyWorker, fast_profile, slow_profile, toy_arrays
from .log_capture import captured_log


class Clocked(ToyWorker):
    """Measures made-up seconds per step when it is asked to."""

    def __init__(self, profile: WorkerProfile, seconds: float | None = None) -> None:
        super().__init__(profile)
        self.seconds = seconds
        self.queries: list[ProfileQuery] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.profile":
            query = ProfileQuery.from_message(message)
            self.queries.append(query)
            assert self.profile is not None
            if query.calibrate:
                if self.seconds is None:
                    raise RuntimeError("out of memory\nwhile measuring")
                if not self.profile.seconds_per_step:
                    measured = dataclasses.replace(self.profile, seconds_per_step=self.seconds)
                    return measured.to_reply(message)
        return super().__call__(message, node_id)

    @property
    def measured(self) -> int:
        return sum(query.calibrate for query in self.queries)


class Batches(InProcessGrid):
    """Notes which nodes are asked together."""

    def __init__(self, *nodes: Any) -> None:
        super().__init__({50 + i: node for i, node in enumerate(nodes)})
        self.together: list[list[int]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        asked = [
            m.metadata.dst_node_id
            for m in messages
            if m.metadata.message_type == "query.profile" and ProfileQuery.from_message(m).calibrate
        ]
        if asked:
            self.together.append(asked)
        return super().send_and_receive(messages, timeout=timeout)


def unnamed(place: int, **values: Any) -> WorkerProfile:
    return WorkerProfile(f"cpu:{place}", partition_id=place, **values)


def roster_on(grid: InProcessGrid, auto: bool = True, clock: Any = "wall") -> Roster:
    roster = Roster(len(grid.handlers), SpeedRule(16, auto, clock))
    roster.update(grid)
    return roster


# --- when


@pytest.mark.parametrize(
    ("profiles", "auto", "clock", "asked"),
    [
        ([fast_profile(0), slow_profile(1)], True, "wall", True),
        ([fast_profile(0), slow_profile(1)], False, "wall", False),
        ([fast_profile(0), slow_profile(1)], False, "device", True),
        ([fast_profile(0), slow_profile(1, steps=3)], True, "wall", False),
        ([fast_profile(0), fast_profile(1)], True, "wall", False),
        ([fast_profile(0), unnamed(1)], False, "wall", True),
        ([unnamed(0), unnamed(1, steps=4)], False, "wall", True),
        ([slow_profile(0)], True, "wall", True),
    ],
    ids=str,
)
def test_speeds_are_measured_only_where_something_comes_from_them(
    profiles: Sequence[WorkerProfile], auto: bool, clock: Any, asked: bool
) -> None:
    nodes = [Clocked(profile, 0.5) for profile in profiles]
    roster = roster_on(Batches(*nodes), auto, clock)
    assert [node.measured for node in nodes] == [int(asked)] * len(nodes)
    assert [worker.measured for worker in roster.workers] == [asked] * len(nodes)
    if asked:
        assert {q.batch_size for node in nodes for q in node.queries if q.calibrate} == {16}


def test_speeds_of_nodes_that_know_theirs_are_not_measured() -> None:
    given = Clocked(fast_profile(0, seconds_per_step=0.125), 9.0)
    other = Clocked(slow_profile(1), 0.5)
    roster = roster_on(Batches(given, other))
    assert (given.measured, other.measured) == (0, 1)
    assert [worker.speed_ratio for worker in roster.workers] == [1.0, 0.25]
    assert roster.workers[0].speed == "0.12 s a step given, gamma 1.00"


def test_speeds_on_the_wall_clock_are_measured_all_at_once() -> None:
    grid = Batches(
        *[Clocked(fast_profile(i), 1.0) for i in range(2)], Clocked(slow_profile(2), 4.0)
    )
    roster_on(grid)
    assert grid.together == [[50, 51, 52]]


def test_speeds_on_the_device_clock_are_measured_one_by_one() -> None:
    grid = Batches(
        *[Clocked(fast_profile(i), 1.0) for i in range(2)], Clocked(slow_profile(2), 4.0)
    )
    roster = roster_on(grid, clock="device")
    assert grid.together == [[50], [51], [52]]
    assert [worker.speed_ratio for worker in roster.workers] == [1.0, 1.0, 0.25]


# --- what becomes of them


def test_speeds_make_gamma_and_the_line_that_tells_it() -> None:
    roster = roster_on(Batches(Clocked(fast_profile(0), 0.021), Clocked(slow_profile(1), 0.084)))
    assert [worker.speed for worker in roster.workers] == [
        "0.021 s a step measured, gamma 1.00",
        "0.084 s a step measured, gamma 0.25",
    ]


def test_speeds_decide_the_tier_of_unnamed_workers() -> None:
    nodes = [Clocked(unnamed(i), seconds) for i, seconds in enumerate((1.0, 1.25, 1.5))]
    roster = roster_on(Batches(*nodes), auto=False)
    assert [worker.fast for worker in roster.workers] == [True, True, False]  # 1, 0.8, 2/3


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(2.0, 4), (4.0, 2), (16.0, 1), (1000.0, 1)],  # tau = max(1, floor(8 / seconds + 1/2))
)
def test_speeds_decide_the_steps_of_slow_workers(seconds: float, steps: int) -> None:
    nodes = [Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), seconds)]
    strategy = BiasedLocalSGD(100, 2, local_steps=8)
    strategy.fit(Batches(*nodes), toy_arrays(), epochs=1)
    assert [node.orders[0].local_steps for node in nodes] == [8, steps]


def test_steps_of_a_group_win_over_the_speed() -> None:
    nodes = [
        Clocked(fast_profile(0), 1.0),
        Clocked(slow_profile(1), 4.0),
        Clocked(slow_profile(2, steps=7), 4.0),
    ]
    BiasedLocalSGD(100, 2, local_steps=8).fit(Batches(*nodes), toy_arrays(), epochs=1)
    assert [node.orders[0].local_steps for node in nodes] == [8, 2, 7]


def test_one_worker_alone_does_the_steps_of_the_fastest() -> None:
    node = Clocked(slow_profile(0), 4.0)
    strategy = BiasedLocalSGD(
        100, 2, local_steps=8, sampler=UniformSampler(), min_available_nodes=1
    )
    strategy.fit(Batches(node), toy_arrays(), epochs=1)
    assert node.orders[0].local_steps == 8


def test_strategy_with_steps_of_its_own_measures_nothing() -> None:
    nodes = [Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0)]
    strategy = BiasedLocalSGD(100, 2, SameSteps(2))
    strategy.fit(Batches(*nodes), toy_arrays(), epochs=1)
    assert [node.measured for node in nodes] == [0, 0]


def test_strategy_on_the_device_clock_always_measures() -> None:
    nodes = [Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0)]
    strategy = BiasedLocalSGD(100, 2, SameSteps(2), clock="device")
    grid = Batches(*nodes)
    strategy.fit(grid, toy_arrays(), epochs=1)
    assert grid.together == [[50], [51]]
    with pytest.raises(ValueError, match="clock = 'moon'"):
        BiasedLocalSGD(100, clock="moon")  # type: ignore[arg-type]


# --- speeds that cannot be measured


def test_speed_that_is_not_known_is_told_in_one_line_and_refused_at_the_start() -> None:
    nodes = [Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), None)]
    strategy = BiasedLocalSGD(100, 2)
    with captured_log() as log, pytest.raises(UsageError, match="local-steps-slow"):
        strategy.configure_train(1, toy_arrays(), ConfigRecord(), Batches(*nodes))
    (warning,) = log.lines(30)
    assert warning == "the speed of slow-1 (cpu:1) is not known: while measuring"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_speed_that_is_no_speed_is_not_taken(seconds: float) -> None:
    with captured_log() as log:
        roster = roster_on(
            Batches(Clocked(fast_profile(0), 1.0), Clocked(unnamed(1), seconds)), auto=False
        )
    assert roster.workers[1].speed_ratio is None
    assert roster.workers[1].fast
    assert "seconds-per-step" in log.warnings[0]


def test_speed_of_a_foreign_client_is_asked_once_and_told() -> None:
    foreign = ToyWorker(slow_profile(1))  # answers the profile, whatever is asked
    grid = Batches(Clocked(unnamed(0), 1.0), foreign)
    with captured_log() as log:
        roster = roster_on(grid, auto=False)
        roster.update(grid)
    assert len(foreign.messages) == 2
    assert len(log.warnings) == 1
    assert len(roster.active) == 2


def test_node_without_profile_handler_does_not_make_the_others_measure() -> None:
    named = Clocked(slow_profile(1), 1.0)
    roster_on(Batches(ToyWorker(None), named), auto=False)
    assert named.measured == 0


# --- workers that come later


def test_late_worker_is_measured_while_the_others_compute() -> None:
    nodes = [Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0)]
    grid = Batches(*nodes)
    roster = roster_on(grid)
    nodes[1].seconds = 99.0
    grid.connect(77, Clocked(slow_profile(2), 8.0))
    roster.update(grid)
    roster.update(grid)
    assert grid.together == [[50, 51], [77, 50, 51]]
    assert [worker.speed_ratio for worker in roster.workers] == [1.0, 0.25, 0.125]


def test_late_worker_is_measured_alone_on_the_device_clock() -> None:
    grid = Batches(Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0))
    roster = roster_on(grid, clock="device")
    grid.connect(77, Clocked(slow_profile(2), 8.0))
    roster.update(grid)
    assert grid.together == [[50], [51], [77]]


def test_worker_that_comes_back_is_measured_anew() -> None:
    grid = Batches(Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0))
    roster = roster_on(grid)
    grid.disconnect(51)
    roster.update(grid)
    grid.connect(77, Clocked(slow_profile(1), 2.0))
    roster.update(grid)
    assert [worker.speed_ratio for worker in roster.workers] == [1.0, 0.5]


def test_late_worker_without_a_speed_that_it_needs_takes_no_part_and_the_run_goes_on() -> None:
    nodes = [Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0)]
    grid = Batches(*nodes)
    late = Clocked(slow_profile(2), None)
    strategy = BiasedLocalSGD(100, 2, local_steps=8)

    def connect(record: Any) -> None:
        if record.round == 1:
            grid.connect(77, late)

    with captured_log() as log:
        result = strategy.fit(grid, toy_arrays(), epochs=3, on_round=connect)
    assert isinstance(next(iter(result.train_metrics_clientapp.values())), MetricRecord)
    assert late.orders == []
    assert "does not take part" in log.errors[0]


# --- before anything is measured


def tiers(*profiles: WorkerProfile) -> list[str]:
    filled = before_measuring(profiles)
    assert all(profile.seconds_per_step > 0 for profile in filled)
    return [profile.tier for profile in filled]


def test_before_measuring_unnamed_workers_may_be_of_either_tier() -> None:
    assert tiers(unnamed(0), unnamed(1), unnamed(2)) == ["fast", "slow", "fast"]
    assert tiers(fast_profile(0), unnamed(1)) == ["fast", "slow"]
    assert tiers(unnamed(0), slow_profile(1)) == ["fast", "slow"]
    assert tiers(slow_profile(0), slow_profile(1)) == ["slow", "slow"]
    assert tiers(unnamed(0)) == ["fast"]  # the fastest of all


def test_before_measuring_known_speeds_are_kept() -> None:
    (profile,) = before_measuring([fast_profile(0, seconds_per_step=0.25)])
    assert profile.seconds_per_step == 0.25
