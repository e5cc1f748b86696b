import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.epoch_plan import (
    EpochMode,
    EpochPlan,
    RoundShape,
    plan_epoch,
    round_shape,
)
from flower_blsgd.algorithm.local_steps import (
    BalancedBatches,
    Participant,
    SameSteps,
    StepPolicy,
    SystemAwareSteps,
)
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.sampling import (
    EpochRequest,
    SampleList,
    Sampler,
    SeparatedSampler,
    UniformSampler,
    permutation_stream,
)
from flower_blsgd.algorithm.sampling_stats import SamplingStats, sampling_stats
from flower_blsgd.errors import UsageError

from .workers import by_speed, table_of, workers

CIFAR10 = 50_000
FLOWERS_PAPER = 7_169

_PAPER_WORKERS = workers(8, 2)


class _CountOnly(Sampler):
    """A sampler of one's own: nothing but the right number of zeros."""

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        members = tuple(range(len(request.participants)))
        return [SampleList(np.zeros(request.set_size(members), np.int32), members)]


def _plan(
    num_samples: int,
    policy: StepPolicy,
    *,
    sampler: Sampler | None = None,
    participants: Sequence[Participant] = _PAPER_WORKERS,
    mode: EpochMode = "samples",
    epoch: int = 1,
    seed: int = 0,
    local_steps_fast: int = 32,
    table: LossTable | None = None,
    samples_before: int = 0,
    num_workers: int | None = None,
) -> EpochPlan:
    return plan_epoch(
        seed=seed,
        epoch=epoch,
        participants=participants,
        shape=round_shape(policy, participants, num_samples, mode, local_steps_fast, num_workers),
        sampler=sampler or SeparatedSampler(),
        table=table or LossTable(num_samples),
        samples_before=samples_before,
        samples_due=epoch * num_samples,
    )


def _run(
    epochs: int, num_samples: int, policy: StepPolicy, **settings: object
) -> Iterator[EpochPlan]:
    """Plan epoch after epoch, as a run does."""
    planned = 0
    for epoch in range(1, epochs + 1):
        plan = _plan(num_samples, policy, epoch=epoch, samples_before=planned, **settings)
        planned += plan.rounds * sum(plan.shape.samples_per_round)
        yield plan


@st.composite
def _settings(draw: st.DrawFn) -> dict[str, object]:
    """Small runs with both tiers; a round always fits."""
    fast, slow = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = draw(st.integers(2, 6))
    steps = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return {
        "num_samples": draw(st.integers(batch * (fast + slow), 700)),
        "policy": SystemAwareSteps(*steps),
        "participants": workers(fast, slow, batch),
        "seed": draw(st.integers(0, 2**40)),
        "local_steps_fast": steps[0],
    }


# how many rounds


@pytest.mark.parametrize(
    ("num_samples", "batch", "tiers", "policy", "num_workers", "rounds"),
    [
        # the paper's table: floor(50000 / (32 * 10 * 32)) = floor(4.88) = 4; times 32 = 128
        (CIFAR10, 32, (8, 2), SystemAwareSteps(32, 1), 10, 4),
        (CIFAR10, 32, (8, 2), SystemAwareSteps(32, 64), 10, 4),  # the fast ones' steps count
        (CIFAR10, 32, (8, 2), SameSteps(32), 10, 4),
        (CIFAR10, 32, (8, 2), SameSteps(1), 10, 128),
        # floor(7169 / (11 * 10 * 32)) = floor(2.04) = 2; times 32 = 64
        (FLOWERS_PAPER, 11, (8, 2), SystemAwareSteps(32, 1), 10, 2),
        (FLOWERS_PAPER, 11, (8, 2), SameSteps(1), 10, 64),
        # one CPU and one GPU: floor(50000 / (128 * 2 * 32)) = floor(6.10) = 6
        (CIFAR10, 128, (1, 1), SystemAwareSteps(32, 4), 2, 6),
        # only 8 of 10 train: R 32 x 10 / 8 rounds of synchronous SGD; R of local SGD
        (CIFAR10, 32, (8, 0), SameSteps(1), 10, 160),
        (CIFAR10, 32, (8, 0), SameSteps(32), 10, 4),
        # B P tau_F = 10,240; one sample fewer, and k = floor(10,239 / 320) = 31
        (10_239, 32, (8, 2), SameSteps(1), 10, 31),
        (10_240, 32, (8, 2), SameSteps(1), 10, 32),
        (20_480, 32, (8, 2), SameSteps(1), 10, 64),
    ],
)
def test_table_mode_communications_per_epoch(
    num_samples: int,
    batch: int,
    tiers: tuple[int, int],
    policy: StepPolicy,
    num_workers: int,
    rounds: int,
) -> None:
    participants = workers(*tiers, batch)
    for epoch in (1, 2, 18):  # the same in every epoch
        plan = _plan(
            num_samples,
            policy,
            sampler=_CountOnly(),
            participants=participants,
            mode="table",
            epoch=epoch,
            samples_before=epoch * 1000,
            num_workers=num_workers,
        )
        assert plan.rounds == rounds


