"""Epoch after epoch: who gets which order, and what happens when the team changes."""

import dataclasses

import numpy as np
import pytest
from flwr.serverapp.exception import AggregationError

from flower_blsgd.algorithm.batch_shares import BalancedBatches
from flower_blsgd.algorithm.learning_rate import LearningRate
from flower_blsgd.algorithm.local_steps import SameSteps, SystemAwareSteps
from flower_blsgd.algorithm.sampling import SeparatedSampler, UniformSampler
from flower_blsgd.algorithm.train_on import TrainOnFast
from flower_blsgd.errors import UsageError
from flower_blsgd.planner import OrderSettings, Planner
from flower_blsgd.profile_query import Introduction
from flower_blsgd.protocol import TrainOrder, WorkerProfile
from flower_blsgd.roster import Roster, Worker

from .in_process_grid import fast_profile, slow_profile, toy_arrays
from .log_capture import captured_log


def planner_of(num_samples: int = 24, batch_size: int = 2, **changes: object) -> Planner:
    """Return a planner; with `team()` a round has 2 x (2 + 1) = 6 samples, an epoch 4 rounds."""
    arguments: dict[str, object] = {
        "step_policy": SystemAwareSteps(2, 1),
        "local_steps_fast": 2,
        "sampler": SeparatedSampler(0.5),
        "mode": "samples",
        "settings": OrderSettings(LearningRate(0.1), "keep", 0.0, seed=3),
    }
    arguments |= changes
    return Planner(num_samples, batch_size, **arguments)  # type: ignore[arg-type]


def team(*profiles: WorkerProfile) -> list[Worker]:
    return Roster.of_profiles(profiles or (fast_profile(0), slow_profile(1))).workers


def play(planner: Planner, server_round: int, workers: list[Worker]) -> list[TrainOrder]:
    orders = planner.orders(server_round, workers, toy_arrays(), None)
    planner.finish_round()
    return [order for _, order in orders]


def test_orders_carry_steps_batch_size_and_settings() -> None:
    settings = OrderSettings(LearningRate(0.1), "average", 2.5, seed=3)
    planner = planner_of(settings=settings)
    arrays, momentum = toy_arrays(1.0), toy_arrays(2.0)
    (fast_worker, fast), (slow_worker, slow) = planner.orders(9, team(), arrays, momentum)
    assert (fast_worker.fast, slow_worker.fast) == (True, False)
    assert (fast.local_steps, slow.local_steps) == (2, 1)
    assert (len(fast.indices), len(slow.indices)) == (4, 2)
    for order in (fast, slow):
        assert (order.round, order.epoch, order.batch_size) == (9, 1, 2)
        assert (order.momentum_policy, order.deadline_seconds) == ("average", 2.5)
        assert order.learning_rate == 0.1
        assert order.arrays is arrays
        assert order.momentum is momentum


def test_orders_fast_lists_of_an_epoch_hold_no_index_twice() -> None:
    planner = planner_of()
    workers = team(fast_profile(0), fast_profile(1), slow_profile(2))  # S = 10, 2 rounds
    fast, slow = [], []
    for server_round in (1, 2):
        first, second, third = play(planner, server_round, workers)
        fast += [*first.indices, *second.indices]
        slow += [*third.indices]
    assert planner.epoch_ended
    assert len(fast) == len(set(fast)) == 16
    assert len(slow) == len(set(slow)) == 4


def test_orders_an_epoch_has_as_many_rounds_as_samples_allow() -> None:
    planner = planner_of(25)  # 25 / 6 = 4.17, 8.33, 12.5, 16.67, 20.83, 25
    rounds = []
    workers = team()
    for epoch in range(1, 7):
        count = 0
        while True:
            (order, _) = play(planner, 1, workers)
            count += 1
            assert order.epoch == epoch
            if planner.epoch_ended:
                break
        rounds.append(count)
    assert rounds == [4, 4, 4, 4, 4, 5]
    assert planner.rounds_total == 25
    assert planner.samples_planned == 150


def test_orders_seed_differs_by_round_and_worker_and_repeats_with_the_run() -> None:
    def seeds(run_seed: int) -> list[int]:
        settings = OrderSettings(LearningRate(0.1), "keep", 0.0, run_seed)
        planner = planner_of(settings=settings)
        workers = team()
        return [order.seed for r in (1, 2, 3) for order in play(planner, r, workers)]

    assert len(set(seeds(3))) == 6
    assert seeds(3) == seeds(3)
    assert not set(seeds(3)) & set(seeds(4))


