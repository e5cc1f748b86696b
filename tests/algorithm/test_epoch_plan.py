import re
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flower_blsgd.algorithm.batch_shares import BalancedBatches
from flower_blsgd.algorithm.epoch_plan import (
    EpochMode,
    EpochPlan,
    RoundShape,
    mean_rounds_per_epoch,
    plan_epoch,
    round_shape,
)
from flower_blsgd.algorithm.local_steps import (
    FixedSteps,
    Participant,
    SameSteps,
    StepPolicy,
    SystemAwareSteps,
)
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.sample_draws import permutation_stream
from flower_blsgd.algorithm.sampling import (
    Pool,
    Sampler,
    SeparatedSampler,
    UnifiedSampler,
    UniformSampler,
)
from flower_blsgd.algorithm.sampling_stats import sampling_stats

from .teams import QUICK, distinct_losses, table_of, team

CIFAR10 = 50_000
FLOWERS_PAPER = 7_169

_PAPER_TEAM = team(8, 2)


def _plan(
    num_samples: int,
    policy: StepPolicy,
    *,
    sampler: Sampler | None = None,
    workers: Sequence[Participant] = _PAPER_TEAM,
    mode: EpochMode = "samples",
    epoch: int = 1,
    seed: int = 0,
    local_steps_fast: int = 32,
    table: LossTable | None = None,
    samples_before: int = 0,
) -> EpochPlan:
    return plan_epoch(
        seed=seed,
        epoch=epoch,
        mode=mode,
        participants=workers,
        shape=round_shape(policy, workers, num_samples, mode, local_steps_fast),
        sampler=sampler or SeparatedSampler(),
        table=table or LossTable(num_samples),
        samples_before=samples_before,
    )


def _run(
    epochs: int, num_samples: int, policy: StepPolicy, **settings: object
) -> Iterator[EpochPlan]:
    """Plan epoch after epoch, as a run does."""
    planned = 0
    for epoch in range(1, epochs + 1):
        plan = _plan(num_samples, policy, epoch=epoch, samples_before=planned, **settings)
        planned += plan.num_planned
        yield plan


def _dealt(plan: EpochPlan, members: Sequence[int]) -> np.ndarray:
    """Everything that these workers get, round by round and in worker order."""
    return np.concatenate([plan.indices(r, w) for r in range(plan.rounds) for w in members])


@st.composite
def _settings(draw: st.DrawFn) -> dict[str, object]:
    """Small runs with both tiers; a round always fits."""
    fast, slow = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = draw(st.integers(2, 6))
    steps = draw(st.lists(st.integers(1, 9), min_size=fast + slow, max_size=fast + slow))
    return {
        "num_samples": draw(st.integers(batch * (fast + slow), 700)),
        "policy": FixedSteps(tuple(steps)),
        "workers": team(fast, slow, batch),
        "seed": draw(st.integers(0, 2**40)),
        "local_steps_fast": max(steps),
    }


# how many rounds


@pytest.mark.parametrize(
    ("num_samples", "batch", "tiers", "policy", "rounds"),
    [
        # the paper's table: floor(50000 / (32 * 10 * 32)) = floor(4.88) = 4; times 32 = 128
        (CIFAR10, 32, (8, 2), SystemAwareSteps(32, 1), 4),
        (CIFAR10, 32, (8, 2), SystemAwareSteps(32, 16), 4),
        (CIFAR10, 32, (8, 2), SameSteps(32), 4),
        (CIFAR10, 32, (8, 2), SameSteps(1), 128),
        # floor(7169 / (11 * 10 * 32)) = floor(2.04) = 2; times 32 = 64
        (FLOWERS_PAPER, 11, (8, 2), SystemAwareSteps(32, 1), 2),
        (FLOWERS_PAPER, 11, (8, 2), SameSteps(32), 2),
        (FLOWERS_PAPER, 11, (8, 2), SameSteps(1), 64),
        # one CPU and one GPU: floor(50000 / (128 * 2 * 32)) = floor(6.10) = 6
        (CIFAR10, 128, (1, 1), SystemAwareSteps(32, 4), 6),
        (CIFAR10, 128, (1, 1), SameSteps(1), 192),
    ],
)
def test_table_mode_communications_per_epoch(
    num_samples: int, batch: int, tiers: tuple[int, int], policy: StepPolicy, rounds: int
) -> None:
    for epoch in (1, 2, 18):  # the same in every epoch
        plan = _plan(
            num_samples,
            policy,
            sampler=UniformSampler(),
            workers=team(*tiers, batch),
            mode="table",
            epoch=epoch,
            samples_before=epoch * 1000,
        )
        assert plan.rounds == rounds