# the shape of a round


@pytest.mark.parametrize(
    ("num_samples", "mode", "policy", "participants", "steps"),
    [
        (CIFAR10, "samples", SystemAwareSteps(32, 1), _PAPER_WORKERS, (32,) * 8 + (1,) * 2),
        # Flowers, official split. B (8 k + 2) <= N: 11 * 178 = 1958, with k = 23 it is 2046
        (2_040, "samples", SystemAwareSteps(32, 1), workers(8, 2, 11), (22,) * 8 + (1,) * 2),
        # its training part alone: 11 * 90 = 990, with k = 12 it is 1078
        (1_020, "samples", SystemAwareSteps(32, 1), workers(8, 2, 11), (11,) * 8 + (1,) * 2),
        # B P k <= N: 110 * 18 = 1980; 110 * 9 = 990
        (2_040, "table", SystemAwareSteps(32, 1), workers(8, 2, 11), (18,) * 8 + (1,) * 2),
        (1_020, "table", SystemAwareSteps(32, 1), workers(8, 2, 11), (9,) * 8 + (1,) * 2),
        # B = 4, tau = (3, 1): S = 16. k = 2: (2, max(1, floor(2/3))) is 12 samples
        (16, "samples", SystemAwareSteps(3, 1), workers(1, 1, 4), (3, 1)),
        (15, "samples", SystemAwareSteps(3, 1), workers(1, 1, 4), (2, 1)),
        (11, "samples", SystemAwareSteps(3, 1), workers(1, 1, 4), (1, 1)),
        # B P tau_F = 24, 16, 8
        (24, "table", SystemAwareSteps(3, 1), workers(1, 1, 4), (3, 1)),
        (23, "table", SystemAwareSteps(3, 1), workers(1, 1, 4), (2, 1)),
        (15, "table", SystemAwareSteps(3, 1), workers(1, 1, 4), (1, 1)),
        (8, "table", SystemAwareSteps(3, 1), workers(1, 1, 4), (1, 1)),
    ],
)
def test_round_shape_worked(
    num_samples: int,
    mode: EpochMode,
    policy: SystemAwareSteps,
    participants: Sequence[Participant],
    steps: tuple[int, ...],
) -> None:
    shape = round_shape(policy, participants, num_samples, mode, policy.local_steps_fast)
    batch = participants[0].batch_size
    assert shape.local_steps == steps
    assert shape.batch_sizes == (batch,) * len(steps)
    assert shape.samples_per_round == tuple(batch * number for number in steps)


