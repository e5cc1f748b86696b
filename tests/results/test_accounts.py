"""The sums over a run's rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.results.accounts import Accounts, WorkerTotal
from flower_blsgd.round_log import RoundRecord

from .records import record, row, two_rounds


def accounts_of(*records: RoundRecord) -> Accounts:
    accounts = Accounts()
    for one in records:
        accounts.add(one)
    return accounts


def test_accounts_hand_worked() -> None:
    accounts = accounts_of(*two_rounds())
    assert accounts.rounds == 2
    assert accounts.samples == 64 + 64 + 16 + 64 + 0 + 32
    assert accounts.round_seconds == 16.0
    assert accounts.planning_seconds == 0.75
    assert accounts.training_seconds == 16.75
    assert accounts.workers == {
        0: WorkerTotal("fast-0 (cpu:0)", True, 4, 8, 128, 2, 0, 1.25, 11.0, 3.0, 2.0),
        1: WorkerTotal("fast-1 (cpu:1)", True, 4, 4, 64, 2, 1, 0.25, 4.0, 5.0, 1.0),
        2: WorkerTotal("slow-2 (cpu:2)", False, 2, 3, 48, 2, 0, 0.5, 13.0, 1.0, 2.0),
    }


def test_seconds_per_step() -> None:
    workers = accounts_of(*two_rounds()).workers
    assert workers[0].seconds_per_step == 11.0 / 8
    assert workers[2].seconds_per_step == 13.0 / 3
    assert WorkerTotal("idle", True).seconds_per_step is None


def test_waiting_share_hand_worked() -> None:
    """Waiting of the tier / (its workers x sum of round_seconds)."""
    accounts = accounts_of(*two_rounds())
    assert accounts.waiting_share(fast=True) == (3.0 + 5.0) / (2 * 16.0)
    assert accounts.waiting_share(fast=False) == 1.0 / (1 * 16.0)


def test_waiting_share_of_no_worker() -> None:
    assert Accounts().waiting_share(fast=True) is None
    accounts = accounts_of(record(row(0, waiting_seconds=4.0)))
    assert accounts.waiting_share(fast=True) == 0.4
    assert accounts.waiting_share(fast=False) is None


def test_waiting_share_of_a_worker_that_came_later() -> None:
    """It is one of the tier's workers, whenever it came."""
    accounts = accounts_of(
        record(row(0, waiting_seconds=2.0)),
        record(row(0, waiting_seconds=2.0), row(1, waiting_seconds=4.0), round=2),
    )
    assert accounts.waiting_share(fast=True) == 8.0 / (2 * 20.0)


def test_sample_and_weight_share_hand_worked() -> None:
    accounts = accounts_of(*two_rounds())
    assert accounts.sample_share(fast=False) == 48 / 240
    assert accounts.sample_share(fast=True) == 192 / 240
    assert accounts.weight_share(fast=False) == 0.25
    assert accounts.weight_share(fast=True) == 0.75


def test_shares_before_the_first_round() -> None:
    assert Accounts().sample_share(fast=True) == 0.0
    assert Accounts().weight_share(fast=True) == 0.0
    assert Accounts().training_seconds == 0.0


def test_slow_only_seconds_hand_worked() -> None:
    """The last fast worker waits 3 s for the slow one in the first round."""
    first, second = two_rounds()
    assert accounts_of(first).slow_only_seconds == 3.0
    assert accounts_of(first, first).slow_only_seconds == 6.0
    # Now a fast worker is the last one: without the slow one nothing would have been shorter.
    assert accounts_of(second).slow_only_seconds == 0.0


def test_slow_only_seconds_without_fast_workers() -> None:
    assert accounts_of(record(row(0, fast=False, waiting_seconds=4.0))).slow_only_seconds == 0.0


def test_slow_only_seconds_leaves_out_a_worker_that_failed() -> None:
    """It has no time at all; the last fast worker that computed waits 4 s for the slow one."""
    accounts = accounts_of(
        record(
            row(0, completed_steps=4, compute_seconds=5.0, waiting_seconds=4.0),
            row(1, failure="the process died"),
            row(2, fast=False, completed_steps=1, compute_seconds=9.0),
        )
    )
    assert accounts.slow_only_seconds == 4.0


def test_recent_says_who_waits() -> None:
    first, second = two_rounds()
    accounts = accounts_of(first, second)
    assert accounts.recent(first) == "fast waits 40%, slow waits 0%"
    assert accounts.recent(second) == "fast waits 0%, slow waits 17%"
    assert accounts.recent(record(row(0, waiting_seconds=1.0))) == "fast waits 10%"


tiers = st.lists(
    st.tuples(
        st.booleans(), st.floats(0, 10), st.floats(0, 10), st.integers(0, 50), st.floats(0, 1)
    ),
    min_size=1,
    max_size=5,
)


@given(tiers, st.integers(1, 4))
def test_shares_of_both_tiers_add_up(
    workers: list[tuple[bool, float, float, int, float]], rounds: int
) -> None:
    total_weight = sum(weight for *_, weight in workers) or 1.0
    rows = [
        row(
            i,
            fast=fast,
            completed_steps=steps,
            num_examples=16 * steps,
            compute_seconds=compute,
            waiting_seconds=waiting,
            weight=weight / total_weight,
        )
        for i, (fast, compute, waiting, steps, weight) in enumerate(workers)
    ]
    accounts = accounts_of(*[record(*rows, round=n + 1) for n in range(rounds)])
    assert accounts.samples == rounds * sum(one.num_examples for one in rows)
    if accounts.samples:
        both = accounts.sample_share(fast=True) + accounts.sample_share(fast=False)
        assert both == pytest.approx(1.0)
    if any(weight for *_, weight in workers):
        both = accounts.weight_share(fast=True) + accounts.weight_share(fast=False)
        assert both == pytest.approx(1.0)
    for fast in (True, False):
        share = accounts.waiting_share(fast)
        assert (share is None) == (fast not in [one.fast for one in rows])
        if share is not None:
            assert 0.0 <= share <= 1.0
