"""What a run was like, in the figures that the cost model predicts."""

import dataclasses

import pytest

from flower_blsgd.algorithm.local_steps import Clock
from flower_blsgd.results.accounts import Accounts
from flower_blsgd.results.measured import measured_figures, plan_line

from .records import record, row, two_rounds


def accounts_of(clock: Clock = "wall", speeds: dict[int, float] | None = None) -> Accounts:
    accounts = Accounts(clock, speeds or {})
    for one in two_rounds():
        accounts.add(one)
    return accounts


def test_measured_worked() -> None:
    """Two rounds of 10 s and 6 s and 0.75 s of planning make one epoch."""
    found = measured_figures(accounts_of(), two_rounds())
    assert found == {
        "clock": "wall",
        "round_seconds": 16.75 / 2,
        "epoch_seconds": 16.75,
        "fast_waiting_share": 8.0 / 32,
        "slow_waiting_share": 1.0 / 16,
    }


def test_measured_counts_a_part_of_an_epoch_as_that() -> None:
    """One round of two in the third epoch: 2.5 epochs."""
    accounts, last = Accounts(), record(row(0), epoch=3, round_in_epoch=1, rounds_in_epoch=2)
    accounts.add(last)
    found = measured_figures(accounts, [last])
    assert found is not None
    assert found["epoch_seconds"] == 10.0 / 2.5


def test_measured_on_the_device_clock() -> None:
    """4 steps of 1 s alone, and what is left of 10 s after 6 s of computing beside others."""
    rounds = [
        record(row(0, completed_steps=4, num_examples=64, start_seconds=0.5, compute_seconds=6.0)),
        record(row(0, completed_steps=4, num_examples=64, start_seconds=0.5, compute_seconds=6.0)),
    ]
    accounts = Accounts("device", {0: 1.0})
    for one in rounds:
        accounts.add(one)
    found = measured_figures(accounts, rounds)
    assert found is not None
    assert (found["clock"], found["round_seconds"]) == ("device", 8.0)


def test_measured_is_not_known_without_a_round_or_a_speed() -> None:
    assert measured_figures(Accounts(), []) is None
    assert measured_figures(accounts_of("device"), two_rounds()) is None


def test_batch_scale_makes_a_step_of_the_device_clock_shorter() -> None:
    """Half the batch: half the seconds, for a worker that was measured with the whole one."""
    whole = row(0, completed_steps=4, num_examples=64, start_seconds=1.0, compute_seconds=6.0)
    assert whole.completed_load == 4.0
    half = dataclasses.replace(whole, batch_scale=0.5)
    assert half.completed_load == 2.0
    seconds = []
    for one in (whole, half):
        accounts = Accounts("device", {0: 3.0})
        accounts.add(record(one))
        seconds.append(accounts.device_seconds)
    assert seconds == [12.0 + 4.0, 6.0 + 4.0]


def test_budget_is_training_on_the_wall_and_device_seconds_on_the_device_clock() -> None:
    one = record(
        row(0, completed_steps=4, num_examples=64, start_seconds=0.5, compute_seconds=6.0),
        planning_seconds=0.5,
    )
    for clock, expected in (("wall", 10.5), ("device", 8.0)):
        accounts = Accounts(clock, {0: 1.0})  # type: ignore[arg-type]
        accounts.add(one)
        assert accounts.budget_seconds == expected
    unknown = Accounts("device")
    unknown.add(one)
    assert unknown.budget_seconds == 10.5


@pytest.mark.parametrize("clock", ["wall", "device"])
def test_workers_that_only_sum_wait_for_nobody_and_are_no_workers_that_train(clock: Clock) -> None:
    one = record(
        row(0, completed_steps=4, num_examples=64, start_seconds=0.5, compute_seconds=6.0),
        row(1, fast=False, local_steps=0, start_seconds=7.0, summing_seconds=0.25),
    )
    accounts = Accounts(clock, {0: 1.0, 1: 9.0})
    accounts.add(one)
    assert list(accounts.workers) == [0]
    assert accounts.summing_seconds == 0.25
    assert accounts.waiting_share(fast=False) is None
    assert accounts.waiting_share(fast=True) == 0.0
    assert accounts.samples == 64
    assert "slow" not in accounts.recent(one)


def test_plan_line_tells_both_and_the_difference() -> None:
    expected = {"epoch_seconds": 4.0, "fast_waiting_share": 0.125}
    took = {"epoch_seconds": 3.0, "fast_waiting_share": 0.25}
    assert plan_line(expected, took) == (  # type: ignore[arg-type]
        "plan: 4 s an epoch, fast waits 12%; measured: 3 s (-25%), fast waits 25%"
    )
    nobody = {"epoch_seconds": 4.0, "fast_waiting_share": None}
    assert plan_line(nobody, nobody) == "plan: 4 s an epoch; measured: 4 s (+0%)"  # type: ignore[arg-type]
