"""The samplers of the released code: lists for a horizon of full rounds."""

import math

import numpy as np
import pytest

from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.randomness import generator
from flower_blsgd.algorithm.sampling import (
    SeparatedSampler,
    TierName,
    draw_samples,
    permutation_stream,
)
from flower_blsgd.paper.released import CandidateSampler, ReshuffledSampler

from ..algorithm.test_sampling import fast_and_slow, request_of
from ..algorithm.workers import distinct_losses, highest, table_of


def test_horizon_is_as_many_whole_rounds_as_there_are_samples_for() -> None:
    """In the released setting, 1 + 1 workers with 32 and 16 steps of 64: 3,072 samples a round."""
    for sampler in (ReshuffledSampler(), CandidateSampler()):
        assert sampler.horizon(50_000, 3072) == 16  # while R = 50,000 // (64 x 2 x 32) = 12
        assert sampler.horizon(50_000, 8256) == 6  # 8 + 2 workers with 32 and 1 steps of 32
        assert sampler.horizon(10, 12) == 1
    assert SeparatedSampler().horizon(50_000, 3072) is None


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
