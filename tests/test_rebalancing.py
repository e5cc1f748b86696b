"""Steps that follow the speeds while training goes on."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.batch_shares import BalancedBatches
from flower_blsgd.algorithm.local_steps import BySpeedSteps, SameSteps, SystemAwareSteps
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.run_prediction import predict_run
from flower_blsgd.protocol import TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.rebalancing import FALL, RISE, Rebalancing
from flower_blsgd.roster import Roster
from flower_blsgd.round_replies import Outcome
from flower_blsgd.run import make_strategy

from .in_process_grid import InProcessGrid, ToyWorker, fast_profile, slow_profile, toy_arrays
from .log_capture import captured_log

Pace = Callable[[int], float]
"""Epoch -> seconds per step of the common batch size, 2."""


class Paced(ToyWorker):
    """Says that its steps take as long as its pace says."""

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


def play(
    slow_pace: Pace,
    epochs: int = 6,
    fast_pace: Pace = lambda epoch: 1.0,
    num_samples: int = 240,
    **changes: Any,
) -> tuple[Paced, Paced, BiasedLocalSGD]:
    """A fast worker with 16 steps of 1 s and a slow one: an epoch of 240 samples has 5 rounds."""
    fast = Paced(fast_profile(0, seconds_per_step=1.0), fast_pace)
    slow = Paced(slow_profile(1, seconds_per_step=2.0), slow_pace)
    arguments = {"local_steps": SystemAwareSteps(16), "rebalance": True} | changes
    strategy = BiasedLocalSGD(num_samples, 2, min_available_nodes=2, **arguments)
    strategy.fit(InProcessGrid({10: fast, 20: slow}), toy_arrays(), epochs=epochs)
    return fast, slow, strategy


def waiting(steps: Sequence[int], seconds_per_step: Sequence[float]) -> float:
    """Return the largest share of a round that somebody waits."""
    computing = [n * s for n, s in zip(steps, seconds_per_step, strict=True)]
    return 1 - min(computing) / max(computing)


# --- whole runs


def test_worker_that_becomes_four_times_slower_does_fewer_steps_within_two_epochs() -> None:
    with captured_log() as log:
        fast, slow, strategy = play(four_times_slower)
    assert fast.steps_of_epochs == [16] * 6
    # Five rounds at 0.4 of the newest: 8 - 0.6^5 x 6 = 7.53 s, gamma 0.133: 2.13 of 16 steps.
    # The last 0.5 s come in epoch 4: gamma 0.126 is 5 % off, within the dead band.
    assert slow.steps_of_epochs == [8, 8, 8, 2, 2, 2]
    told = [line for line in log.lines() if line.startswith("speeds changed")]
    assert len(told) == 1
    assert "7.5 s a step measured, gamma 0.13" in told[0]
    # Before: 16 s and 8 x 8 s. After: 16 s and 2 x 8 s.
    assert waiting([16, 8], [1.0, 8.0]) == 0.75
    assert waiting([16, 2], [1.0, 8.0]) < 0.1
    prediction = predict_run(strategy, strategy.roster.active)
    assert prediction is not None
    assert prediction.local_steps == (16, 2)
    assert prediction.fast_waiting_share is not None
    assert prediction.slow_waiting_share is not None
    assert max(prediction.fast_waiting_share, prediction.slow_waiting_share) < 0.1


def test_without_rebalance_the_steps_stay() -> None:
    with captured_log() as log:
        fast, slow, strategy = play(four_times_slower, rebalance=False)
    assert (fast.steps_of_epochs, slow.steps_of_epochs) == ([16] * 6, [8] * 6)
    assert strategy.roster.workers[1].profile.seconds_per_step == 2.0
    assert not [line for line in log.lines() if line.startswith("speeds changed")]


def test_worker_that_becomes_faster_does_more_steps() -> None:
    _, slow, _ = play(lambda epoch: 2.0 if epoch <= 1 else 1.0)
    assert slow.steps_of_epochs[:2] == [8, 8]
    assert slow.steps_of_epochs[2:] == [15, 15, 15, 15]  # 1.08 s: gamma 0.928, 14.8 steps


def test_fast_worker_that_is_throttled_gives_the_slow_one_more_steps() -> None:
    """Gamma is relative: tau_fast is the user's, the others follow."""
    fast, slow, _ = play(lambda epoch: 2.0, fast_pace=lambda epoch: 1.0 if epoch <= 2 else 1.5)
    assert fast.steps_of_epochs == [16] * 6
    assert slow.steps_of_epochs[:3] == [8, 8, 8]
    assert slow.steps_of_epochs[3] == 12  # 1.46 / 2 x 16 = 11.7


