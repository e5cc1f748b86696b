"""Speeds that change while training: the roster learns them between epochs."""

import logging
from collections.abc import Sequence

from .algorithm.moving_speeds import MovingSpeeds, speeds_changed
from .roster import Roster
from .round_replies import Outcome

_LOG = logging.getLogger(__name__)

FALL, RISE = 0.1, 0.25
"""A gamma that fell or rose by no more than this share is left alone."""


class Rebalancing:
    """Follows the workers' seconds per step on the wall clock.

    Parameters
    ----------
    follow : bool
        The step policy wants the newest speeds after every epoch.
    rebalance : bool
        The user wants steps to follow speeds, past a dead band.
    """

    def __init__(self, follow: bool, rebalance: bool) -> None:
        self._follow = follow
        self._on = follow or rebalance
        self._speeds = MovingSpeeds()

    def add(self, outcomes: Sequence[Outcome], batch_size: int) -> None:
        """Take the times of a round; a failed order says nothing of its worker's speed."""
        if not self._on:
            return
        for outcome in outcomes:
            report = outcome.report
            if report is not None and report.num_examples and report.compute_seconds > 0:
                seconds = report.compute_seconds * batch_size / report.num_examples
                self._speeds.add(outcome.worker.index, seconds)

    def apply(self, roster: Roster) -> bool:
        """Bring the roster's speeds up to date, if they changed; call it between epochs.

        Returns
        -------
        bool
            Whether it did.
        """
        if not self._on:
            return False
        there = {worker.index for worker in roster.active}
        for gone in self._speeds.seconds_per_step.keys() - there:
            self._speeds.forget(gone)  # it may come back on another device
        measured = dict(self._speeds.seconds_per_step)
        used = {
            worker.index: worker.profile.seconds_per_step
            for worker in roster.active
            if worker.index in measured and worker.profile.seconds_per_step > 0
        }
        fall, rise = (0.0, 0.0) if self._follow else (FALL, RISE)
        if not measured or not speeds_changed(used, measured, fall, rise):
            return False
        roster.set_speeds(measured)
        told = "; ".join(f"{w.label}: {w.speed}" for w in roster.active if w.index in measured)
        _LOG.info("speeds changed: %s", told)
        return True
