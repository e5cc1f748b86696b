"""The samplers of the released code, and the planner whose lists do not end with the epoch."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flower_blsgd.algorithm.local_steps import SystemAwareSteps
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.randomness import generator
from flower_blsgd.algorithm.sampling import (
    TierName,
    draw_samples,
    permutation_stream,
)
from flower_blsgd.algorithm.selection import InfoBatch
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.released import (
    CandidateSampler,
    ReleasedPlanner,
    ReshuffledSampler,
    released_sampler,
)

from .algorithm.test_sampling import fast_and_slow, request_of
from .algorithm.workers import distinct_losses, highest, table_of
from .in_process_grid import fast_profile, slow_profile
from .strategy.orders import planner_of
from .strategy.test_planner import play, workers_of


def test_reshuffled_begins_a_permutation_with_each_list() -> None:
    lists = []
    for before in (0, 80, 160):
        request = request_of(rounds=1, fast_samples=30, slow_samples=20, samples_before=before)
        (everybody,) = ReshuffledSampler().sample_lists(request, LossTable(90))
        assert len(set(everybody.indices.tolist())) == 80
        lists.append(everybody.indices.tolist())
    assert lists[0] == permutation_stream(0, 90, 0, 80).tolist()
    assert lists[0] != lists[1] != lists[2] != lists[0]


@pytest.mark.parametrize("to", ["fast", "slow"])
@pytest.mark.parametrize(("factor", "candidates"), [(1, 20), (3, 60), (5, 100), (9, 100)])
def test_candidates_worked(to: TierName, factor: int, candidates: int) -> None:
    """20 of N = 100 for one tier, the highest of so many candidates; 30 for the other, uniform."""
    losses, sampler = distinct_losses(100), CandidateSampler(factor, to)
    sizes = {f"{tier}_samples": 20 if tier == to else 30 for tier in ("fast", "slow")}
    lists = fast_and_slow(table_of(losses), sampler, num_fast=1, rounds=1, **sizes)
    by_loss, uniform = lists if to == "fast" else lists[::-1]
    rng = generator(0, f"{to}-samples", 0)
    drawn = draw_samples(losses, candidates, 0.0, rng)
    expected = set(drawn[np.argsort(-losses[drawn])[:20]].tolist())
    assert set(by_loss) == expected
    assert len(by_loss) == 20
    if candidates == 100:
        assert expected == highest(losses, 20)
    assert len(set(uniform)) == 30
    assert not highest(losses, 20) <= set(uniform)


def test_candidates_begin_with_unseen_ones_and_are_drawn_again_for_each_list() -> None:
    """All ten are candidates of two; where more are unseen than taken, chance decides."""
    table = table_of([1, 9, 9, math.inf, math.inf, 9, 9, 9, 9, 9])
    sizes = {"num_fast": 1, "fast_samples": 4, "slow_samples": 2, "rounds": 1}
    _, slow = fast_and_slow(table, CandidateSampler(5), **sizes)
    assert set(slow) == {3, 4}
    draws = {
        tuple(fast_and_slow(LossTable(10), CandidateSampler(5), samples_before=n, **sizes)[1])
        for n in range(20)
    }
    assert len(draws) > 10
    assert {sample for draw in draws for sample in draw} == set(range(10))


def test_more_samples_than_there_are_come_in_lists_without_repeats() -> None:
    """The slow worker alone has 25 a round, of N = 10: as much as a given number of steps asks."""
    sizes = {"num_fast": 1, "fast_samples": 5, "slow_samples": 25, "rounds": 1}
    fast, slow = fast_and_slow(table_of(distinct_losses(10)), CandidateSampler(), **sizes)
    assert (len(set(fast)), len(slow)) == (5, 25)
    assert min(slow.count(sample) for sample in range(10)) == 2


def test_candidate_settings_out_of_range_are_refused() -> None:
    assert CandidateSampler() == CandidateSampler(4, "slow")
    for wrong in ((0, "slow"), (4, "both")):
        with pytest.raises(ValueError, match="candidate_factor must be >= 1, high_loss_to fast or"):
            CandidateSampler(*wrong)  # type: ignore[arg-type]


def test_samplers_of_the_settings() -> None:
    preset = RunConfig(algorithm="biased-local-sgd-released", candidate_factor=2)
    assert released_sampler(preset) == CandidateSampler(2, "slow")
    assert released_sampler(RunConfig(sampler="candidates")) == CandidateSampler(4, "fast")
    baseline = RunConfig(algorithm="unbiased-local-sgd-released")
    assert released_sampler(baseline) == ReshuffledSampler()


# --- the planner


# Of twelve rounds and one more: the round of their epoch, from 0 on, that their lists begin with.
# A round has 6 samples, so the horizon is 24 // 6 = 4 and 20 // 6 = 3 rounds. An epoch has
# 24 // (2 x 2 x 2) = 3 rounds in table mode; in samples mode 3, 3, 4 and 3 (20 e // 6).
HORIZONS = [
    (24, "table", [0, 0, 0, -3, 1, 1, -2, -2, 2, -1, -1, -1, 0]),
    (20, "samples", [0, 0, 0, 0, 0, 0, 0, 0, 0, 3, -1, -1, 2]),
]


@pytest.mark.parametrize(("num_samples", "mode", "begun"), HORIZONS)
@pytest.mark.parametrize("sampler", [ReshuffledSampler(), CandidateSampler(2)])
def test_lists_go_on_into_the_next_epoch_and_are_made_anew_within_one(
    sampler: Any, num_samples: int, mode: str, begun: list[int]
) -> None:
    planner, horizon = (
        planner_of(num_samples, kind=ReleasedPlanner, sampler=sampler, mode=mode),
        num_samples // 6,
    )
    rounds, found = [], []
    for server_round in range(1, 14):
        rounds.append([order.indices for order in play(planner, server_round, workers_of())])
        found.append(planner.plan.first_round)
    assert found == begun
    assert (planner.progress.epoch, planner.progress.rounds_total) == (
        5 if mode == "table" else 4,
        13,
    )
    assert planner.samples_planned_so_far == planner.progress.samples_trained == 13 * 6
    draws = []
    for first in range(0, 12, horizon):
        by_tier = zip(*rounds[first : first + horizon], strict=True)
        fast, slow = (np.concatenate(orders).tolist() for orders in by_tier)
        assert (len(set(fast)), len(set(slow))) == (4 * horizon, 2 * horizon)
        assert isinstance(sampler, CandidateSampler) or not set(fast) & set(slow)
        draws.append((fast, slow))
    assert all(one != other for one, other in itertools.pairwise(draws))


def test_choice_by_loss_is_made_anew_from_the_losses_of_then() -> None:
    """In round 5, the second of epoch 2; all 24 are candidates of the 8 for the slow worker."""
    planner = planner_of(24, kind=ReleasedPlanner, sampler=CandidateSampler(3), mode="table")
    chosen: list[int] = []
    for server_round in range(1, 9):
        _, slow = play(planner, server_round, workers_of())
        chosen += slow.indices.tolist() * (server_round > 4)
        losses = np.arange(24) if server_round < 5 else -np.arange(24)
        planner.table.record(np.arange(24, dtype=np.int32), losses.astype(np.float32), server_round)
        assert planner.sampling_stats.share_never_seen == (server_round < 5)
    assert sorted(chosen) == list(range(16, 24))
    stats = planner.sampling_stats  # of round 5, though epoch 3 began with round 7
    assert (planner.progress.epoch, planner.plan.first_round) == (3, -2)
    assert (stats.slow_picked_loss_mean, stats.all_loss_mean) == (19.5, 11.5)
    assert (stats.loss_age_epochs_mean, stats.distinct_samples >= 16) == (0.0, True)


def test_epoch_with_other_workers_or_steps_begins_with_new_lists() -> None:
    planner = planner_of(24, kind=ReleasedPlanner, sampler=CandidateSampler(), mode="table")
    for server_round in range(1, 4):
        play(planner, server_round, workers_of())
    others = workers_of(fast_profile(2), slow_profile(3))  # as many, with the same steps
    for server_round in range(4, 7):
        play(planner, server_round, others)
        assert (planner.progress.epoch, planner.plan.first_round) == (2, 0)
    assert planner.plan.lists_end == 4
    planner.settings = replace(planner.settings, step_policy=SystemAwareSteps(2, 2))
    play(planner, 7, others)
    assert (planner.progress.epoch, planner.plan.first_round) == (3, 0)


def test_lists_last_one_round_if_it_has_more_than_all_samples() -> None:
    """A round has 2 x (2 + 12) of 24 samples; an epoch has 24 // (2 x 2 x 2) = 3 rounds."""
    policy = SystemAwareSteps(2, 12)
    sampler = CandidateSampler()
    planner = planner_of(
        24, kind=ReleasedPlanner, step_policy=policy, sampler=sampler, mode="table"
    )
    for server_round in (1, 2, 3):
        play(planner, server_round, workers_of())
        assert planner.plan.first_round == server_round - 1


def test_selection_is_refused() -> None:
    reason = r"^selection \(InfoBatch\).*CandidateSampler does not choose samples by epoch; use"
    with pytest.raises(UsageError, match=reason):
        planner_of(kind=ReleasedPlanner, sampler=CandidateSampler(), selection=InfoBatch())