def test_orders_hardest_samples_go_to_the_fast_worker_in_the_second_epoch() -> None:
    planner = planner_of(24, sampler=SeparatedSampler(1.0))
    workers = team()
    for server_round in range(1, 5):
        play(planner, server_round, workers)
    planner.table.record(
        np.arange(24, dtype=np.int32), np.arange(24, dtype=np.float32), server_round=4
    )
    chosen = [i for r in range(5, 9) for i in play(planner, r, workers)[0].indices]
    assert sorted(chosen) == list(range(8, 24))  # the 4 x 4 highest of 24
    stats = planner.sampling_stats
    assert stats.share_left_out == pytest.approx(8 / 24)
    assert stats.fast_picked_loss_mean == 15.5  # of 8 to 23
    assert stats.all_loss_mean == 11.5


def test_sampling_stats_are_those_of_the_losses_before_the_epoch() -> None:
    """Four rounds an epoch; the ages are those when the second one begins."""
    planner = planner_of(24)
    workers = team()
    planner.orders(1, workers, toy_arrays(), None)
    assert planner.sampling_stats.share_never_seen == 1.0
    planner.table.record(np.arange(12, dtype=np.int32), np.ones(12, np.float32), 1)
    assert planner.sampling_stats.share_never_seen == 1.0
    planner.finish_round()
    for server_round in (2, 3, 4, 5):
        play(planner, server_round, workers)
    planner.table.record(np.arange(24, dtype=np.int32), np.full(24, 9.0, np.float32), 5)
    assert planner.epoch == 2
    stats = planner.sampling_stats
    assert (stats.all_loss_mean, stats.share_never_seen) == (1.0, 0.5)
    assert stats.loss_age_epochs_mean == 3 / 4  # of round 1, after round 4


def test_sampling_stats_age_counts_epochs_as_long_as_they_were() -> None:
    """A worker more makes this epoch shorter, not the losses older."""
    planner = planner_of(60)
    two = team()
    three = team(fast_profile(0), fast_profile(1), slow_profile(2))
    for server_round in range(1, 11):
        play(planner, server_round, two)
    planner.table.record(np.arange(60, dtype=np.int32), np.ones(60, np.float32), 5)
    play(planner, 11, three)
    assert planner.epoch == 2
    assert planner.plan.rounds == 6
    assert planner.sampling_stats.loss_age_epochs_mean == 5 / 10


def test_orders_uniform_sampler_deals_every_sample_once() -> None:
    planner = planner_of(24, sampler=UniformSampler())
    workers = team()
    dealt = [i for r in range(1, 5) for order in play(planner, r, workers) for i in order.indices]
    assert sorted(dealt) == list(range(24))


def test_orders_learning_rate_follows_plain_epochs() -> None:
    settings = OrderSettings(LearningRate(1.0, decay_epochs=(1, 2)), "keep", 0.0, 0)
    planner = planner_of(12, settings=settings)  # 2 rounds an epoch
    rates = [play(planner, r, team())[0].learning_rate for r in range(1, 7)]
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


def test_orders_learning_rate_follows_the_budget_at_the_start_of_an_epoch() -> None:
    settings = OrderSettings(LearningRate(1.0, decay_shares=(0.5,)), "keep", 0.0, 0)
    planner = planner_of(12, settings=settings)
    shares = iter([0.0, 0.49, 0.5])
    planner.budget_share = lambda: next(shares)  # asked once per epoch
    rates = [play(planner, r, team())[0].learning_rate for r in range(1, 7)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.1, 0.1])


