"""Who the workers of a run are: asked once, ranked once, known again when they come back."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.serverapp import Grid

from .algorithm.local_steps import FAST_SPEED_RATIO, Participant, speed_ratios
from .errors import UsageError
from .profile_query import Address, Introduction, ask_profiles
from .protocol import WorkerProfile
from .speeds import SpeedRule

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_MUST_BE_EQUAL = (
    ("data_fingerprint", "holds other training data", "point both at the same data set"),
    ("model_fingerprint", "has another model", "install the same task and versions on both"),
)


@dataclass
class Worker:
    """One worker of the run.

    Attributes
    ----------
    index : int
        Its place in every sum and every draw; it never changes.
    node_id : int
        The Flower node that it is now; a SuperNode gets a new one when it starts again.
    profile : WorkerProfile
        What it said of itself.
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
    place : int, optional
        Its place within a node with several devices; None if the node is this worker.
    """

    index: int
    node_id: int
    profile: WorkerProfile
    present: bool = True
    excluded: str = ""
    fast: bool = True
    speed_ratio: float | None = None
    measured: bool = False
    place: int | None = None

    @property
    def address(self) -> Address:
        """Where it is now."""
        return self.node_id, self.place

    @property
    def label(self) -> str:
        """How logs and results call it, such as ``fast-0 (cpu:0)``."""
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
        """Return what the mathematics needs to know of it."""
        return Participant(self.fast, batch_size, self.speed_ratio, self.profile.steps or None)


def rank_key(profile: WorkerProfile, place: int | None = None) -> tuple[bool, int, float, str, int]:
    """Return the key that workers are ranked by: never a node id, never a measured speed.

    Named slow ones last; then by partition id, else by name, else by device; then by the place
    within a node with several devices.
    """
    slow, place = profile.tier == "slow", place or 0
    if profile.partition_id >= 0:
        return slow, 0, profile.partition_id, "", place
    if profile.name:
        return slow, 1, 0, profile.name, place
    return slow, 2, 0, profile.device, place


class Roster:
    """Keeps the workers of a run in worker order.

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
        self._asked_for_speed: set[Address] = set()
        self._told_of_twins = False

    @classmethod
    def of_profiles(
        cls, profiles: Sequence[WorkerProfile], fast_threshold: float = FAST_SPEED_RATIO
    ) -> "Roster":
        """Return the roster that nodes with these profiles would make."""
        roster = cls(len(profiles), fast_threshold=fast_threshold)
        roster._admit([Introduction(place, None, p) for place, p in enumerate(profiles)])
        return roster

    @property
    def active(self) -> list[Worker]:
        """The workers that can be given an order now, in worker order."""
        return [worker for worker in self.workers if worker.present and not worker.excluded]

    def update(self, grid: Grid) -> None:
        """Notice nodes that came or went; ask the new ones who they are, and how fast if needed.

        The first call waits until enough nodes are connected. A node without an answer is asked
        again when it connects anew.
        """
        online = self._wait(grid) if not self.workers else set(grid.get_node_ids())
        for worker in self.workers:
            worker.present = worker.node_id in online
        known = {worker.node_id for worker in self.workers} | self._silent_nodes
        if new := sorted(online - known):
            began = bool(self.workers)
            answers, died = ask_profiles(grid, new)
            if died:  # its process starts again under the same node id: once more
                answers += ask_profiles(grid, died)[0]
            self._admit(answers)
            self._silent_nodes |= set(new) - {worker.node_id for worker in self.workers}
            self._measure_speeds(grid, began)

    def _wait(self, grid: Grid) -> set[int]:
        told = -1
        while len(online := set(grid.get_node_ids())) < self._min_workers:
            if len(online) != told:
                told = len(online)
                _LOG.info(
                    "waiting for workers: %d of %d nodes are connected", told, self._min_workers
                )
            time.sleep(_POLL_SECONDS)
        return online

    def _admit(self, answers: Sequence[Introduction]) -> None:
        began = bool(self.workers)
        for new in sorted(answers, key=lambda new: (rank_key(new.profile, new.place), new.node_id)):
            node_id, place, profile = new.node_id, new.place, new.profile
            identity = rank_key(profile, place)[1:]
            twins = [w for w in self.workers if rank_key(w.profile, w.place)[1:] == identity]
            back = next((w for w in twins if not w.present), None)
            if began and (reason := self._misfit(profile)):
                _LOG.error("node %d does not take part: %s", node_id, reason)
            elif back is not None:
                back.node_id, back.place, back.profile = node_id, place, profile
                back.present, back.excluded, back.measured = True, "", False
                _LOG.info("%s is back", back.label)
            else:
                if twins:
                    self._tell_of_twins(profile)
                self.workers.append(Worker(len(self.workers), node_id, profile, place=place))
        self._assign_tiers()
        if not began:
            for worker in self.workers:
                if reason := self._misfit(worker.profile):
                    raise UsageError(f"worker {worker.label} {reason}")

    def _measure_speeds(self, grid: Grid, began: bool) -> None:
        rule, asked = self._speed_rule, self._asked_for_speed
        unknown = [
            worker
            for worker in self.active
            if not worker.profile.seconds_per_step and worker.address not in asked
        ]
        if rule is None or not unknown or not rule.applies([w.profile for w in self.active]):
            return
        others = [worker.address for worker in self.active if worker.measured]
        speeds = rule.measure(grid, [worker.address for worker in unknown], others)
        asked |= speeds.keys()
        for worker in unknown:
            seconds = speeds[worker.address]
            if isinstance(seconds, float):
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
                worker.measured = True
                continue
            _LOG.warning("the speed of %s is not known: %s", worker.label, seconds)
            if began and rule.decides_steps(worker.profile):
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

    def _tell_of_twins(self, profile: WorkerProfile) -> None:
        if not self._told_of_twins:
            self._told_of_twins = True
            _LOG.warning(
                "two nodes cannot be told apart (%s): this run cannot be repeated bit for bit; "
                "give each node name='...' or partition-id=N in its node config",
                profile.name or profile.device,
            )

    def _misfit(self, profile: WorkerProfile) -> str:
        """Return what a worker has that is not as the others'; empty if nothing is."""
        for fingerprint, told, way_out in _MUST_BE_EQUAL:
            first = next((w for w in self.workers if getattr(w.profile, fingerprint)), None)
            if first is not None and getattr(profile, fingerprint) not in (
                "",
                getattr(first.profile, fingerprint),
            ):
                return f"{told} than {first.label}; {way_out}"
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