@pytest.mark.parametrize(
    ("mode", "num_samples", "policy", "participants", "num_workers", "largest"),
    [
        # 5 workers and 34 samples: one step of all fits with floor(34 / 5) = 6
        *(
            (mode, 34, policy, lambda batch: workers(3, 2, batch), None, 6)
            for mode in ("samples", "table")
            for policy in (SystemAwareSteps(3, 1), SameSteps(1), SameSteps(3))
        ),
        # table mode: B P <= N with P = 5, though 3 train: floor(34 / 5) = 6
        ("table", 34, SameSteps(1), lambda batch: workers(3, 0, batch), 5, 6),
        # gamma 0.1 of one step: 19 and 2 samples are 21, 20 and 2 are 22
        ("samples", 21, SystemAwareSteps(1), lambda batch: by_speed(batch, 1.0, 0.1), None, 19),
        # not the largest share that a worker would have had: [16, 4] of 10 each
        ("samples", 19, BalancedBatches(), lambda batch: by_speed(batch, 1.0, 0.25), None, 9),
    ],
)
def test_round_shape_refuses_and_names_the_largest_batch(
    mode: EpochMode,
    num_samples: int,
    policy: StepPolicy,
    participants: object,
    num_workers: int | None,
    largest: int,
) -> None:
    def shape_of(batch: int) -> RoundShape:
        return round_shape(policy, participants(batch), num_samples, mode, 3, num_workers)

    for batch in (largest + 1, largest + 11):
        expected = rf"batch-size = {batch} .*largest that fits is batch-size = {largest}"
        with pytest.raises(ValueError, match=expected):
            shape_of(batch)
    assert set(shape_of(largest).local_steps) == {1}


def test_round_shape_with_batches_of_their_own_worked() -> None:
    """B 4; the second worker has 10 samples a step."""
    own = Participant(False, 4, given_batch=10)
    two = [*workers(1, 0, 4), own]
    policy = SystemAwareSteps(3, 1)
    assert round_shape(policy, two, 22, "samples", 3) == RoundShape((3, 1), (4, 10))
    assert round_shape(policy, two, 21, "samples", 3) == RoundShape((2, 1), (4, 10))
    # (4 + 10) x 3 = 42 samples of the rule's round; a third worker, which does not train, has 4
    for number, num_workers, rounds in ((84, 2, 2), (83, 2, 1), (108, 3, 2), (107, 3, 1)):
        assert round_shape(policy, two, number, "table", 3, num_workers).table_rounds == rounds
    # N / (B P) steps of 18 samples for three workers, on two with 14
    assert round_shape(SameSteps(1), two, 108, "table", 3, 3).table_rounds == 6 * 18 // 14
    for mode in ("samples", "table"):
        with pytest.raises(ValueError, match=r"with batch= .* the largest .* batch-size = 3"):
            round_shape(policy, two, 13, mode, 3)
        with pytest.raises(ValueError, match="use fewer workers, a smaller batch= or more data"):
            round_shape(policy, two, 11, mode, 3)


# the samples of each order


def test_indices_worked() -> None:
    """Blocks of one round, dealt in list order to the workers of a list in worker order."""
    shape = RoundShape(local_steps=(2, 1, 3), batch_sizes=(2, 2, 2))
    fast = np.arange(100, 120, dtype=np.int32)  # workers 0 and 2: 4 + 6 a round
    slow = np.arange(200, 204, dtype=np.int32)  # worker 1: 2 a round
    plan = EpochPlan(1, 2, shape, (SampleList(fast, (0, 2)), SampleList(slow, (1,))))
    assert plan.indices(0, 0).tolist() == [100, 101, 102, 103]
    assert plan.indices(0, 2).tolist() == [104, 105, 106, 107, 108, 109]
    assert plan.indices(1, 0).tolist() == [110, 111, 112, 113]
    assert plan.indices(1, 2).tolist() == [114, 115, 116, 117, 118, 119]
    assert plan.indices(0, 1).tolist() == [200, 201]
    assert plan.indices(1, 1).tolist() == [202, 203]
    for beyond in (-1, 2):
        with pytest.raises(AssertionError, match="2 rounds"):
            plan.indices(beyond, 0)


