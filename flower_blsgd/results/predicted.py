"""What the cost model expected of a run, and the same figures as they were."""

from collections.abc import Sequence

from ..experiments.cost_model import Prediction
from ..round_log import RoundRecord
from .accounts import Accounts

Figures = dict[str, float | str | None]


def predicted_figures(prediction: Prediction | None, clock: str) -> Figures | None:
    """Return the expected figures; None where a speed was not known before the first round.

    The expected round has no overhead: what the measured one has above it is moving and averaging
    models, and workers that were not as fast as they had been when their speed was measured.
    """
    if prediction is None:
        return None
    return {
        "clock": clock,
        "round_seconds": prediction.round_seconds,
        "epoch_seconds": prediction.epoch_seconds,
        "fast_waiting_share": prediction.fast_waiting_share,
        "slow_waiting_share": prediction.slow_waiting_share,
    }


def measured_figures(accounts: Accounts, records: Sequence[RoundRecord]) -> Figures | None:
    """Return the figures as measured, on the run's clock; None without a round, or a speed."""
    if not records or (accounts.clock == "device" and accounts.device_seconds is None):
        return None
    last = records[-1]
    epochs = last.epoch - 1 + last.round_in_epoch / last.rounds_in_epoch
    seconds = accounts.budget_seconds
    return {
        "clock": accounts.clock,
        "round_seconds": seconds / len(records),
        "epoch_seconds": seconds / epochs,
        "fast_waiting_share": accounts.waiting_share(fast=True),
        "slow_waiting_share": accounts.waiting_share(fast=False),
    }
