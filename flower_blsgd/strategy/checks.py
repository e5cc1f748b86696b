"""Checks that parts of a strategy, and its workers, do not exclude each other."""

from collections.abc import Sequence
from typing import get_args

from flwr.serverapp.exception import AggregationError

from ..algorithm.averaging import LoadWeighting, Weighting, node_weight
from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import EpochMode
from ..algorithm.local_steps import BalancedBatches, Clock, SameSteps
from ..algorithm.outer_optimizer import OuterOptimizer
from ..algorithm.sampling import Sampler, UnifiedSampler
from ..errors import UsageError
from ..protocol import MOMENTUM_POLICIES, Average
from .plan_state import PlannerSettings
from .workers import Worker


def check_parts(
    settings: PlannerSettings, weighting: Weighting, rebalance: bool, clock: Clock
) -> None:
    """Raise UsageError if two parts of a strategy exclude each other."""
    selection, sampler, policy = settings.selection, settings.sampler, settings.step_policy
    # The settings of these names may be empty.
    parts = (
        ("epoch", settings.mode, get_args(EpochMode)),
        ("average", settings.average, get_args(Average)),
        ("momentum-buffers", settings.momentum_buffers, MOMENTUM_POLICIES),
    )
    for name, value, allowed in parts:
        if not value:
            raise UsageError(f"{name} = '' must be one of {', '.join(allowed)}")
    if selection:
        if isinstance(sampler, UnifiedSampler):
            raise UsageError(
                f"selection ({type(selection).__name__}) leaves out samples of an epoch, but "
                'sampler = "unified" gives all remaining samples to the second tier; use '
                '"separated" or "uniform"'
            )
        if settings.mode == "table":
            raise UsageError(
                'selection makes epochs shorter, but epoch = "table" has the number of rounds of '
                'the paper; use epoch = "samples"'
            )
    _check_high_losses(sampler, settings.train_on)
    if weighting.momentum_buffers not in ("", settings.momentum_buffers):
        raise UsageError(
            f'momentum-buffers = "{settings.momentum_buffers}" does not work with '
            f'{type(weighting).__name__}, which needs "{weighting.momentum_buffers}"'
        )
    if settings.overlap and (policy.chooses_batches or policy == SameSteps(1)):
        what, fix = type(policy).__name__, 'use steps = "system-aware"'
        if settings.average == "gradients":
            what, fix = 'average = "gradients"', "leave one of them out"
        raise UsageError(
            f"overlap = true does not work with {what}, which synchronizes every step; {fix}"
        )
    if settings.overlap and settings.momentum_buffers == "average":
        raise UsageError(
            'overlap = true does not work with momentum-buffers = "average", which waits for the '
            'momentum of all workers; use "keep"'
        )
    if rebalance and policy.follows_speeds:
        raise UsageError(
            f"rebalance = true: {type(policy).__name__} follows the measured speeds in any case; "
            "leave rebalance out"
        )
    if rebalance and not policy.with_local_steps(1).needs_speeds:
        raise UsageError(
            f"rebalance = true needs steps that follow from speeds, not {type(policy).__name__}; "
            'use steps = "system-aware" and local-steps-slow = "auto"'
        )
    if rebalance and clock == "device":
        raise UsageError(
            'rebalance = true follows measured speeds, but clock = "device" computes with '
            'fixed ones; use clock = "wall"'
        )


def _check_high_losses(sampler: Sampler, train_on: TrainOn) -> None:
    if train_on.fast_only and getattr(sampler, "high_loss_to", "fast") == "slow":
        raise UsageError(
            'high-loss-to = "slow" gives samples with high losses to slow workers, which do not '
            'train (train-on); use "fast", or sampler = "uniform"'
        )


def check_gradients(
    settings: PlannerSettings, weighting: Weighting, outer_optimizer: OuterOptimizer | None
) -> None:
    """Raise UsageError for parts that do not work with averaged gradients."""
    policy = settings.step_policy
    if not isinstance(policy, BalancedBatches) and policy != SameSteps(1):
        name = type(policy).__name__
        why = f'steps = {name}: a round is one step of each; use "one-by-throughput" or "one"'
    elif type(weighting) is not LoadWeighting:
        why = f'weights = {type(weighting).__name__}: every sample counts equally; use "load"'
    elif settings.momentum_buffers == "reset":
        why = 'momentum-buffers = "reset": a round is one step; use "keep"'
    elif settings.train_on.slow_reduce:
        why = 'train-on = "fast-slow-sums": slow workers sum models; use "fast"'
    elif outer_optimizer is not None:
        why = f"outer-optimizer ({type(outer_optimizer).__name__}), which steps by models"
    else:
        return
    raise UsageError(f'average = "gradients" does not work with {why}')


def why_no_hosts(weighting: Weighting, train_on: TrainOn) -> str:
    """Return the reason why nodes with several devices cannot take part; empty if they can."""
    if not node_weight(weighting):
        name = type(weighting).__name__
        return f"{name} cannot be computed on a node: only the built-in weightings can"
    if train_on.slow_reduce:
        return "slow workers reduce models in shared memory only"
    return ""


def refuse_nobody(workers: Sequence[Worker]) -> None:
    """Raise AggregationError without a worker."""
    if not workers:
        raise AggregationError("no worker is left to train; see the log above")


def refuse_missing_tier(
    workers: Sequence[Worker], sampler: Sampler, train_on: TrainOn, batch_size: int
) -> None:
    """Raise UsageError if the sampler or `train_on` needs a tier that is missing."""
    needed, several = {}, len(workers) > 1
    by_speed = sorted(workers, key=lambda w: -w.samples_per_second(batch_size))
    name_fast = f"name {by_speed[0].label if several else 'one'} fast"
    name_slow = f"name {by_speed[-1].label if several else 'one'} slow"
    # An unnamed worker with an unknown speed may turn out to be slow.
    unknown = any(not w.profile.tier and w.speed_ratio is None for w in workers)
    if train_on.fast_only:
        needed["fast"] = f"only fast workers train; {name_fast}"
    elif sampler.needs_both_tiers and not unknown:
        both = "this sampler needs a fast and a slow one"
        for tier, fix in (("fast", name_fast), ("slow", name_slow)):
            needed[tier] = f'{both}; {fix}, or use sampler = "uniform"'
    if train_on.slow_reduce:
        needed["slow"] = f'slow workers sum the models; {name_slow}, or use train-on = "fast"'
    for tier, reason in needed.items():
        if not any(worker.fast is (tier == "fast") for worker in workers):
            present = ", ".join(worker.label for worker in workers)
            raise UsageError(f"workers: no {tier} worker among {present}, and {reason}")