@given(_settings(), st.sampled_from(["samples", "table"]), st.booleans(), st.integers(2, 5))
def test_orders_of_a_run_are_its_lists_in_order(
    settings: dict[str, object], mode: EpochMode, uniform: bool, epochs: int
) -> None:
    """Nothing is lost, doubled or moved, and no index comes twice within a list."""
    num_samples, participants = settings["num_samples"], settings["participants"]
    sampler = UniformSampler() if uniform else SeparatedSampler()
    stream = []
    for plan in _run(epochs, mode=mode, sampler=sampler, **settings):
        for one in plan.sample_lists:
            orders = [plan.indices(r, w) for r in range(plan.rounds) for w in one.members]
            assert [len(order) for order in orders] == [
                plan.shape.samples_per_round[w] for _ in range(plan.rounds) for w in one.members
            ]
            dealt = np.concatenate(orders)
            assert dealt.dtype == np.int32
            assert dealt.tolist() == one.indices.tolist()
            stream.append(dealt)
            for start in range(0, 0 if uniform else len(dealt), num_samples):
                part = dealt[start : start + num_samples]
                assert len(np.unique(part)) == len(part)
        members = [w for one in plan.sample_lists for w in one.members]
        assert members == list(range(len(participants)))
    if uniform:  # an epoch goes on where the last one ended
        count = sum(map(len, stream))
        expected = permutation_stream(settings["seed"], num_samples, 0, count)
        assert np.concatenate(stream).tolist() == expected.tolist()


# samplers and step policies of one's own


@dataclasses.dataclass
class _OwnSampler(Sampler):
    """Returns what it is given."""

    lists: Any

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        return self.lists  # type: ignore[no-any-return]


def _zeros(count: int, *members: int, dtype: Any = np.int32) -> SampleList:
    return SampleList(np.zeros(count, dtype), members)


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        # Two workers with a step of 2 samples each: 6 rounds of 24 samples, so 12 for each.
        ([_zeros(12, 0)], "are for the participants [0]; each of the 2"),
        ([_zeros(12, 0), _zeros(24, 0, 1)], "the participants [0, 0, 1]"),
        ([_zeros(12, 0), _zeros(12, 2)], "the participants [0, 2]"),
        ([_zeros(12, 0), _zeros(11, 1)], "[1] are int32 of shape (11,), not int32 of shape (12,)"),
        ([_zeros(24, 0, 1, dtype=np.int64)], "[0, 1] are int64 of shape (24,), not int32"),
        ([SampleList(np.zeros((24, 1), np.int32), (0, 1))], "shape (24, 1), not int32 of shape"),
        ([SampleList([0] * 24, (0, 1))], "are list of shape (24,), not int32"),  # type: ignore[arg-type]
        ([SampleList(np.full(24, 24, np.int32), (0, 1))], "lie in [24, 24], not in [0, 23]"),
        ([SampleList(np.arange(-1, 23, dtype=np.int32), (0, 1))], "lie in [-1, 22]"),
        ([np.zeros(24, np.int32)], "a list of SampleList"),
    ],
)
def test_lists_of_an_own_sampler_that_cannot_be_used_are_refused(lists: Any, reason: str) -> None:
    pair = workers(1, 1, 2)
    with pytest.raises(UsageError, match=re.escape(reason)) as refusal:
        _plan(24, SameSteps(1), sampler=_OwnSampler(lists), participants=pair)
    assert str(refusal.value).startswith("_OwnSampler.sample_lists, epoch 1: ")
    good = _OwnSampler([_zeros(12, 0), _zeros(12, 1)])
    assert _plan(24, SameSteps(1), sampler=good, participants=pair).lists_end == 6