def test_orders_learning_rate_warms_up_round_by_round() -> None:
    settings = OrderSettings(LearningRate(1.0, warmup_epochs=2), "keep", 0.0, 0)
    planner = planner_of(12, settings=settings)
    rates = [play(planner, r, team())[0].learning_rate for r in range(1, 7)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


# --- the team changes


def test_absent_worker_has_no_order_and_its_samples_are_given_up() -> None:
    planner = planner_of()
    workers = team()
    play(planner, 1, workers)
    (order,) = play(planner, 2, workers[:1])
    assert order.local_steps == 2
    assert planner.samples_given_up == 2
    play(planner, 3, workers)
    assert planner.samples_given_up == 2


def test_worker_that_is_back_takes_up_its_own_slices() -> None:
    steady, changing = planner_of(), planner_of()
    workers = team()
    expected = [play(steady, r, workers)[1].indices.tolist() for r in (1, 2, 3)]
    play(changing, 1, workers)
    play(changing, 2, workers[:1])
    assert play(changing, 3, workers)[1].indices.tolist() == expected[2]


def test_new_worker_joins_at_the_next_epoch() -> None:
    planner = planner_of(12)  # 2 rounds an epoch
    roster = Roster.of_profiles([fast_profile(0), slow_profile(1)])
    play(planner, 1, roster.workers)
    roster._admit([Introduction(300, None, slow_profile(2))])
    assert len(play(planner, 2, roster.workers)) == 2
    assert len(play(planner, 3, roster.workers)) == 3


def test_epochs_stay_on_the_budget_when_the_team_changes() -> None:
    planner = planner_of(60)
    three = team(fast_profile(0), fast_profile(1), slow_profile(2))  # S = 10
    for server_round in range(1, 7):
        play(planner, server_round, three)
    assert planner.epoch_ended
    two = [three[0], three[2]]  # S = 6
    rounds = 0
    while planner.epoch == 1 or not planner.epoch_ended:
        play(planner, 7, two)
        rounds += 1
    assert rounds == 10  # (2 x 60 - 60) / 6


def test_all_planned_workers_gone_begins_a_new_epoch_with_the_others() -> None:
    planner = planner_of()
    first, second = team(fast_profile(0), slow_profile(1)), team(fast_profile(2), slow_profile(3))
    play(planner, 1, first)
    orders = play(planner, 2, second)
    assert planner.epoch == 2
    assert len(orders) == 2
    assert planner.rounds_done == 1


def test_samples_planned_are_trained_or_given_up_also_when_everybody_is_gone() -> None:
    planner = planner_of()
    first, second = team(fast_profile(0), slow_profile(1)), team(fast_profile(2), slow_profile(3))
    trained = sum(len(order.indices) for order in play(planner, 1, first))
    while planner.epoch < 2 or not planner.epoch_ended:
        trained += sum(len(order.indices) for order in play(planner, 2, second))
    assert trained + planner.samples_given_up == planner.samples_planned


@pytest.mark.parametrize(("left", "gone"), [(0, "slow"), (1, "fast")])
def test_lost_tier_makes_one_warning_and_the_rest_goes_on(left: int, gone: str) -> None:
    planner = planner_of(12)
    workers = team()
    play(planner, 1, workers)
    with captured_log() as log:
        for server_round in range(2, 12):
            (order,) = play(planner, server_round, [workers[left]])
            assert len(order.indices) == order.local_steps * 2
    (warning,) = log.warnings
    assert gone in warning
    assert planner.epoch >= 3


def test_lost_tier_is_told_also_when_no_other_epoch_follows() -> None:
    planner = planner_of(24)
    workers = team()
    play(planner, 1, workers)
    with captured_log() as log:
        for server_round in (2, 3, 4):
            play(planner, server_round, workers[:1])
    assert planner.epoch_ended
    assert len(log.warnings) == 1


# --- what is refused


@pytest.mark.parametrize(
    ("profile", "missing"), [(slow_profile(0), "no fast worker"), (fast_profile(0), "no slow")]
)
def test_check_separated_sampler_needs_both_tiers(profile: WorkerProfile, missing: str) -> None:
    with pytest.raises(UsageError, match=missing) as told:
        planner_of().check(team(profile))
    assert "uniform" in str(told.value)
    with pytest.raises(UsageError, match=missing):
        planner_of().orders(1, team(profile), toy_arrays(), None)


@pytest.mark.parametrize("slow_sums", [True, False])
def test_check_training_on_fast_workers_needs_one_whatever_the_sampler(slow_sums: bool) -> None:
    for sampler in (UniformSampler(), SeparatedSampler()):
        planner = planner_of(sampler=sampler, train_on=TrainOnFast(slow_sums))
        for refuse in (
            lambda p: p.check(team(slow_profile(0))),
            lambda p: p.orders(1, team(slow_profile(0)), toy_arrays(), None),
        ):
            with pytest.raises(UsageError, match=r"no fast worker among slow-0.*name one fast"):
                refuse(planner)


def test_check_slow_workers_that_sum_must_be_there() -> None:
    planner = planner_of(sampler=UniformSampler(), train_on=TrainOnFast(slow_sums=True))
    with pytest.raises(UsageError, match=r'no slow worker among fast-0.*train-on = "fast"'):
        planner.check(team(fast_profile(0)))
    assert planner.check(team()).local_steps == (2,)


def test_check_separated_sampler_is_content_with_fast_workers_where_only_they_train() -> None:
    planner = planner_of(train_on=TrainOnFast())
    assert planner.check(team(fast_profile(0))).local_steps == (2,)
    assert planner.check(team()).local_steps == (2,)


def test_check_policy_that_refuses_the_team_names_a_batch_that_it_accepts() -> None:
    workers = team(fast_profile(0, seconds_per_step=0.01), slow_profile(1, seconds_per_step=1.0))
    changes = {"step_policy": BalancedBatches(), "sampler": UniformSampler()}
    with pytest.raises(UsageError, match="use batch-size = 76 or more"):
        planner_of(1000, batch_size=32, **changes).check(workers)
    assert planner_of(1000, batch_size=76, **changes).check(workers).batch_sizes == (150, 2)


def test_orders_go_to_those_that_train_only() -> None:
    planner = planner_of(24, sampler=UniformSampler(), train_on=TrainOnFast())
    workers = team()
    dealt = []
    for server_round in range(1, 7):  # 24 samples, 4 in a round
        ((worker, order),) = planner.orders(server_round, workers, toy_arrays(), None)
        planner.finish_round()
        assert worker.fast
        dealt += order.indices.tolist()
    assert planner.epoch_ended
    assert sorted(dealt) == list(range(24))
    assert planner.sampling_stats.share_left_out == 0.0


def test_orders_without_the_last_worker_that_trains_end_the_run() -> None:
    planner = planner_of(24, sampler=UniformSampler(), train_on=TrainOnFast())
    workers = team()
    play(planner, 1, workers)
    with captured_log() as log, pytest.raises(AggregationError, match="no worker is left"):
        play(planner, 2, workers[1:])
    assert "the last fast worker is gone" in log.warnings[0]


def test_check_uniform_sampler_needs_no_tier() -> None:
    planner = planner_of(sampler=UniformSampler())
    assert planner.check(team(slow_profile(0))).local_steps == (1,)


def test_check_names_the_largest_batch_that_fits() -> None:
    with pytest.raises(UsageError, match="batch-size = 13") as told:
        planner_of(24, batch_size=13).check(team())
    assert "batch-size = 12" in str(told.value)
    assert planner_of(24, batch_size=12).check(team()).local_steps == (1, 1)


def test_check_shrinks_steps_until_a_round_fits() -> None:
    # 2 x (8 + 4) = 24 > 20; k = 6 gives 2 x (6 + 3) = 18; k = 7 gives 2 x (7 + 3) = 20.
    planner = planner_of(20, step_policy=SystemAwareSteps(8, 4))
    assert planner.check(team()).local_steps == (7, 3)


def test_check_slow_steps_without_a_speed_are_refused_with_the_way_out() -> None:
    planner = planner_of(step_policy=SystemAwareSteps(8, None))
    with pytest.raises(UsageError, match="local-steps-slow"):
        planner.check(team())


def test_check_slow_steps_follow_the_reported_speed() -> None:
    planner = planner_of(200, step_policy=SystemAwareSteps(8, None))
    workers = team(fast_profile(0, seconds_per_step=1.0), slow_profile(1, seconds_per_step=4.0))
    assert planner.check(workers).local_steps == (8, 2)


def test_check_steps_of_a_worker_hold_for_the_system_aware_policy_only() -> None:
    workers = team(fast_profile(0), slow_profile(1, steps=3))
    aware = planner_of(200, step_policy=SystemAwareSteps(8, 4))
    assert aware.check(workers).local_steps == (8, 3)
    same = planner_of(200, step_policy=SameSteps(8))
    assert same.check(workers).local_steps == (8, 8)


def test_settings_are_frozen() -> None:
    settings = OrderSettings(LearningRate(0.1), "keep", 0.0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 1  # type: ignore[misc]