@pytest.mark.parametrize(
    ("num_samples", "batch", "policy", "rounds"),
    [
        # 8 of 10 train: R 32 x 10 / 8 rounds of synchronous SGD; R of local SGD
        (CIFAR10, 32, SameSteps(1), 160),
        (CIFAR10, 32, SameSteps(32), 4),
        (FLOWERS_PAPER, 11, SameSteps(1), 80),
        (FLOWERS_PAPER, 11, SameSteps(32), 2),
    ],
)
def test_table_mode_counts_workers_that_do_not_train(
    num_samples: int, batch: int, policy: StepPolicy, rounds: int
) -> None:
    shape = round_shape(policy, team(8, 0, batch), num_samples, "table", 32, num_workers=10)
    assert mean_rounds_per_epoch(shape, num_samples, "table") == rounds
    plan = plan_epoch(
        seed=0,
        epoch=3,
        mode="table",
        participants=team(8, 0, batch),
        shape=shape,
        sampler=UniformSampler(),
        table=LossTable(num_samples),
        samples_before=0,
    )
    assert plan.rounds == rounds


def test_mean_rounds_per_epoch_of_samples_mode_is_n_over_s() -> None:
    shape = round_shape(SystemAwareSteps(32, 1), _PAPER_TEAM, CIFAR10, "samples", 32)
    assert mean_rounds_per_epoch(shape, CIFAR10, "samples") == pytest.approx(50_000 / 8256)


def test_table_mode_fast_workers_see_65_percent_of_cifar10() -> None:
    # 4 rounds * 8 workers * 32 steps * 32 samples = 32,768 of 50,000 = 65.536 %
    plan = _plan(CIFAR10, SystemAwareSteps(32, 1), mode="table")
    assert len(plan.pools[0].indices) == 32_768
    assert plan.share_left_out(_PAPER_TEAM) == pytest.approx(0.34464, abs=1e-12)


def test_table_mode_one_cpu_and_one_gpu_leave_out_51_percent() -> None:
    # 6 rounds * 32 steps * 128 samples = 24,576 of 50,000: 1 - 0.49152
    workers = team(1, 1, 128)
    plan = _plan(CIFAR10, SystemAwareSteps(32, 1), workers=workers, mode="table")
    assert plan.share_left_out(workers) == pytest.approx(0.50848, abs=1e-12)


@pytest.mark.parametrize(("num_samples", "rounds"), [(10_239, 31), (10_240, 32), (20_480, 64)])
def test_table_mode_synchronous_rounds_at_the_edge(num_samples: int, rounds: int) -> None:
    """B P tau_F = 10,240; one sample fewer, and k = floor(10,239 / 320) = 31."""
    plan = _plan(num_samples, SameSteps(1), sampler=UniformSampler(), mode="table")
    assert plan.rounds == rounds
    local = _plan(num_samples, SameSteps(32), sampler=UniformSampler(), mode="table")
    assert local.num_planned == plan.num_planned


def test_table_mode_counts_with_the_fast_steps_though_the_slow_do_more() -> None:
    # floor(50000 / (32 * 10 * 32)) = 4
    assert _plan(CIFAR10, SystemAwareSteps(32, 64), mode="table").rounds == 4


