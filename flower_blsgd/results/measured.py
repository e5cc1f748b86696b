"""What a run was like, in the figures that the cost model predicts."""

from collections.abc import Sequence

from ..round_log import RoundRecord
from .accounts import Accounts

Figures = dict[str, float | str | None]


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
