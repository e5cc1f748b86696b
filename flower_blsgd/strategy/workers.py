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
    Participant,
    speed_ratios,
    speeds_changed,
)
from ..errors import UsageError
from ..protocol import WorkerProfile
from .profiles import Address, SpeedRule, query_profiles

if TYPE_CHECKING:
    from .replies import Outcome

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_MUST_BE_EQUAL = (
    ("data_fingerprint", "holds other training data", "point both at the same data set"),
    ("model_fingerprint", "has another model", "install the same task and versions on both"),
)

FALL, RISE = 0.1, 0.25
"""With ``rebalance``, a gamma that fell or rose by no more than this share is left alone."""


@dataclass
class Worker:
    """One worker of the run.

    Attributes
    ----------
    index : int
        Its rank in every sum and every draw; it never changes.
    node_id : int
        The Flower node that it is now; a SuperNode gets a new one when it starts again.
    profile : WorkerProfile
        What its node answered.
    present : bool
        Whether the node is connected.
    excluded : str
        Why it takes no part any more; empty while it does.
    fast : bool
        Its tier: as named, else by its speed.
    speed_ratio : float, optional
        gamma, if the speeds are known.
    measured : bool
        Whether its seconds per step were measured by us, not given.
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
    local_rank: int | None = None

    @property
    def address(self) -> Address:
        """Node id and local rank, as they are now."""
        return self.node_id, self.local_rank

    @property
    def label(self) -> str:
        """Its name in logs and results, such as ``fast-0 (cpu:0)``."""
        tier = "fast" if self.fast else "slow"
        return f"{self.profile.name or f'{tier}-{self.index}'} ({self.profile.device})"

    @property
    def speed(self) -> str:
        """Its speed in words; empty if it is not known."""
        if self.speed_ratio is None:
            return ""
        source = "measured" if self.measured else "given"
        seconds = f"{self.profile.seconds_per_step:.2g} s a step {source}"
        return f"{seconds}, gamma {self.speed_ratio:.2f}"

    def participant(self, batch_size: int) -> Participant:
        """Return what the algorithm needs to know of it."""
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
    speed_rule : SpeedRule, optional
        When to measure seconds per step; None for never.
    fast_threshold : float (default: 0.7)
        An unnamed worker is fast if its speed ratio is above this.
    """

    def __init__(
        self,
        min_workers: int,
        speed_rule: SpeedRule | None = None,
        fast_threshold: float = FAST_SPEED_RATIO,
    ) -> None:
        self._min_workers = min_workers
        self._fast_threshold = fast_threshold
        self._speed_rule = speed_rule
        self.workers: list[Worker] = []
        self._silent_nodes: set[int] = set()
        self._queried_for_speed: set[Address] = set()
        self._warned_of_duplicates = False

    @classmethod
    def of_profiles(
        cls, profiles: Sequence[WorkerProfile], fast_threshold: float = FAST_SPEED_RATIO
    ) -> "WorkerRegistry":
        """Return the registry of nodes with these profiles; node ids count from 0."""
        registry = cls(len(profiles), fast_threshold=fast_threshold)
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
        rule, queried = self._speed_rule, self._queried_for_speed
        unknown = [
            worker
            for worker in self.active
            if not worker.profile.seconds_per_step and worker.address not in queried
        ]
        if rule is None or not unknown or not rule.applies([w.profile for w in self.active]):
            return
        others = [worker.address for worker in self.active if worker.measured]
        speeds = rule.measure(grid, [worker.address for worker in unknown], others)
        queried |= speeds.keys()
        for worker in unknown:
            seconds = speeds[worker.address]
            if isinstance(seconds, float):
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
                worker.measured = True
                continue
            _LOG.warning("the speed of %s is not known: %s", worker.label, seconds)
            if started and rule.decides_steps(worker.profile):
                # At the start the settings are refused; a run that goes on must not be.
                worker.excluded = "its steps come from its speed, and that is not known"
                _LOG.error("%s does not take part: %s", worker.label, worker.excluded)
        self._assign_tiers()

    def set_speeds(self, seconds_per_step: Mapping[int, float]) -> None:
        """Take speeds that were measured while training, by worker index."""
        for worker in self.workers:
            if worker.index in seconds_per_step:
                known = worker.profile
                # What was given holds for the worker alone; that is not forgotten.
                given = 0.0 if worker.measured else known.seconds_per_step
                worker.profile = replace(
                    known,
                    seconds_per_step=seconds_per_step[worker.index],
                    seconds_per_step_alone=known.seconds_per_step_alone or given,
                )
                worker.measured = True
        self._assign_tiers()

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


class Rebalancing:
    """Keeps the registry's speeds up to date with what is measured in training.

    Each worker's seconds per step are an exponential moving average; the newest value has a share
    of 0.4, so after five rounds at a new speed 92 % of the change is in.

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
        self._seconds_per_step: dict[int, float] = {}

    def add(self, outcomes: Sequence["Outcome"], batch_size: int) -> None:
        """Take the times of a round; a failed order says nothing of its worker's speed."""
        if not self._on:
            return
        for outcome in outcomes:
            report = outcome.report
            if report is not None and report.num_examples and report.compute_seconds > 0:
                seconds = report.compute_seconds * batch_size / report.num_examples
                old = self._seconds_per_step.get(outcome.worker.index, seconds)
                self._seconds_per_step[outcome.worker.index] = old + 0.4 * (seconds - old)

    def apply(self, registry: WorkerRegistry) -> bool:
        """Set the registry's speeds, if they changed; call it between epochs.

        Returns
        -------
        bool
            Whether they changed.
        """
        if not self._on:
            return False
        active = registry.active
        for gone in self._seconds_per_step.keys() - {worker.index for worker in active}:
            del self._seconds_per_step[gone]  # it may come back on another device
        measured = dict(self._seconds_per_step)
        used = {
            worker.index: worker.profile.seconds_per_step
            for worker in active
            if worker.index in measured and worker.profile.seconds_per_step > 0
        }
        fall, rise = (0.0, 0.0) if self._follow else (FALL, RISE)
        if not measured or not speeds_changed(used, measured, fall, rise):
            return False
        registry.set_speeds(measured)
        changed = "; ".join(f"{w.label}: {w.speed}" for w in active if w.index in measured)
        _LOG.info("speeds changed: %s", changed)
        return True