@pytest.mark.parametrize(("pace", "steps"), [(2.15, 8), (1.65, 8), (2.35, 7), (1.55, 10)])
def test_dead_band(pace: float, steps: int) -> None:
    """Gamma 0.465 and 0.606 are within a tenth below 0.5 and a quarter above; 0.426, 0.645 not."""
    _, slow, strategy = play(lambda epoch: pace, epochs=3)
    assert slow.steps_of_epochs == [8, steps, steps]
    known = strategy.roster.workers[1].profile.seconds_per_step
    assert known == (2.0 if steps == 8 else pytest.approx(pace))


def test_noise_within_the_dead_band_changes_nothing_ever() -> None:
    noise = [1.0, 1.06, 0.95, 1.07, 0.94, 1.02, 0.97, 1.05]
    with captured_log() as log:
        _, slow, _ = play(lambda epoch: 2.0 * noise[epoch - 1], epochs=8)
    assert slow.steps_of_epochs == [8] * 8
    assert not [line for line in log.lines() if line.startswith("speeds changed")]


def test_at_most_one_change_an_epoch_however_wild_the_speeds() -> None:
    rounds = iter(range(10**6))

    class Wild(Paced):
        def report(self, order: TrainOrder) -> TrainReport:
            self.pace = lambda epoch: (2.0, 16.0, 1.0)[next(rounds) % 3]
            return super().report(order)

    slow = Wild(slow_profile(1, seconds_per_step=2.0), lambda epoch: 2.0)
    fast = Paced(fast_profile(0, seconds_per_step=1.0), lambda epoch: 1.0)
    strategy = BiasedLocalSGD(240, 2, SystemAwareSteps(16), rebalance=True, min_available_nodes=2)
    with captured_log() as log:
        strategy.fit(InProcessGrid({10: fast, 20: slow}), toy_arrays(), epochs=7)
    assert len(slow.steps_of_epochs) == 7  # which checks that they are one number in each
    told = [line for line in log.lines() if line.startswith("speeds changed")]
    assert 1 <= len(told) <= 6


def test_by_speed_follows_every_worker() -> None:
    fast, slow, _ = play(
        four_times_slower,
        fast_pace=lambda epoch: 1.0 if epoch <= 2 else 16.0,
        local_steps=BySpeedSteps(16),
    )
    assert (fast.steps_of_epochs[0], slow.steps_of_epochs[0]) == (16, 8)
    # The slow one is now the fastest of all, and does tau_fast.
    assert (fast.steps_of_epochs[-1], slow.steps_of_epochs[-1]) == (8, 16)


def test_worker_that_becomes_very_slow_gets_a_smaller_batch() -> None:
    fast = Paced(fast_profile(0, seconds_per_step=1.0), lambda epoch: 1.0)
    slow = Paced(slow_profile(1, seconds_per_step=2.0), lambda epoch: 40.0)
    strategy = BiasedLocalSGD(240, 10, 4, rebalance=True, min_available_nodes=2)
    strategy.fit(InProcessGrid({10: fast, 20: slow}), toy_arrays(), epochs=4)
    # The pace is told for 2 samples: 200 s for 10, beside 5 s. Gamma 1/40 of 4 steps is a tenth
    # of a step: 1 of 10 samples, and at least 2.
    assert slow.steps_of_epochs == [2, 1, 1, 1]
    assert [order.batch_size for order in slow.orders if order.epoch > 1][:1] == [2]


def test_samples_stay_on_the_budget_when_steps_change() -> None:
    _, _, strategy = play(four_times_slower)
    per_round = 2 * (16 + 2)
    assert 6 * 240 - per_round < strategy.planner.samples_planned <= 6 * 240


# --- the parts


def outcome(worker: Any, seconds_per_step: float, examples: int = 4) -> Outcome:
    report = SimpleNamespace(
        num_examples=examples, compute_seconds=seconds_per_step * examples / 2, completed_steps=2
    )
    return Outcome(worker, SimpleNamespace(), report)  # type: ignore[arg-type]


def roster_of_two() -> Roster:
    return Roster.of_profiles(
        [fast_profile(0, seconds_per_step=1.0), slow_profile(1, seconds_per_step=4.0)]
    )


def test_apply_brings_the_roster_up_to_date() -> None:
    roster = roster_of_two()
    rebalancing = Rebalancing(follow=False, rebalance=True)
    assert not rebalancing.apply(roster)  # nothing measured yet
    rebalancing.add([outcome(roster.workers[0], 1.0), outcome(roster.workers[1], 8.0)], 2)
    assert rebalancing.apply(roster)
    assert [worker.speed_ratio for worker in roster.workers] == [1.0, 0.125]
    assert [worker.measured for worker in roster.workers] == [True, True]
    assert not rebalancing.apply(roster)  # the same speeds again are no change


