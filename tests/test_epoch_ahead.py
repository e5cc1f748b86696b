"""An epoch that is planned ahead is the one that would have been planned when it was due."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.batch_shares import BalancedBatches
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.sampling import EpochRequest, Pool, SeparatedSampler
from flower_blsgd.planner import Planner
from flower_blsgd.roster import Worker

from .in_process_grid import InProcessGrid, ToyWorker, fast_profile, slow_profile, toy_arrays
from .test_planner import planner_of, team

WAIT_SECONDS = 60.0


class Watched:
    """A sampler that notes in which thread each epoch was planned."""

    needs_both_tiers = True

    def __init__(self, fail_at: Sequence[str] = ()) -> None:
        self.calls: list[tuple[int, str]] = []
        self.called = threading.Semaphore(0)
        self._fail_at = fail_at

    def pools(self, request: EpochRequest, table: LossTable) -> list[Pool]:
        here = threading.current_thread() is threading.main_thread()
        self.calls.append((request.epoch, "here" if here else "ahead"))
        self.called.release()
        if self.calls[-1][1] in self._fail_at:
            raise MemoryError("no memory")
        return SeparatedSampler(0.5).pools(request, table)


def epoch_of(planner: Planner, workers: Sequence[Worker], ahead: bool) -> list[list[int]]:
    """Play one epoch of 4 rounds with losses of its own, and return its orders' samples."""
    given = []
    while True:
        orders = planner.orders(planner.rounds_total + 1, workers, toy_arrays(), None)
        given += [order.indices.tolist() for _, order in orders]
        planner.readers.settle()
        for _, order in reversed(orders):
            losses = np.sin(order.indices * 7.0 + planner.rounds_total).astype(np.float32) + 1
            planner.table.record(order.indices, losses, planner.rounds_total + 1)
        planner.finish_round()
        if ahead:
            planner.plan_ahead()
        if planner.epoch_ended:
            return given


def test_plan_ahead_gives_the_same_orders() -> None:
    sampler = Watched()
    beside, due = planner_of(24, sampler=sampler), planner_of(24)
    for _ in range(4):
        assert epoch_of(beside, team(), ahead=True) == epoch_of(due, team(), ahead=False)
        assert beside.sampling_stats == due.sampling_stats or beside.epoch == 1  # nan in epoch 1
    assert sampler.calls[:4] == [(1, "here"), (2, "ahead"), (3, "ahead"), (4, "ahead")]


def test_plan_for_another_team_is_made_anew() -> None:
    three = team(fast_profile(0), fast_profile(1), slow_profile(2))
    sampler = Watched()
    beside, due = planner_of(60, sampler=sampler), planner_of(60)
    for planner, ahead in ((beside, True), (due, False)):
        epoch_of(planner, three, ahead)
    rest = [three[0], three[2]]
    assert epoch_of(beside, rest, True) == epoch_of(due, rest, False)
    assert sampler.calls[:3] == [(1, "here"), (2, "ahead"), (2, "here")]


def test_plan_ahead_leaves_out_a_worker_that_is_left_out() -> None:
    three = team(fast_profile(0), fast_profile(1), slow_profile(2))
    sampler = Watched()
    planner = planner_of(60, sampler=sampler)
    while planner.epoch == 0 or not planner.epoch_ended:
        planner.orders(1, three, toy_arrays(), None)
        planner.finish_round()
    three[1].excluded = "it raised"
    planner.plan_ahead()
    planner.orders(7, [three[0], three[2]], toy_arrays(), None)
    assert sampler.calls == [(1, "here"), (2, "ahead")]


def test_plan_after_speeds_changed_is_made_anew() -> None:
    workers = team(fast_profile(0, seconds_per_step=1.0), slow_profile(1, seconds_per_step=2.0))
    sampler = Watched()
    planner = planner_of(24, sampler=sampler)
    epoch_of(planner, workers, ahead=True)
    workers[1].speed_ratio = 0.25
    epoch_of(planner, workers, ahead=True)
    assert sampler.calls[:3] == [(1, "here"), (2, "ahead"), (2, "here")]


