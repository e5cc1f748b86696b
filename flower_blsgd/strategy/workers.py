"""The workers of a run: queried once, ranked once, recognised when they come back.

A worker whose node is gone keeps its index and gets no order until it is back; `replies` says what
becomes of an order that fails.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from ..algorithm.local_steps import (
    FAST_SPEED_RATIO,
    Clock,
    Participant,
    StepPolicy,
    speed_ratios,
    speeds_changed,
)
from ..errors import UsageError
from ..protocol import WorkerProfile
from .profiles import UNKNOWN_DEVICE, Address, query_profiles, query_speeds

if TYPE_CHECKING:
    from .replies import Outcome

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_MUST_BE_EQUAL = (
    ("data_fingerprint", "holds other training data", "point both at the same data set"),
    ("model_fingerprint", "has another model", "install the same task and versions on both"),
)

DEAD_BAND = 0.1, 0.25
"""With ``rebalance``, a gamma that fell or rose by no more than these shares is left alone."""

_NEWEST_SHARE = 0.4
"""Of the moving average of a worker's speed: after five rounds at a new one, 92 % of it is in."""


@dataclass
class Worker:
    """One worker of the run.

    Attributes
    ----------
    index : int
        Its rank in every sum and every draw; it never changes.
    node_id : int
        The Flower node that it is now; a SuperNode gets a new one when it starts again,
        unless its key is registered.
    profile : WorkerProfile
        What its node answered.
    present : bool
        Whether the node is connected.
    excluded : str
        Why it takes no part any more; empty while it does, and again once its node connects with
        a new id.
    fast : bool
        Its tier: as named, else by its speed.
    speed_ratio : float, optional
        gamma, if the speeds are known.
    measured : bool
        Whether its seconds per step were measured by us, not given.
    queried : bool
        Whether it was told to measure them before training, with or without success.
    training_seconds_per_step : float
        Moving average of what its orders took; 0 before the first.
    local_rank : int, optional
        Its rank within a node with several devices; None if the node is this worker.
    """

    index: int
    node_id: int
    profile: WorkerProfile
    present: bool = True
    excluded: str = ""
    fast: bool = True
    speed_ratio: float | None = None
    measured: bool = False
    queried: bool = False
    training_seconds_per_step: float = 0.0
    local_rank: int | None = None

    @property
    def address(self) -> Address:
        """The node id and the local rank of the worker, as they are now."""
        return self.node_id, self.local_rank

    @property
    def label(self) -> str:
        """The worker's name in logs and results, such as ``fast-0 (cpu:0)``."""
        tier = "fast" if self.fast else "slow"
        return f"{self.profile.name or f'{tier}-{self.index}'} ({self.profile.device})"

    @property
    def speed(self) -> str:
        """The worker's speed in words; empty if it is not known."""
        if self.speed_ratio is None:
            return ""
        source = "measured" if self.measured else "given"
        seconds = f"{self.profile.seconds_per_step:.2g} s a step {source}"
        return f"{seconds}, gamma {self.speed_ratio:.2f}"

    def participant(self, batch_size: int) -> Participant:
        """Return what the algorithm needs to know of this worker."""
        return Participant(self.fast, batch_size, self.speed_ratio, self.profile.steps or None)


def rank_key(
    profile: WorkerProfile, local_rank: int | None = None
) -> tuple[bool, int, float, str, int]:
    """Return the key that workers are ranked by: never a node id, never a measured speed.

    Named slow ones last; then by partition id, else by name, else by device; then by the rank
    within a node with several devices.
    """
    slow, local_rank = profile.tier == "slow", local_rank or 0
    if profile.partition_id >= 0:
        return slow, 0, profile.partition_id, "", local_rank
    if profile.name:
        return slow, 1, 0, profile.name, local_rank
    return slow, 2, 0, profile.device, local_rank