def test_apply_keeps_a_given_speed_as_that_of_the_worker_alone() -> None:
    roster = roster_of_two()
    first, second = roster.workers
    second.measured = True  # by us, with all workers computing: not alone
    rebalancing = Rebalancing(follow=False, rebalance=True)
    for seconds in (8.0, 16.0):
        rebalancing.add([outcome(first, 1.0), outcome(second, seconds)], 2)
        assert rebalancing.apply(roster)
        assert [w.profile.seconds_per_step_alone for w in roster.workers] == [1.0, 0.0]


def test_apply_unnamed_worker_changes_its_tier_with_its_speed() -> None:
    profiles = [WorkerProfile(f"cpu:{i}", partition_id=i, seconds_per_step=1.0) for i in (0, 1)]
    roster = Roster.of_profiles(profiles)
    assert [worker.fast for worker in roster.workers] == [True, True]
    rebalancing = Rebalancing(follow=False, rebalance=True)
    rebalancing.add([outcome(roster.workers[0], 1.0), outcome(roster.workers[1], 2.0)], 2)
    assert rebalancing.apply(roster)
    assert [worker.fast for worker in roster.workers] == [True, False]


def test_off_takes_no_notice() -> None:
    roster = roster_of_two()
    rebalancing = Rebalancing(follow=False, rebalance=False)
    rebalancing.add([outcome(roster.workers[1], 99.0)], 2)
    assert not rebalancing.apply(roster)
    assert roster.workers[1].profile.seconds_per_step == 4.0


def test_failed_orders_and_clients_without_times_say_nothing() -> None:
    roster = roster_of_two()
    rebalancing = Rebalancing(follow=True, rebalance=False)
    failed = Outcome(roster.workers[0], SimpleNamespace(), failure="died")  # type: ignore[arg-type]
    nothing = outcome(roster.workers[1], 9.0, examples=0)
    timeless = outcome(roster.workers[1], 0.0)
    rebalancing.add([failed, nothing, timeless], 2)
    assert not rebalancing.apply(roster)


def test_follow_has_no_dead_band() -> None:
    for follow in (True, False):
        roster = roster_of_two()
        rebalancing = Rebalancing(follow=follow, rebalance=not follow)
        rebalancing.add([outcome(roster.workers[0], 1.0), outcome(roster.workers[1], 4.1)], 2)
        assert rebalancing.apply(roster) is follow
    assert (FALL, RISE) == (0.1, 0.25)


def test_worker_that_is_gone_counts_no_more() -> None:
    roster = roster_of_two()
    rebalancing = Rebalancing(follow=False, rebalance=True)
    rebalancing.add([outcome(roster.workers[0], 1.0), outcome(roster.workers[1], 99.0)], 2)
    roster.workers[1].present = False
    assert not rebalancing.apply(roster)
    roster.workers[1].present = True  # perhaps on another device: what was known is forgotten
    assert not rebalancing.apply(roster)
    rebalancing.add([outcome(roster.workers[1], 8.0)], 2)
    assert rebalancing.apply(roster)
    assert roster.workers[1].profile.seconds_per_step == 8.0


# --- what is refused


def test_strategy_refuses_rebalance_without_steps_from_speeds() -> None:
    for policy in (SystemAwareSteps(16, 4), SameSteps(4), BalancedBatches()):
        with pytest.raises(ValueError, match="rebalance = True needs steps that come from speeds"):
            BiasedLocalSGD(240, 2, policy, rebalance=True)
    with pytest.raises(ValueError, match="no number for the slow"):
        BiasedLocalSGD(240, 2, 16, local_steps_slow=4, rebalance=True)
    BiasedLocalSGD(240, 2, 16, rebalance=True)
    BiasedLocalSGD(240, 2, BySpeedSteps(16), rebalance=True)


def test_strategy_refuses_rebalance_on_the_device_clock() -> None:
    with pytest.raises(ValueError, match=r"rebalance = True .*clock = 'wall'"):
        BiasedLocalSGD(240, 2, 16, rebalance=True, clock="device")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "local-steps-slow = 8"),  # the default
        ({"local_steps_slow": 4}, "local-steps-slow = 4"),
        ({"local_steps_slow": "auto", "steps": "same"}, 'steps = "same"'),
        ({"local_steps_slow": "auto", "algorithm": "dlb"}, 'steps = "one-by-throughput"'),
        ({"local_steps_slow": "auto", "clock": "device"}, 'clock = "device"'),
        ({"steps": "by-speed", "clock": "device"}, 'use clock = "wall"'),
    ],
)
def test_settings_refuse_rebalance_in_one_line(changes: dict[str, Any], told: str) -> None:
    config = RunConfig(rebalance=True, **changes)
    with pytest.raises(UsageError) as refused:
        make_strategy(config, 1437, 2)
    line = str(refused.value)
    assert line.startswith("rebalance = true ")
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize("changes", [{"local_steps_slow": "auto"}, {"steps": "by-speed"}])
def test_settings_accept_rebalance(changes: dict[str, Any]) -> None:
    make_strategy(RunConfig(rebalance=True, **changes), 1437, 2)