def test_samples_mode_first_epoch_of_cifar10() -> None:
    # S = 32 * (8 * 32 + 2) = 8,256; floor(50000 / 8256) = 6; 6 * 8192 / 50000 = 98.304 %
    plan = _plan(CIFAR10, SystemAwareSteps(32, 1))
    assert plan.rounds == 6
    assert plan.num_planned == 6 * 8256
    assert [len(pool.indices) for pool in plan.pools] == [49_152, 384]
    assert plan.share_left_out(_PAPER_TEAM) == pytest.approx(1 - 0.98304, abs=1e-12)


def test_samples_mode_epoch_18_has_more_fast_samples_than_there_are() -> None:
    # floor(18 * 50000 / 8256) - floor(17 * 50000 / 8256) = 109 - 102 = 7; 7 * 8192 = 57,344
    losses = distinct_losses(CIFAR10)
    plan = _plan(
        CIFAR10,
        SystemAwareSteps(32, 1),
        epoch=18,
        table=table_of(losses),
        samples_before=102 * 8256,
    )
    assert plan.rounds == 7
    fast, slow = (pool.indices for pool in plan.pools)
    assert len(fast) == 57_344
    assert len(slow) == 7 * 64
    assert np.array_equal(np.sort(fast[:CIFAR10]), np.arange(CIFAR10))
    # 7,344 more by the same rule, lambda = 0.5: the 3,672 highest are among them
    excess = fast[CIFAR10:]
    assert len(np.unique(excess)) == 7_344
    assert np.isin(np.argsort(losses)[-3_672:], excess).all()
    assert plan.share_left_out(_PAPER_TEAM) == 0.0


@pytest.mark.parametrize(
    ("policy", "per_round"),
    [
        (SystemAwareSteps(32, 1), 8256),
        (SystemAwareSteps(32, 16), 32 * (8 * 32 + 2 * 16)),
        (SameSteps(32), 10_240),
        (SameSteps(1), 320),
    ],
)
def test_samples_mode_100_epochs_are_100_n_samples(policy: StepPolicy, per_round: int) -> None:
    rounds, planned = 0, 0
    for plan in _run(100, CIFAR10, policy, sampler=_CountOnly()):
        rounds += plan.rounds
        planned += plan.rounds * per_round
        # floor(e N / S) rounds in e epochs
        assert rounds == plan.epoch * CIFAR10 // per_round
    assert 100 * CIFAR10 - per_round < planned <= 100 * CIFAR10


class _CountOnly:
    """A sampler of one's own: nothing but the right number of zeros."""

    needs_both_tiers = False

    def pools(self, request: object, table: LossTable) -> list[Pool]:
        members = tuple(range(len(request.participants)))  # type: ignore[attr-defined]
        count = request.set_size(members)  # type: ignore[attr-defined]
        return [Pool(np.zeros(count, np.int32), members)]


@QUICK
@given(_settings(), st.integers(2, 12))
def test_samples_mode_rounds_are_the_difference_of_floors(
    settings: dict[str, object], epochs: int
) -> None:
    num_samples = settings["num_samples"]
    for plan in _run(epochs, sampler=_CountOnly(), **settings):
        per_round = sum(plan.shape.samples_per_round)
        e = plan.epoch
        assert plan.rounds == e * num_samples // per_round - (e - 1) * num_samples // per_round
        assert plan.rounds >= 1
        assert plan.num_planned == plan.rounds * per_round


def test_samples_mode_keeps_to_n_per_epoch_when_the_team_changes() -> None:
    # three epochs with 4 + 2 workers, then one fast and one slow are gone, then they are back
    planned = 0
    for epoch, tiers in enumerate([(4, 2)] * 3 + [(3, 1)] * 4 + [(4, 2)] * 3, start=1):
        plan = _plan(
            1000,
            SystemAwareSteps(8, 3),
            workers=team(*tiers, 5),
            epoch=epoch,
            samples_before=planned,
        )
        planned += plan.num_planned
        per_round = 5 * (tiers[0] * 8 + tiers[1] * 3)
        assert epoch * 1000 - per_round < planned <= epoch * 1000


# the shape of a round


def test_round_shape_that_fits_stays_as_it_is() -> None:
    shape = round_shape(SystemAwareSteps(32, 1), _PAPER_TEAM, CIFAR10, "samples", 32)
    assert shape.local_steps == (32,) * 8 + (1,) * 2
    assert shape.batch_sizes == (32,) * 10
    assert shape.samples_per_round == (1024,) * 8 + (32,) * 2