@dataclasses.dataclass
class _OwnPolicy(StepPolicy):
    steps: Any
    sizes: Any = (2, 2)

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        return self.steps  # type: ignore[no-any-return]

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        return self.sizes  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        *((_OwnPolicy(steps), "local_steps") for steps in ([1], [1, 0], [1, 1.5], None, [1, "2"])),
        *((_OwnPolicy([1, 1], sizes), "batch_sizes") for sizes in ([2, 1], [2, 2, 2], [2, 2.0])),
    ],
)
def test_numbers_of_an_own_step_policy_that_cannot_be_used_are_refused(
    policy: _OwnPolicy, method: str
) -> None:
    with pytest.raises(UsageError, match=rf"^_OwnPolicy\.{method} returned .* a list of 2 whole"):
        round_shape(policy, workers(1, 1, 2), 24, "samples", 1)


def test_numbers_of_an_own_step_policy_may_be_numpy_s_and_large() -> None:
    """10^12 to 1, shrunk until a round fits: 11 x 2 + 1 x 2 = 24."""
    policy = _OwnPolicy(np.array([10**12, 1]))
    shape = round_shape(policy, workers(1, 1, 2), 24, "samples", 1)
    assert shape.local_steps == (11, 1)
    assert all(type(steps) is int for steps in shape.local_steps)


# statistics of the choice of samples

_PAIR = workers(1, 1, 2)


def plan_of(fast: list[int], slow: list[int]) -> EpochPlan:
    """Two rounds of a fast and a slow worker with two samples each."""
    shape = RoundShape(local_steps=(1, 1), batch_sizes=(2, 2))
    lists = SampleList(np.array(fast, np.int32), (0,)), SampleList(np.array(slow, np.int32), (1,))
    return EpochPlan(2, 2, shape, lists)


def test_stats_hand_worked() -> None:
    """The losses are the indices; 8 and 9 were never seen, and the fast worker gets 1 twice."""
    unseen = math.inf
    table = table_of([0, 1, 2, 3, 4, 5, 6, 7, unseen, unseen], [2, 2, 2, 2, 4, 4, 6, 6, 0, 0])
    plan = plan_of(fast=[0, 1, 1, 2], slow=[7, 8, 9, 0])
    stats = sampling_stats(plan, _PAIR, table, last_round=6, rounds_per_epoch=2.0)
    assert stats == SamplingStats(
        all_loss_mean=3.5,
        all_loss_p10=pytest.approx(0.7),
        all_loss_p90=pytest.approx(6.3),
        fast_picked_loss_mean=1.0,  # (0 + 1 + 1 + 2) / 4
        slow_picked_loss_mean=3.5,  # (7 + 0) / 2: the others have no recorded loss
        # (0 + 1 + 1 + 2 + 7 + 0) / 6, over 3.5
        picked_over_all_loss=pytest.approx(11 / 21),
        distinct_samples=6,  # 0, 1, 2, 7, 8, 9
        share_never_seen=pytest.approx(0.2),
        share_left_out=0.7,  # all but 0, 1 and 2
        loss_age_epochs_mean=1.25,  # (4 x 4 + 2 x 2 + 2 x 0) / 8 rounds
        loss_age_epochs_p90=2.0,
        loss_age_epochs_max=2.0,  # round 2, after round 6
        left_out_age_epochs_mean=pytest.approx(0.8),  # (4 + 2 + 2 + 0 + 0) / 5 rounds
        left_out_age_epochs_p90=2.0,
    )


def test_first_epoch_knows_no_loss_and_no_age() -> None:
    plan = plan_of([0, 1, 2, 3], [4, 5, 6, 7])
    stats = sampling_stats(plan, _PAIR, LossTable(10), 0, 1.0)
    assert (stats.share_never_seen, stats.share_left_out) == (1.0, 0.6)
    assert stats.distinct_samples == 8
    known = ("share_never_seen", "share_left_out", "distinct_samples")
    figures = dataclasses.asdict(stats)
    for name, value in figures.items():  # plain numbers, for a csv file
        assert type(value) is (int if name == "distinct_samples" else float), name
    assert all(math.isnan(value) for name, value in figures.items() if name not in known)
