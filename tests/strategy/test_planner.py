"""Epoch after epoch: each worker's orders, also when workers leave and join."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.exception import AggregationError

from flower_blsgd.algorithm.catalog import TrainOn
from flower_blsgd.algorithm.local_steps import SystemAwareSteps
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.randomness import generator
from flower_blsgd.algorithm.sampling import (
    SeparatedSampler,
    UniformSampler,
    permutation_stream,
)
from flower_blsgd.algorithm.selection import (
    InfoBatch,
    Selected,
    Selection,
    SelectionRequest,
)
from flower_blsgd.protocol import TrainOrder, WorkerProfile
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.planner import Planner
from flower_blsgd.strategy.workers import Worker, WorkerRegistry

from ..in_process_grid import fast_profile, slow_profile, toy_arrays, unnamed_profile
from ..refusal import refusal
from .orders import finish, planner_of


def workers_of(*profiles: WorkerProfile) -> list[Worker]:
    """Return workers; with the two by default a round has 2 x (2 + 1) = 6 samples."""
    return WorkerRegistry.of_profiles(profiles or (fast_profile(0), slow_profile(1))).workers


def three() -> list[Worker]:
    """Return workers whose round has 10 samples."""
    return workers_of(fast_profile(0), fast_profile(1), slow_profile(2))


def play(planner: Planner, server_round: int, workers: list[Worker]) -> list[TrainOrder]:
    pairs = planner.next_round(server_round, workers, toy_arrays()).orders
    finish(planner, pairs)
    orders = [order for _, order in pairs]
    return orders


@dataclass(frozen=True)
class Subset(Selection):
    """A random subset in each epoch, as an extension might choose it."""

    size: int

    def select(self, request: SelectionRequest, table: LossTable) -> Selected:
        rng = generator(request.seed, "subset", request.epoch)
        chosen = rng.choice(len(table), self.size, replace=False)
        return Selected(np.sort(chosen).astype(np.int32))


def test_orders_seed_differs_by_round_and_worker_and_repeats_with_the_run() -> None:
    def seeds(run_seed: int) -> list[int]:
        planner = planner_of(seed=run_seed)
        return [order.seed for r in (1, 2, 3) for order in play(planner, r, workers_of())]

    assert len(set(seeds(3))) == 6
    assert seeds(3) == seeds(3)
    assert not set(seeds(3)) & set(seeds(4))


def test_orders_seed_of_a_worker_is_the_same_without_the_others() -> None:
    of_three, of_two = (
        {worker.index: order.seed for worker, order in planner_of().next_round(*who).orders}
        for who in ((1, three(), toy_arrays()), (1, three()[1:], toy_arrays()))
    )
    assert of_two == {1: of_three[1], 2: of_three[2]}


@pytest.mark.parametrize(
    ("selection", "most"),
    [(Subset(30), 30), (Subset(21), 21), (InfoBatch(), 60), (None, 60)],
    ids=str,
)
def test_epochs_of_fewer_samples_are_as_much_shorter(
    selection: Selection | None, most: int
) -> None:
    """A round has 6 samples; all epochs together are within one round of what they should be."""
    planner = planner_of(60, sampler=UniformSampler(), selection=selection)
    infobatch = isinstance(selection, InfoBatch)
    planner.budget = Budget(epochs=9)
    due, server_round = 0, 0
    for epoch in range(1, 10):
        orders: list[TrainOrder] = []
        while not orders or not planner.epoch_ended:
            server_round += 1
            orders += play(planner, server_round, workers_of())
            given = np.concatenate([order.indices for order in orders[-2:]])
            planner.table.record(given, given.astype(np.float32), server_round)
        pruned = infobatch and 1 < epoch < 9  # epoch 9 begins at 8 / 9 of the budget
        due += 45 if pruned else most  # below the mean are 30: 15 of them are left out
        assert planner.progress.samples_due == due
        assert (
            planner.progress.samples_planned
            == planner.progress.samples_trained
            == planner.samples_planned_so_far
        )
        assert 0 <= due - planner.progress.samples_planned < 6
        assert (planner.progress.epoch, planner.epochs_done) == (epoch, epoch)
        if planner.settings.selection:  # no sample twice before each of them was there once
            size = 45 if pruned else most
            given = np.concatenate([order.indices for order in orders])
            assert len(np.unique(given)) == min(size, len(given))
        for order in orders:
            low = order.indices < 29.5
            weights = np.ones(len(low)) if order.sample_weights is None else order.sample_weights
            assert weights.tolist() == (1 + low * pruned).tolist()


def test_a_round_fits_into_an_epoch_of_fewer_samples() -> None:
    """Of 60 samples a round of 2 x (16 + 8) would have 48; with 10 + 5 steps it has 30."""
    policy = SystemAwareSteps(16, 8)
    planner = planner_of(60, step_policy=policy, sampler=UniformSampler(), selection=Subset(30))
    for epoch in range(1, 4):
        orders = play(planner, epoch, workers_of())
        assert [order.local_steps for order in orders] == [10, 5]
        assert (planner.progress.epoch, planner.progress.samples_planned) == (epoch, 30 * epoch)
        assert len(np.unique(np.concatenate([order.indices for order in orders]))) == 30
    few = planner_of(60, step_policy=policy, sampler=UniformSampler(), selection=Subset(1))
    assert [order.local_steps for order in play(few, 1, workers_of())] == [1, 1]


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        ([1, 2], "returned a list; it must return a Selected"),
        (Selected(np.arange(24)), "its indices must be int32"),
        (Selected(np.array([], np.int32)), "M at least 1"),
        (Selected(np.array([3, 3], np.int32)), "without repetitions"),
        (Selected(np.array([0, 24], np.int32)), r"in \[0, 23\]"),
        (Selected(np.array([0, 9], np.int32), np.ones(2, np.float32)), r"of shape \(24,\)"),
        (Selected(np.array([0], np.int32), -np.ones(24, np.float32)), "at least 0"),
    ],
)
def test_selection_of_ones_own_is_checked(returned: Any, wrong: str) -> None:
    class Own(Selection):
        def select(self, request: SelectionRequest, table: LossTable) -> Selected | None:
            return returned  # type: ignore[no-any-return]

    line = refusal(play, planner_of(24, selection=Own()), 1, workers_of())
    assert re.match(rf"Own.select.*{wrong}", line)


def test_sampling_stats_are_those_of_the_losses_before_the_epoch() -> None:
    """Four rounds an epoch; the ages are those when the second one begins."""
    planner = planner_of(24)
    play(planner, 1, workers_of())
    planner.table.record(np.arange(12, dtype=np.int32), np.ones(12, np.float32), 1)
    assert planner.sampling_stats.share_never_seen == 1.0
    for server_round in (2, 3, 4, 5):
        play(planner, server_round, workers_of())
    planner.table.record(np.arange(24, dtype=np.int32), np.full(24, 9.0, np.float32), 5)
    assert planner.progress.epoch == 2
    stats = planner.sampling_stats
    assert (stats.all_loss_mean, stats.share_never_seen) == (1.0, 0.5)
    assert stats.loss_age_epochs_mean == 3 / 4  # of round 1, after round 4


def test_sampling_stats_age_counts_epochs_as_long_as_they_were() -> None:
    """A worker more makes this epoch shorter, not the losses older."""
    planner = planner_of(60)
    for server_round in range(1, 11):
        play(planner, server_round, workers_of())
    planner.table.record(np.arange(60, dtype=np.int32), np.ones(60, np.float32), 5)
    play(planner, 11, three())
    assert (planner.progress.epoch, planner.plan.rounds) == (2, 6)
    assert planner.sampling_stats.loss_age_epochs_mean == 5 / 10


# --- rounds that measure speeds


@pytest.mark.parametrize("mode", ["samples", "table"])
@pytest.mark.parametrize("seed", range(6))
def test_epochs_have_their_samples_and_progress_never_decreases_with_rounds_that_measure(
    seed: int, mode: str
) -> None:
    draw = np.random.default_rng(seed)
    num_samples, steps = int(draw.integers(4, 400)), int(draw.integers(1, 20))
    planner = planner_of(
        num_samples, step_policy=SystemAwareSteps(steps), sampler=UniformSampler(), mode=mode
    )
    workers = workers_of(unnamed_profile(0, 0.0), unnamed_profile(1, 0.0))
    planner.measured, done, largest, drawn = {}, [0.0], 0, []
    for server_round in range(1, 80):
        if server_round == 6:
            planner.measured = None
        orders = play(planner, server_round, workers)
        if planner.measured is not None:
            seconds = (0.01 * draw.random(2)).tolist()
            planner.measured = dict(enumerate(seconds))
        drawn += [order.indices for order in orders]
        done.append(planner.epochs_done)
        assert planner.samples_planned_so_far == planner.progress.samples_trained
        assert planner.epochs_done <= planner.progress.epoch
        assert planner.epoch_ended == (planner.epochs_done == planner.progress.epoch)
        if planner.epoch_ended and mode == "samples":
            largest = max(largest, sum(planner.plan.shape.samples_per_round))
            assert (
                abs(planner.progress.epoch * num_samples - planner.progress.samples_planned)
                < largest
            )
    assert done == sorted(done)
    found = np.concatenate(drawn)
    assert found.tolist() == permutation_stream(3, num_samples, 0, len(found)).tolist()


def test_state_of_version_0_1_0_has_no_rest_of_an_epoch() -> None:
    planner, workers = planner_of(24), workers_of()
    play(planner, 1, workers)
    state = planner.state_dict()
    for name in ("rounds_before", "share_before"):
        del state["counters"][name]
    resumed = planner_of(24)
    resumed.load_state_dict(state, workers)
    assert resumed.measured is None
    assert resumed.epochs_done == planner.epochs_done == 1 / 4
    del state["counters"]["epoch"]
    with pytest.raises(ValueError, match="another version"):
        resumed.load_state_dict(state, workers)


def test_rest_of_an_epoch_has_other_samples_than_its_first_rounds() -> None:
    """For samplers that draw anew, with the same seed, when the rest of the epoch is planned."""
    planner = planner_of(240, sampler=SeparatedSampler(0.0))
    planner.measured = {}
    given = []
    for server_round in range(1, 5):
        given.append(play(planner, server_round, workers_of())[0].indices)
    assert len(np.unique(np.concatenate(given))) > len(given[0])
    assert len({tuple(indices[:2]) for indices in given}) == 4


# --- workers leave and join


def test_absent_worker_has_no_order_and_takes_up_its_own_slices_when_it_is_back() -> None:
    steady, changing = planner_of(), planner_of()
    workers = workers_of()
    expected = [play(steady, r, workers)[1].indices.tolist() for r in (1, 2, 3)]
    play(changing, 1, workers)
    (order,) = play(changing, 2, workers[:1])
    assert order.local_steps == 2
    assert changing.samples_given_up == 2
    assert play(changing, 3, workers)[1].indices.tolist() == expected[2]
    assert changing.samples_given_up == 2


# --- what is refused


@pytest.mark.parametrize(
    ("profile", "missing"), [(slow_profile(0), "no fast worker"), (fast_profile(0), "no slow")]
)
def test_separated_sampler_needs_both_tiers(profile: WorkerProfile, missing: str) -> None:
    workers = workers_of(profile)
    assert re.search(rf'{missing}.*use sampler = "uniform"', refusal(planner_of().check, workers))
    assert missing in refusal(planner_of().next_round, 1, workers, toy_arrays())
    assert planner_of(sampler=UniformSampler()).check(workers).batch_sizes == (2,)


@pytest.mark.parametrize(
    ("train_on", "seconds", "fix"),
    [
        # alike but for 3 %: the slowest is to be named, of equal ones the last
        (TrainOn(), (1.03, 1.0), r"name fast-0 \(cpu:0\) slow, or use sampler = "),
        (TrainOn(), (1.0, 1.0), r"name fast-1 \(cpu:1\) slow, or use sampler = "),
        (TrainOn(True, True), (1.0, 1.0), r"name fast-1 \(cpu:1\) slow, or use train-on = "),
    ],
)
def test_workers_alike_are_refused_with_the_one_to_name(
    train_on: TrainOn, seconds: tuple[float, float], fix: str
) -> None:
    workers = workers_of(*(unnamed_profile(i, each) for i, each in enumerate(seconds)))
    line = refusal(planner_of(train_on=train_on).check, workers)
    assert re.search(rf"no slow worker among fast-0.*{fix}", line)


@pytest.mark.parametrize("slow_reduce", [True, False])
@pytest.mark.parametrize("sampler", [UniformSampler(), SeparatedSampler()])
def test_training_on_fast_workers_needs_one(slow_reduce: bool, sampler: object) -> None:
    planner = planner_of(sampler=sampler, train_on=TrainOn(True, slow_reduce))
    slow, fast = workers_of(slow_profile(0)), workers_of(fast_profile(0))
    assert re.search("no fast worker among slow-0.*name one fast", refusal(planner.check, slow))
    assert "no fast worker" in refusal(planner.next_round, 1, slow, toy_arrays())
    assert planner.check(workers_of()).local_steps == (2,)
    if slow_reduce:
        line = refusal(planner.check, fast)
        assert re.search('no slow worker among fast-0.*train-on = "fast"', line)
    else:
        assert planner.check(fast).local_steps == (2,)


def test_speed_ratios_and_tiers_follow_the_samples_per_second_where_batches_differ() -> None:
    """16, 8, 20 and 5 samples a second, of steps of 8, 8, 2 and 2: the third is the fastest."""
    policy = SystemAwareSteps(32)
    planner = planner_of(3000, batch_size=8, step_policy=policy, sampler=UniformSampler())
    seconds = {"batch_size": 0}, {"batch_size": 0}, {"batch_size": 2}, {"batch_size": 2}
    profiles = [
        WorkerProfile(f"cpu:{i}", partition_id=i, seconds_per_step=s, **own)  # type: ignore[arg-type]
        for i, (s, own) in enumerate(zip((0.5, 1.0, 0.1, 0.4), seconds, strict=True))
    ]
    workers = WorkerRegistry.of_profiles(profiles, batch_size=8).workers
    assert [worker.fast for worker in workers] == [True, False, True, False]
    assert [w.speed_ratio for w in workers] == pytest.approx([0.2, 0.1, 1.0, 0.25])
    shape = planner.check(workers)  # 32 steps of 0.1 s
    assert shape.local_steps == (6, 3, 32, 8)
    assert shape.batch_sizes == (8, 8, 2, 2)
    shape = planner.check(workers[:2] + workers[3:])  # the first is: 32 steps of 0.5 s
    assert shape.local_steps == (32, 16, 40)


def test_chosen_steps_count_the_overhead_in_steps_of_the_fastest_worker() -> None:
    """That has 10 samples in 0.2 s; the other one's steps are shorter, but of 2 samples."""
    planner = planner_of(3000, batch_size=10, step_policy=SystemAwareSteps(None))
    slow = slow_profile(1, seconds_per_step=0.1, batch_size=2)
    profiles = [fast_profile(0, seconds_per_step=0.2), slow]
    workers = WorkerRegistry.of_profiles(profiles, batch_size=10).workers
    planner.take_steps(
        planner.fewest_steps(workers, 0.02)
    )  # a tenth of a step, which is 4 % of 2.5
    assert planner.check(workers).local_steps == (4, 8)


def test_orders_go_to_those_that_train_only_and_end_with_the_last_of_them() -> None:
    planner = planner_of(24, sampler=UniformSampler(), train_on=TrainOn(fast_only=True))
    workers = workers_of()
    dealt = []
    for server_round in range(1, 7):  # 24 samples, 4 in a round
        ((worker, order),) = orders = planner.next_round(server_round, workers, toy_arrays()).orders
        finish(planner, orders)
        assert worker.fast
        dealt += order.indices.tolist()
    assert planner.epoch_ended
    assert sorted(dealt) == list(range(24))
    assert planner.sampling_stats.share_left_out == 0.0
    with pytest.raises(AggregationError, match="no worker is left"):
        play(planner, 7, workers[1:])