@pytest.mark.parametrize(
    ("num_samples", "mode", "longest"),
    [
        # B (8 k + 2) <= N: 11 * 178 = 1958, with k = 23 it is 2046
        (2_040, "samples", 22),
        # the official training part alone: 11 * 90 = 990, with k = 12 it is 1078
        (1_020, "samples", 11),
        # B P k <= N: 110 * 18 = 1980; 110 * 9 = 990
        (2_040, "table", 18),
        (1_020, "table", 9),
    ],
)
def test_round_shape_of_flowers_official(num_samples: int, mode: EpochMode, longest: int) -> None:
    workers = team(8, 2, 11)
    shape = round_shape(SystemAwareSteps(32, 1), workers, num_samples, mode, 32)
    assert shape.local_steps == (longest,) * 8 + (1,) * 2
    plan = _plan(num_samples, SystemAwareSteps(32, 1), workers=workers, mode=mode)
    assert plan.rounds == 1


@pytest.mark.parametrize(
    ("num_samples", "mode", "steps"),
    [
        # B = 4, tau = (3, 1): S = 16. k = 2: (2, max(1, floor(2/3))) is 12 samples
        (16, "samples", (3, 1)),
        (15, "samples", (2, 1)),
        (12, "samples", (2, 1)),
        (11, "samples", (1, 1)),
        (8, "samples", (1, 1)),
        # B P tau_F = 24, 16, 8
        (24, "table", (3, 1)),
        (23, "table", (2, 1)),
        (16, "table", (2, 1)),
        (15, "table", (1, 1)),
        (8, "table", (1, 1)),
    ],
)
def test_round_shape_at_the_edge(num_samples: int, mode: EpochMode, steps: tuple[int, int]) -> None:
    shape = round_shape(SystemAwareSteps(3, 1), team(1, 1, 4), num_samples, mode, 3)
    assert shape.local_steps == steps


@pytest.mark.parametrize("mode", ["samples", "table"])
@pytest.mark.parametrize("policy", [SystemAwareSteps(3, 1), SameSteps(1), SameSteps(3)])
def test_round_shape_refuses_and_names_the_largest_batch(
    mode: EpochMode, policy: StepPolicy
) -> None:
    # 5 workers and 34 samples: one step of all fits with floor(34 / 5) = 6
    with pytest.raises(ValueError, match=r"batch-size = 7 .*largest that fits is batch-size = 6"):
        round_shape(policy, team(3, 2, 7), 34, mode, 3)
    assert round_shape(policy, team(3, 2, 6), 34, mode, 3).local_steps == (1,) * 5


def test_round_shape_names_a_batch_that_fits_those_that_do_not_train_too() -> None:
    """Table mode: B P <= N with P = 5, though 3 train: floor(34 / 5) = 6."""
    workers = team(3, 0, 7)
    with pytest.raises(ValueError, match=r"batch-size = 7 .*largest that fits is batch-size = 6"):
        round_shape(SameSteps(1), workers, 34, "table", 3, num_workers=5)
    assert round_shape(SameSteps(1), team(3, 0, 6), 34, "table", 3, num_workers=5)


def test_round_shape_names_the_largest_batch_where_a_slow_worker_has_a_smaller_one() -> None:
    """Gamma 0.1 of one step: 19 and 2 samples are 21, 20 and 2 are 22."""

    def workers(batch: int) -> list[Participant]:
        return [Participant(True, batch, 1.0), Participant(False, batch, 0.1)]

    policy = SystemAwareSteps(1)
    with pytest.raises(ValueError, match=r"batch-size = 30 .*largest that fits is batch-size = 19"):
        round_shape(policy, workers(30), 21, "samples", 1)
    assert round_shape(policy, workers(19), 21, "samples", 1).batch_sizes == (19, 2)
    with pytest.raises(ValueError, match="batch-size = 20 "):
        round_shape(policy, workers(20), 21, "samples", 1)


