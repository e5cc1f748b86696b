"""The next epoch, planned while the workers have other things to wait for."""

import contextlib
from dataclasses import dataclass

from .algorithm.epoch_plan import EpochMode, EpochPlan, RoundShape, plan_epoch
from .algorithm.local_steps import Participant
from .algorithm.loss_table import LossTable
from .algorithm.sampling import Sampler
from .background import Later


@dataclass(frozen=True)
class PlanRequest:
    """What the plan of an epoch is a function of, beside the recorded losses; see `plan_epoch`."""

    seed: int
    epoch: int
    mode: EpochMode
    participants: tuple[Participant, ...]
    shape: RoundShape
    samples_before: int

    def plan(self, sampler: Sampler, table: LossTable) -> EpochPlan:
        """Return the plan."""
        return plan_epoch(
            seed=self.seed,
            epoch=self.epoch,
            mode=self.mode,
            participants=self.participants,
            shape=self.shape,
            sampler=sampler,
            table=table,
            samples_before=self.samples_before,
        )


class EpochAhead:
    """Plans an epoch in a thread of its own before it is due.

    Parameters
    ----------
    sampler : Sampler
        Chooses the samples.
    table : LossTable
        It must not change between `begin` and `take`.
    """

    def __init__(self, sampler: Sampler, table: LossTable) -> None:
        self._sampler = sampler
        self._table = table
        self._begun: tuple[PlanRequest, Later[EpochPlan]] | None = None

    def begin(self, request: PlanRequest) -> None:
        """Begin to plan."""
        plan = self._later(request)
        plan.begin()
        self._begun = request, plan

    def take(self, request: PlanRequest) -> EpochPlan:
        """Return the plan: the one begun if that was asked for the same, else a new one.

        A new one too if the one begun failed, so that its error is raised where it is due.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == request:
            with contextlib.suppress(Exception):
                return begun[1].result()
        return request.plan(self._sampler, self._table)

    def _later(self, request: PlanRequest) -> Later[EpochPlan]:
        sampler, table = self._sampler, self._table
        return Later(lambda: request.plan(sampler, table))