def test_error_of_a_plan_ahead_is_raised_where_it_is_due() -> None:
    planner = planner_of(24, sampler=Watched(fail_at=("ahead", "here")))
    planner.sampler = planner._ahead._sampler = SeparatedSampler(0.5)
    epoch_of(planner, team(), ahead=False)
    planner._ahead._sampler = failing = Watched(fail_at=("ahead", "here"))
    planner.plan_ahead()
    assert failing.called.acquire(timeout=WAIT_SECONDS)
    with pytest.raises(MemoryError, match="no memory"):
        planner.orders(5, team(), toy_arrays(), None)
    assert [where for _, where in failing.calls] == ["ahead", "here"]


def test_plan_that_failed_ahead_only_is_made_again() -> None:
    sampler = Watched(fail_at=("ahead",))
    beside, due = planner_of(24, sampler=sampler), planner_of(24)
    for _ in range(3):
        assert epoch_of(beside, team(), True) == epoch_of(due, team(), False)


def test_nothing_is_planned_ahead_in_mid_epoch_nor_after_the_last() -> None:
    planner = planner_of(24)
    planner.last_epoch = 2
    begun: list[tuple[int, int]] = []
    planner._ahead.begin = lambda request: begun.append(  # type: ignore[method-assign]
        (request.epoch, planner.rounds_total)
    )
    for _ in range(2):
        epoch_of(planner, team(), ahead=True)
    assert begun == [(2, 4)]


def test_nothing_is_planned_ahead_for_steps_that_follow_speeds() -> None:
    sampler = Watched()
    planner = planner_of(200, sampler=sampler, step_policy=BalancedBatches())
    workers = team(fast_profile(0), slow_profile(1))
    epoch_of(planner, workers, ahead=True)
    epoch_of(planner, workers, ahead=True)
    assert sampler.calls == [(1, "here"), (2, "here")]


# --- in a run


def run_of(strategy: BiasedLocalSGD, **settings: Any) -> list[list[int]]:
    grid = InProcessGrid({1: ToyWorker(fast_profile(0), 1.0), 2: ToyWorker(slow_profile(1), 4.0)})
    strategy.fit(grid, toy_arrays(), **settings)
    return [o.indices.tolist() for node in (1, 2) for o in grid.handlers[node].orders]  # type: ignore[attr-defined]


def test_fit_plans_ahead_and_not_beyond_its_epochs() -> None:
    sampler = Watched()
    settings: dict[str, Any] = {"batch_size": 2, "local_steps": 2, "local_steps_slow": 1}
    ahead = run_of(BiasedLocalSGD(12, sampler=sampler, **settings), epochs=4)
    assert sampler.calls == [(1, "here"), (2, "ahead"), (3, "ahead"), (4, "ahead")]
    strategy = BiasedLocalSGD(12, sampler=SeparatedSampler(0.5), **settings)
    strategy.planner.plan_ahead = lambda: None  # type: ignore[method-assign]
    assert run_of(strategy, epochs=4) == ahead


def test_fit_reads_the_losses_of_before_the_epoch_for_its_statistics() -> None:
    """The loss of a sample is its index; those of the first round come in meanwhile."""
    settings: dict[str, Any] = {"batch_size": 2, "local_steps": 2, "local_steps_slow": 1}
    seen: dict[int, float] = {}
    ages: dict[int, float] = {}
    strategy = BiasedLocalSGD(12, sampler=Watched(), **settings)
    planner = strategy.planner

    def on_epoch(end: Any) -> None:
        seen[end.epoch] = planner.sampling_stats.share_never_seen
        ages[end.epoch] = planner.loss_age(end.round).result()

    run_of(strategy, epochs=3, on_epoch=on_epoch)
    assert seen[1] == 1.0
    assert 0 < seen[2] < 1
    rounds = planner.table.rounds
    assert ages[3] == 6 - rounds[rounds > 0].mean()