def test_round_shape_refusal_names_the_batch_size_of_the_settings() -> None:
    """Not the largest share that a worker would have had."""
    workers = [Participant(True, 10, 1.0), Participant(True, 10, 0.25)]
    assert BalancedBatches().batch_sizes(workers) == [16, 4]
    with pytest.raises(ValueError, match=r"batch-size = 10 .*largest that fits is batch-size = 9"):
        round_shape(BalancedBatches(), workers, 19, "samples", 1)


@QUICK
@given(st.data(), st.sampled_from(["samples", "table"]))
def test_round_shape_named_batch_is_accepted_and_one_more_is_not(
    data: st.DataObject, mode: EpochMode
) -> None:
    gammas = data.draw(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5))
    num_samples = data.draw(st.integers(2, 60))
    idle = data.draw(st.integers(0, 3))

    def shape_of(batch: int) -> RoundShape:
        workers = [Participant(gamma > 0.7, batch, gamma) for gamma in gammas]
        number = len(workers) + idle
        return round_shape(SystemAwareSteps(4), workers, num_samples, mode, 4, number)

    told = ""
    try:
        shape_of(data.draw(st.integers(2, 80)))
    except ValueError as error:
        told = str(error)
    if not told:
        return
    named = re.search(r"largest that fits is batch-size = (\d+)", told)
    if named is None:
        assert "fewer workers or more data" in told
        too_large = 2
    else:
        shape_of(int(named[1]))
        too_large = int(named[1]) + 1
    with pytest.raises(ValueError, match="too large"):
        shape_of(too_large)


@pytest.mark.parametrize("mode", ["samples", "table"])
def test_round_shape_never_proposes_a_batch_below_two(mode: EpochMode) -> None:
    # 5 workers and 9 samples: only batches of one would fit, and b >= 2
    with pytest.raises(ValueError, match="fewer workers or more data"):
        round_shape(SameSteps(1), team(3, 2, 2), 9, mode, 1)


