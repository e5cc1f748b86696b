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


def plan_line(predicted: Figures, measured: Figures) -> str:
    """Return both in one line.

    Examples
    --------
    >>> both = {"epoch_seconds": 2.0, "fast_waiting_share": 0.05}
    >>> plan_line(both, {**both, "epoch_seconds": 2.2})
    'plan: 2 s an epoch, fast waits 5%; measured: 2.2 s (+10%), fast waits 5%'
    """
    expected, took = predicted["epoch_seconds"], measured["epoch_seconds"]
    assert isinstance(expected, float)
    assert isinstance(took, float)
    return (
        f"plan: {expected:.3g} s an epoch{_waits(predicted)}; measured: {took:.3g} s "
        f"({took / expected - 1:+.0%}){_waits(measured)}"
    )


def _waits(figures: Figures) -> str:
    share = figures["fast_waiting_share"]
    return f", fast waits {share:.0%}" if isinstance(share, float) else ""