class WorkerRegistry:
    """The workers of a run in worker order: who is there, in which tier, how fast.

    Parameters
    ----------
    min_workers : int
        Nodes to wait for before the first round, >= 1.
    fast_threshold : float (default: 0.7)
        An unnamed worker is fast if its speed ratio is above this.
    step_policy : StepPolicy, optional
        Says whose steps come from speeds; without it none is measured.
    batch_size : int (default: 0)
        Samples per step to measure with.
    clock : {"wall", "device"} (default: "wall")
        ``"wall"`` measures all at once, as they train; ``"device"`` one after another, each as
        if it had the machine for itself, and always.
    """

    def __init__(
        self,
        min_workers: int,
        fast_threshold: float = FAST_SPEED_RATIO,
        step_policy: StepPolicy | None = None,
        batch_size: int = 0,
        clock: Clock = "wall",
    ) -> None:
        self._min_workers = min_workers
        self._fast_threshold = fast_threshold
        self._step_policy = step_policy
        self._batch_size = batch_size
        self._clock = clock
        self.workers: list[Worker] = []
        self._silent_nodes: set[int] = set()
        self._warned_of_duplicates = False

    @classmethod
    def of_profiles(
        cls, profiles: Sequence[WorkerProfile], fast_threshold: float = FAST_SPEED_RATIO
    ) -> "WorkerRegistry":
        """Return the registry of nodes with these profiles; node ids count from 0."""
        registry = cls(len(profiles), fast_threshold)
        registry.register({(node, None): profile for node, profile in enumerate(profiles)})
        return registry

    @property
    def active(self) -> list[Worker]:
        """The workers that can be given an order now, in worker order."""
        return [worker for worker in self.workers if worker.present and not worker.excluded]

    def update(self, grid: Grid) -> None:
        """Notice nodes that came or went; query new ones, and measure speeds that are needed.

        The first call waits until enough nodes are connected. A node without an answer is queried
        again when it connects anew.

        Raises
        ------
        UsageError
            If, at the start, two nodes hold other data or another model.
        """
        online = self._wait(grid) if not self.workers else set(grid.get_node_ids())
        for worker in self.workers:
            if worker.present and worker.node_id not in online:
                worker.training_seconds_per_step = 0.0  # it may come back on another device
                _LOG.warning("%s is gone", worker.label)
            worker.present = worker.node_id in online
        known = {worker.node_id for worker in self.workers} | self._silent_nodes
        if new := sorted(online - known):
            started = bool(self.workers)
            self.register(query_profiles(grid, new))
            self._silent_nodes |= set(new) - {worker.node_id for worker in self.workers}
            self._measure_speeds(grid, started)

    def _wait(self, grid: Grid) -> set[int]:
        logged = -1
        while len(online := set(grid.get_node_ids())) < self._min_workers:
            if len(online) != logged:
                logged = len(online)
                _LOG.info("waiting: %d of %d nodes are connected", logged, self._min_workers)
            time.sleep(_POLL_SECONDS)
        return online

    def register(self, found: Mapping[Address, WorkerProfile]) -> None:
        """Add workers, or recognise those that come back: they keep their index."""
        started = bool(self.workers)
        ranked = sorted((rank_key(p, rank), node, rank) for (node, rank), p in found.items())
        for key, node_id, local_rank in ranked:
            profile, identity = found[node_id, local_rank], key[1:]
            same = [w for w in self.workers if rank_key(w.profile, w.local_rank)[1:] == identity]
            back = next((w for w in same if not w.present), None)
            if started and (reason := self._mismatch(profile)):
                _LOG.error("node %d does not take part: %s", node_id, reason)
            elif back is not None:
                back.node_id, back.local_rank, back.profile = node_id, local_rank, profile
                back.present, back.excluded, back.measured = True, "", False
                back.queried = False
                _LOG.info("%s is back", back.label)
            else:
                if same and not self._warned_of_duplicates:
                    self._warned_of_duplicates = True
                    _LOG.warning(
                        "two nodes cannot be told apart (%s): this run cannot be repeated bit for "
                        "bit; give each node name='...' or partition-id=N in its node config",
                        profile.name or profile.device,
                    )
                index = len(self.workers)
                self.workers.append(Worker(index, node_id, profile, local_rank=local_rank))
        self._assign_tiers()
        if not started:
            for worker in self.workers:
                if reason := self._mismatch(worker.profile):
                    raise UsageError(f"worker {worker.label} {reason}")

    def _measure_speeds(self, grid: Grid, started: bool) -> None:
        profiles = [w.profile for w in self.active if w.profile.device != UNKNOWN_DEVICE]
        needed = any(not profile.tier or self._decides_steps(profile) for profile in profiles)
        if self._step_policy is None or not (needed or self._clock == "device"):
            return
        unknown = [w for w in self.active if not w.profile.seconds_per_step and not w.queried]
        if self._clock == "wall":  # those that were measured compute meanwhile, as in a round
            groups = [[*unknown, *(w for w in self.active if w.measured)]] if unknown else []
        else:
            groups = [[worker] for worker in unknown]
        speeds: dict[Address, float | str] = {}
        for group in groups:
            _LOG.info("measuring the seconds per step: %s", ", ".join(w.label for w in group))
            speeds |= query_speeds(grid, [worker.address for worker in group], self._batch_size)
        for worker in unknown:
            worker.queried = True
            seconds = speeds[worker.address]
            if isinstance(seconds, float):
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
                worker.measured = True
                continue
            _LOG.warning("the speed of %s is not known: %s", worker.label, seconds)
            if started and self._decides_steps(worker.profile):
                # At the start the settings are refused; a run that goes on must not be.
                worker.excluded = "its steps come from its speed, and that is not known"
                _LOG.error("%s does not take part: %s", worker.label, worker.excluded)
        self._assign_tiers()

    def _decides_steps(self, profile: WorkerProfile) -> bool:
        """Return whether the steps of a worker whose tier is named come from its speed."""
        policy = self._step_policy
        if policy is None or not policy.needs_speeds or profile.steps:
            return False
        return profile.tier == "slow" or policy.needs_fast_speeds

    def note_times(self, outcomes: Sequence["Outcome"], batch_size: int) -> None:
        """Take the times of a round; a failed order says nothing of its worker's speed."""
        for outcome in outcomes:
            report, worker = outcome.report, outcome.worker
            if report is not None and report.num_examples and report.compute_seconds > 0:
                seconds = report.compute_seconds * batch_size / report.num_examples
                old = worker.training_seconds_per_step or seconds
                worker.training_seconds_per_step = old + _NEWEST_SHARE * (seconds - old)

    def follow_speeds(self, fall: float, rise: float) -> None:
        """Take the speeds measured while training if some gamma left its dead band.

        Call it between epochs: steps and tiers follow.
        """
        timed = [worker for worker in self.active if worker.training_seconds_per_step]
        measured = {worker.index: worker.training_seconds_per_step for worker in timed}
        used = {
            worker.index: worker.profile.seconds_per_step
            for worker in timed
            if worker.profile.seconds_per_step > 0
        }
        if not timed or not speeds_changed(used, measured, fall, rise):
            return
        for worker in timed:
            known = worker.profile
            # What was given holds for the worker alone; that is not forgotten.
            given = 0.0 if worker.measured else known.seconds_per_step
            worker.profile = replace(
                known,
                seconds_per_step=worker.training_seconds_per_step,
                seconds_per_step_alone=known.seconds_per_step_alone or given,
            )
            worker.measured = True
        self._assign_tiers()
        _LOG.info("speeds changed: %s", "; ".join(f"{w.label}: {w.speed}" for w in timed))

    def _mismatch(self, profile: WorkerProfile) -> str:
        """Return what a worker has that is not as the others'; empty if nothing is."""
        for fingerprint, difference, way_out in _MUST_BE_EQUAL:
            first = next((w for w in self.workers if getattr(w.profile, fingerprint)), None)
            if first is not None and getattr(profile, fingerprint) not in (
                "",
                getattr(first.profile, fingerprint),
            ):
                return f"{difference} than {first.label}; {way_out}"
        return ""

    def _assign_tiers(self) -> None:
        seconds = [worker.profile.seconds_per_step or None for worker in self.workers]
        for worker, ratio in zip(self.workers, speed_ratios(seconds), strict=True):
            worker.speed_ratio = ratio
            named = worker.profile.tier
            # Without a known speed an unnamed worker counts as gamma 1.
            worker.fast = named == "fast" or (
                not named and (ratio is None or ratio > self._fast_threshold)
            )