@QUICK
@given(st.data(), st.sampled_from(["samples", "table"]))
def test_round_shape_takes_the_largest_k_that_fits(data: st.DataObject, mode: EpochMode) -> None:
    batch = data.draw(st.integers(2, 9))
    steps = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    steps.sort(reverse=True)  # the fast worker comes first: in table mode tau_F is its tau
    assume(max(steps) > 1)
    num_samples = data.draw(st.integers(batch * len(steps), batch * sum(steps) + 50))
    workers = team(1, len(steps) - 1, batch)

    def shrunk(k: int) -> list[int]:
        return [max(1, tau * k // max(steps)) for tau in steps]

    def needed(k: int) -> int:
        return batch * (sum(shrunk(k)) if mode == "samples" else len(steps) * k)

    largest = max(k for k in range(1, max(steps) + 1) if needed(k) <= num_samples)
    shape = round_shape(FixedSteps(tuple(steps)), workers, num_samples, mode, max(steps))
    assert list(shape.local_steps) == shrunk(largest)


# who gets what


def test_indices_worked() -> None:
    """Blocks of one round, dealt in list order to the pool's workers in worker order."""
    shape = RoundShape(local_steps=(2, 1, 3), batch_sizes=(2, 2, 2))
    fast = np.arange(100, 120, dtype=np.int32)  # workers 0 and 2: 4 + 6 a round
    slow = np.arange(200, 204, dtype=np.int32)  # worker 1: 2 a round
    plan = EpochPlan(1, 2, shape, (Pool(fast, (0, 2)), Pool(slow, (1,))), 300)
    assert plan.indices(0, 0).tolist() == [100, 101, 102, 103]
    assert plan.indices(0, 2).tolist() == [104, 105, 106, 107, 108, 109]
    assert plan.indices(1, 0).tolist() == [110, 111, 112, 113]
    assert plan.indices(1, 2).tolist() == [114, 115, 116, 117, 118, 119]
    assert plan.indices(0, 1).tolist() == [200, 201]
    assert plan.indices(1, 1).tolist() == [202, 203]
    assert plan.num_planned == 24


def test_indices_of_an_unknown_worker_refused() -> None:
    plan = _plan(500, SystemAwareSteps(2, 1), workers=team(1, 1, 4))
    with pytest.raises(ValueError, match="worker 2"):
        plan.indices(0, 2)


@QUICK
@given(_settings(), st.sampled_from(["samples", "table"]), st.booleans(), st.integers(1, 9))
def test_indices_shares_add_up_and_are_dealt_in_order(
    settings: dict[str, object], mode: EpochMode, uniform: bool, epoch: int
) -> None:
    sampler = UniformSampler() if uniform else SeparatedSampler()
    plan = _plan(**settings, mode=mode, epoch=epoch, sampler=sampler)
    workers = settings["workers"]
    shares = [len(plan.indices(r, w)) for r in range(plan.rounds) for w in range(len(workers))]
    assert shares == [
        steps * worker.batch_size
        for _ in range(plan.rounds)
        for steps, worker in zip(plan.shape.local_steps, workers, strict=True)
    ]
    assert sum(shares) == plan.num_planned
    everybody = range(len(workers))
    tiers = (
        [everybody]
        if uniform
        else [[w for w in everybody if workers[w].fast is f] for f in (True, False)]
    )
    for members, pool in zip(tiers, plan.pools, strict=True):
        dealt = _dealt(plan, members)
        assert dealt.dtype == np.int32
        # nothing is lost, doubled or moved: the fast parts of a round are consecutive
        assert dealt.tolist() == pool.indices.tolist()


@QUICK
@given(_settings(), st.sampled_from(["samples", "table"]), st.floats(0, 1), st.integers(1, 4))
def test_separated_plan_no_index_twice_within_a_list(
    settings: dict[str, object], mode: EpochMode, ratio: float, epochs: int
) -> None:
    num_samples = settings["num_samples"]
    for plan in _run(epochs, mode=mode, sampler=SeparatedSampler(ratio), **settings):
        for tier, pool in zip((True, False), plan.pools, strict=True):
            members = [i for i, w in enumerate(settings["workers"]) if w.fast is tier]
            dealt = _dealt(plan, members)
            # N_F = R sum_fast tau_i b_i
            per_round = sum(plan.shape.local_steps[i] * plan.shape.batch_sizes[i] for i in members)
            assert len(dealt) == len(pool.indices) == plan.rounds * per_round
            for start in range(0, len(dealt), num_samples):
                one = dealt[start : start + num_samples]
                assert len(np.unique(one)) == len(one)


def test_separated_plan_every_fast_worker_gets_the_same_mix() -> None:
    # 4 rounds, 8 fast workers, 1,024 each: half of them high, standard deviation below 16
    losses = distinct_losses(CIFAR10)
    plan = _plan(CIFAR10, SystemAwareSteps(32, 1), mode="table", table=table_of(losses))
    high = losses >= CIFAR10 - 16_384  # lambda N_F = 0.5 * 32,768
    counts = [int(high[plan.indices(r, w)].sum()) for r in range(4) for w in range(8)]
    assert sum(counts) == 16_384
    assert all(abs(count - 512) < 80 for count in counts)


@QUICK
@given(_settings(), st.sampled_from(["samples", "table"]), st.integers(2, 8))
def test_uniform_plan_consecutive_epochs_continue_one_another(
    settings: dict[str, object], mode: EpochMode, epochs: int
) -> None:
    num_samples = settings["num_samples"]
    everybody = range(len(settings["workers"]))
    plans = _run(epochs, mode=mode, sampler=UniformSampler(), **settings)
    dealt = np.concatenate([_dealt(plan, everybody) for plan in plans])
    expected = permutation_stream(settings["seed"], num_samples, 0, len(dealt))
    assert dealt.tolist() == expected.tolist()
    for start in range(0, len(dealt) - num_samples + 1, num_samples):
        block = dealt[start : start + num_samples]
        assert np.array_equal(np.sort(block), np.arange(num_samples))


def test_share_left_out_counts_what_fast_workers_get_once() -> None:
    shape = RoundShape(local_steps=(1, 1), batch_sizes=(2, 2))
    fast = np.array([0, 1, 1, 2], np.int32)
    slow = np.array([7, 8, 9, 0], np.int32)
    plan = EpochPlan(1, 2, shape, (Pool(fast, (0,)), Pool(slow, (1,))), 10)
    assert plan.share_left_out(team(1, 1, 2)) == pytest.approx(0.7)  # 0, 1 and 2 of 10 are given


@pytest.mark.parametrize("sampler", [UniformSampler(), SeparatedSampler()])
def test_plan_is_a_function_of_its_arguments(sampler: Sampler) -> None:
    losses = np.random.default_rng(0).integers(0, 4, 400).astype(np.float32)
    table = table_of(losses)
    settings = {"workers": team(2, 1, 4), "sampler": sampler, "table": table}
    policy = SystemAwareSteps(8, 2)
    first = _plan(400, policy, epoch=2, samples_before=360, **settings)
    _plan(400, policy, epoch=3, seed=5, **settings)
    again = _plan(400, policy, epoch=2, samples_before=360, **settings)
    assert [p.indices.tolist() for p in first.pools] == [p.indices.tolist() for p in again.pools]
    assert table.losses.tolist() == losses.tolist()
    other = _plan(400, policy, epoch=2, samples_before=360, seed=1, **settings)
    assert all(
        a.indices.tolist() != b.indices.tolist()
        for a, b in zip(first.pools, other.pools, strict=True)
    )


def test_plan_carries_nothing_over_to_the_next_epoch() -> None:
    """With an unchanged table and lambda 1 each epoch takes the same hardest samples again."""
    table = table_of(distinct_losses(5000))
    plans = list(
        _run(
            3,
            5000,
            SystemAwareSteps(4, 1),
            sampler=SeparatedSampler(1.0),
            mode="table",
            local_steps_fast=4,
            table=table,
        )
    )
    fast = [set(plan.pools[0].indices.tolist()) for plan in plans]
    assert all(one == other for one, other in pairwise(fast))
    assert plans[0].pools[0].indices.tolist() != plans[1].pools[0].indices.tolist()


@pytest.mark.parametrize("sampler", [UniformSampler(), SeparatedSampler()])
def test_plan_of_ten_million_samples(sampler: Sampler) -> None:
    num_samples = 10_000_000
    table = LossTable(num_samples)
    table.losses[:] = np.random.default_rng(0).random(num_samples, np.float32)
    plan = _plan(num_samples, SystemAwareSteps(32, 1), sampler=sampler, table=table)
    # floor(10^7 / 8256) = 1211 rounds
    assert plan.rounds == 1211
    assert plan.num_planned == 1211 * 8256
    for pool in plan.pools:
        seen = np.zeros(num_samples, np.bool_)
        seen[pool.indices] = True
        assert np.count_nonzero(seen) == len(pool.indices)
    assert len(plan.indices(1210, 9)) == 32


@pytest.mark.parametrize(
    ("sampler", "most"),
    [
        (SeparatedSampler(), 16),  # table 8, plan 4, marks 1
        (SeparatedSampler(0.5, "slow"), 16),
        (UnifiedSampler(), 19),  # and what is left over 4, where it does not suffice
        (UnifiedSampler(0.5, "slow"), 19),
        (UniformSampler(), 18),  # and a permutation 4
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_memory_per_sample(sampler: Sampler, most: int, tied: bool) -> None:
    """The most bytes in use, the loss table included, beside 5 MiB for the blocks at hand."""
    num_samples = 4_000_000
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        table = LossTable(num_samples)
        rng.random(out=table.losses, dtype=np.float32)
        table.rounds[:] = 1
        if tied:
            table.losses[:] = np.inf
            table.losses[::3] = 1.0
        tracemalloc.reset_peak()
        plan = _plan(num_samples, SystemAwareSteps(32, 1), sampler=sampler, table=table)
        sampling_stats(plan, _PAPER_TEAM, table, last_round=1, rounds_per_epoch=1.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (peak - 5 * 2**20) / num_samples < most
