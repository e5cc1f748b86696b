"""Which arguments of the strategy do not go together."""

from typing import Any, get_args

from .algorithm.epoch_plan import EpochMode
from .algorithm.local_steps import Clock, StepPolicy
from .protocol import MOMENTUM_POLICIES


def refuse_unfit(
    *,
    fraction_train: float,
    batch_size: int,
    policy: StepPolicy,
    weights: Any,
    epoch: str,
    momentum_buffers: str,
    deadline_seconds: float,
    clock: str,
    rebalance: bool,
) -> None:
    """Raise ValueError, in one line that names the argument, if the arguments do not fit."""
    if fraction_train != 1.0:
        raise ValueError(f"fraction_train = {fraction_train}: all workers take part in every round")
    if batch_size < 2:
        raise ValueError(f"batch_size = {batch_size} must be at least 2")
    for name, value, known in (
        ("epoch", epoch, get_args(EpochMode)),
        ("momentum_buffers", momentum_buffers, MOMENTUM_POLICIES),
        ("clock", clock, get_args(Clock)),
    ):
        if value not in known:
            raise ValueError(f"{name} = {value!r} must be one of {', '.join(known)}")
    if not deadline_seconds >= 0:
        raise ValueError(f"deadline_seconds = {deadline_seconds} must be at least 0")
    only = getattr(weights, "momentum_buffers", momentum_buffers)
    if only != momentum_buffers:
        raise ValueError(
            f"momentum_buffers = {momentum_buffers!r}: {type(weights).__name__} holds for "
            f"{only!r} only"
        )
    if rebalance and not getattr(policy, "needs_speeds", False):
        raise ValueError(
            "rebalance = True needs steps that come from speeds: no number for the slow workers"
        )
    if rebalance and clock == "device":
        raise ValueError(
            "rebalance = True follows what is measured while training, and clock = 'device' "
            "computes with the speed of each worker alone; use clock = 'wall'"
        )
