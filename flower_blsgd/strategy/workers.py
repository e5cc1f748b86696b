"""The workers of a run: queried once, ranked once, recognised when they come back.

A worker whose node is gone keeps its index and gets no order until it is back.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError

from ..algorithm.local_steps import (
    FAST_SPEED_RATIO,
    Clock,
    Participant,
    StepPolicy,
    fastest_worker,
    speed_ratios,
    speeds_changed,
)
from ..errors import UsageError
from ..grids.features import features_of
from ..protocol import WorkerProfile
from .patience import MULTIPLE_OF_START, moving_average
from .profiles import UNKNOWN_DEVICE, Address, query_profiles, query_speeds

if TYPE_CHECKING:
    from .replies import Outcome

_LOG = logging.getLogger(__name__)

MOST_FAILURES = 3
"""A worker with so many failed orders in a row is left out: it gets none until the next epoch is
planned, and then only if it answers a query."""

_POLL_SECONDS = 0.5
_FIRST_QUERY_SECONDS, _QUERY_AGAIN_SECONDS = 600.0, 60.0
"""How long to wait for profiles; again it is at least a multiple of what the first query took."""

_RETURN_SECONDS = 60.0
"""How long nodes that are gone may take to come back, where too few workers are left."""

_MUST_BE_EQUAL = (
    ("data_fingerprint", "holds other training data", "point both at the same data set"),
    ("model_fingerprint", "has another model", "install the same task and versions on both"),
)

DEAD_BAND = 0.1, 0.25
"""With ``rebalance``, a gamma that fell or rose by no more than these shares is left alone."""

UNKNOWN_NODE = -1


@dataclass
class Worker:
    """One worker of the run.

    Attributes
    ----------
    index : int
        Its rank in every sum and every draw; it never changes.
    node_id : int
        The Flower node that it is now; a SuperNode gets a new one when it starts again,
        unless its key is registered. `UNKNOWN_NODE` for one of a checkpoint until it is back.
    profile : WorkerProfile
        What its node answered.
    present : bool
        Whether the node is connected.
    excluded : str
        Why it takes no part; empty while it does.
    fast : bool
        Its tier: as named, else by its speed.
    speed_ratio : float, optional
        gamma, if the speeds are known.
    measured : bool
        Whether its seconds per step were measured by us, not given.
    training_seconds_per_step : float
        Of its orders: a moving average or, for a policy that follows speeds, all of them in the
        last epoch that it has any of; 0 before the first.
    epoch_samples, epoch_seconds : int, float
        Samples of this epoch that it trained on, and how long it computed for them.
    local_rank : int, optional
        Its rank within a node with several devices; None if the node is this worker.
    no_momentum : str
        Why the last checkpoint is without its momentum; empty if it has that.
    failures : list of str
        Their kinds, in the order in which they came.
    failures_in_a_row : int
        Orders that failed since the last that did not.
    fresh : bool
        Whether its process may have to start: it failed, or came back, since it last answered.
    """

    index: int
    node_id: int = field(metadata={"wire": False})
    profile: WorkerProfile = field(metadata={"wire": False})
    present: bool = field(default=True, metadata={"wire": False})
    excluded: str = ""
    fast: bool = True
    speed_ratio: float | None = None
    measured: bool = False
    training_seconds_per_step: float = 0.0
    epoch_samples: int = 0
    epoch_seconds: float = 0.0
    local_rank: int | None = None
    no_momentum: str = "it was not queried"
    failures: list[str] = field(default_factory=list)
    failures_in_a_row: int = 0
    fresh: bool = field(default=False, metadata={"wire": False})

    def note_failure(self, kind: str) -> bool:
        """Count a failure; return whether it is the first of its kind."""
        self.fresh = True
        self.failures.append(kind)
        return self.failures.count(kind) == 1

    def forget_times(self) -> None:
        """Forget what its orders took."""
        self.training_seconds_per_step = self.epoch_seconds = 0.0
        self.epoch_samples = 0

    def note_failed_order(self, kind: str, reason: str) -> bool:
        """Count it as `note_failure` does, and leave the worker out after too many in a row."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= MOST_FAILURES:
            self.excluded = reason
        if self.failures_in_a_row == MOST_FAILURES:
            what = "worker %s failed %d times in a row and is left out; it is queried again when an"
            _LOG.error(f"{what} epoch begins: %s", self.label, MOST_FAILURES, reason)
        return self.note_failure(kind)

    @property
    def trains(self) -> bool:
        """Whether it trains; else it evaluates."""
        return self.profile.role == "train"

    @property
    def is_left_out(self) -> bool:
        """Whether it takes no part because too many of its orders failed."""
        return bool(self.excluded) and self.failures_in_a_row >= MOST_FAILURES

    @property
    def address(self) -> Address:
        """The node id and the local rank of the worker, as they are now."""
        return self.node_id, self.local_rank

    @property
    def label(self) -> str:
        """The worker's name in logs and results, such as ``fast-0 (cpu:0)``."""
        kind = ("fast" if self.fast else "slow") if self.trains else "evaluate"
        return f"{self.profile.name or f'{kind}-{self.index}'} ({self.profile.device})"

    @property
    def speed(self) -> str:
        """The worker's speed in words; empty if it is not known."""
        if self.speed_ratio is None:
            return ""
        source = "measured" if self.measured else "given"
        own = f" of {self.profile.batch_size}" if self.profile.batch_size else ""
        seconds = f"{self.profile.seconds_per_step:.2g} s a step{own} {source}"
        return f"{seconds}, gamma {self.speed_ratio:.2f}"

    def is_described_by(self, profile: WorkerProfile) -> bool:
        """Return whether a profile says the same as its own, the speed apart if we measured it."""
        if self.measured:
            profile = replace(
                profile,
                seconds_per_step=self.profile.seconds_per_step,
                seconds_per_step_alone=self.profile.seconds_per_step_alone,
            )
        return profile == self.profile

    def own_batch(self, batch_size: int) -> int:
        """Return its samples per step, which its seconds per step are of; by default the run's."""
        return self.profile.batch_size or batch_size

    def samples_per_second(self, batch_size: int) -> float:
        """Return how many samples it trains on a second; 0 if its speed is not known."""
        seconds = self.profile.seconds_per_step
        return self.own_batch(batch_size) / seconds if seconds else 0.0

    def participant(self, batch_size: int) -> Participant:
        """Return what the algorithm needs to know of this worker."""
        given = self.profile.steps or None, self.profile.batch_size or None
        return Participant(self.fast, batch_size, self.speed_ratio, *given)


def rank_key(
    profile: WorkerProfile, local_rank: int | None = None
) -> tuple[int, int, float, str, int]:
    """Return the key that workers are ranked by: never a node id, never a measured speed.

    Named slow ones last but for those that evaluate, which move no draw of the others; then by
    partition id, else by name, else by device; then by the rank within a node with several devices.
    """
    group, local_rank = int(profile.tier == "slow"), local_rank or 0
    if profile.role == "evaluate":
        group = 2
    if profile.partition_id >= 0:
        return group, 0, profile.partition_id, "", local_rank
    if profile.name:
        return group, 1, 0, profile.name, local_rank
    return group, 2, 0, profile.device, local_rank


@dataclass(eq=False)
class WorkerRegistry:
    """The workers of a run in worker order: who is there, in which tier, how fast.

    Parameters
    ----------
    min_workers : int
        Nodes to wait for before the first round, >= 1; and workers that must be left when an
        epoch is planned, if so many began.
    fast_threshold : float (default: 0.7)
        An unnamed worker is fast if it does more than this share of the samples per second that
        the fastest one does.
    step_policy : StepPolicy, optional
        Says whose steps come from speeds; without it none is measured.
    batch_size : int (default: 1)
        Samples per step of a worker without a batch size of its own.
    clock : {"wall", "device"} (default: "wall")
        ``"wall"`` measures all at once, as they train; ``"device"`` one after another, each as
        if it had the machine for itself, and always.
    no_hosts : str (default: "")
        Why nodes with several devices cannot take part; empty if they can.
    num_samples : int (default: 0)
        N, into which the batch of every worker must fit; 0 if it is not known.
    data_fingerprint, model_fingerprint : str (default: "")
        Of the server's data and model, which those of every worker must equal; empty if unknown.
    """

    min_workers: int
    fast_threshold: float = FAST_SPEED_RATIO
    step_policy: StepPolicy | None = None
    batch_size: int = 1
    clock: Clock = "wall"
    no_hosts: str = ""
    num_samples: int = 0
    data_fingerprint: str = ""
    model_fingerprint: str = ""

    def __post_init__(self) -> None:
        self.workers: list[Worker] = []
        self._begun = False
        self._start_seconds = 0.0
        self._query_seconds = _FIRST_QUERY_SECONDS
        self._speeds_are_due = False
        self._silent_nodes: set[int] = set()
        self._unlike_nodes: set[int] = set()
        self._warned_of_duplicates = False

    @classmethod
    def of_profiles(
        cls,
        profiles: Sequence[WorkerProfile],
        fast_threshold: float = FAST_SPEED_RATIO,
        batch_size: int = 1,
    ) -> "WorkerRegistry":
        """Return the registry of nodes with these profiles; node ids count from 0."""
        registry = cls(len(profiles), fast_threshold, batch_size=batch_size)
        registry.register({(node, None): profile for node, profile in enumerate(profiles)})
        return registry

    @property
    def active(self) -> list[Worker]:
        """The workers that can be given an order to train now, in worker order."""
        return [w for w in self.workers if w.present and not w.excluded and w.trains]

    @property
    def evaluating(self) -> list[Worker]:
        """The workers with ``role=evaluate`` that can be given a model now, in worker order."""
        return [w for w in self.workers if w.present and not w.excluded and not w.trains]

    @property
    def start_seconds(self) -> float | None:
        """How long a process takes to start, if that of a worker may have to."""
        return self._start_seconds if any(worker.fresh for worker in self.active) else None

    def update(self, grid: Grid) -> None:
        """Notice nodes that came or went.

        The first call waits until enough nodes are connected, queries them, and measures speeds
        that are needed. Later a new node is queried at once if it may be a worker that comes back,
        and by `gather`.

        Raises
        ------
        UsageError
            If, at the start, two nodes hold other data or another model, or one with several
            devices cannot take part.
        """
        online = set(grid.get_node_ids()) if self._begun else self._wait(grid)
        for worker in self.workers:
            if worker.present and worker.node_id not in online:
                worker.forget_times()  # it may come back on another device
                _LOG.warning("%s is gone", worker.label)
            elif not worker.present and worker.node_id in online:
                _LOG.warning("%s is back", worker.label)
                worker.fresh = True
            worker.present = worker.node_id in online
        for node_id in features_of(grid).take_deaths():  # of a local grid
            for worker in self.workers:
                if worker.node_id == node_id:
                    worker.note_failure("died between orders")
        new = sorted(online - {worker.node_id for worker in self.workers} - self._silent_nodes)
        if not self._begun:
            began = time.monotonic()
            self._take_in(grid, new)
            seconds = time.monotonic() - began
            if seconds < _FIRST_QUERY_SECONDS:  # else one is silent
                self._start_seconds = seconds
            least = MULTIPLE_OF_START * self._start_seconds
            self._query_seconds = max(_QUERY_AGAIN_SECONDS, least)
            self._measure_speeds(grid, 0)
        elif not all(worker.present for worker in self.workers):
            self._take_in(grid, new)

    def gather(
        self, grid: Grid, training: Callable[[Sequence[Worker]], Sequence[Worker]], began: int
    ) -> None:
        """Query new nodes and workers that were left out; wait for nodes if too few are left.

        Call it when the next epoch is planned.

        Parameters
        ----------
        grid : Grid
            Where the nodes are.
        training : callable
            Returns those of some workers that train.
        began : int
            How many trained at the start.

        Raises
        ------
        AggregationError
            If fewer that train are left than must be.
        """
        first_new, needed = len(self.workers), min(self.min_workers, began)
        nodes = set(grid.get_node_ids()) - {w.node_id for w in self.workers} - self._unlike_nodes
        nodes |= {
            worker.node_id for worker in self.workers if worker.present and worker.is_left_out
        }
        self._take_in(grid, sorted(nodes))
        give_up_at = time.monotonic() + _RETURN_SECONDS
        while len(training(self.active)) < needed and not all(
            worker.present for worker in self.workers if worker.trains
        ):
            if time.monotonic() > give_up_at:
                break
            time.sleep(_POLL_SECONDS)
            self.update(grid)
        self._measure_speeds(grid, first_new)
        left = training(self.active)
        if len(left) < needed:
            reasons = "; ".join(
                f"{w.label}: {w.excluded or 'its node is gone'}"
                for w in self.workers
                if w.trains and w not in self.active
            )
            raise AggregationError(
                f"the next epoch cannot begin: {len(left)} of {began} workers "
                f"are left, and min-workers = {self.min_workers} ({reasons})"
            )

    def _take_in(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Query nodes: what is found is registered, and who was left out takes part again."""
        known = self._silent_nodes | {worker.node_id for worker in self.workers}
        level = logging.ERROR if set(nodes) - known else logging.DEBUG
        found = query_profiles(grid, nodes, seconds=self._query_seconds, level=level)
        self._silent_nodes |= set(nodes)
        for worker in self.workers:
            profile = found.pop(worker.address, None)
            if profile and worker.is_left_out and not self._mismatch(profile, worker.local_rank):
                worker.excluded = ""
                _LOG.info("%s answers and takes part again", worker.label)
        self._speeds_are_due |= bool(found)
        self.register(found)

    def _wait(self, grid: Grid) -> set[int]:
        logged = -1
        while len(online := set(grid.get_node_ids())) < self.min_workers:
            if len(online) != logged:
                logged = len(online)
                _LOG.info("waiting: %d of %d nodes are connected", logged, self.min_workers)
            time.sleep(_POLL_SECONDS)
        return online

    def register(self, found: Mapping[Address, WorkerProfile]) -> None:
        """Add workers, or recognise those that come back: they keep their index.

        One of a checkpoint keeps its speed as well, unless it is on another device now.
        """
        first_new = len(self.workers)
        started, resumed = self._begun, first_new > 0 and not self._begun
        ranked = sorted((rank_key(p, rank), node, rank) for (node, rank), p in found.items())
        for key, node_id, local_rank in ranked:
            profile, identity = found[node_id, local_rank], key[1:]
            same = [w for w in self.workers if rank_key(w.profile, w.local_rank)[1:] == identity]
            back = next((w for w in same if not w.present), None)
            reason = self._mismatch(profile, local_rank)
            if reason and resumed and back:
                raise UsageError(f"the run cannot be resumed: node {node_id} {reason}")
            if reason and (started or resumed):
                self._unlike_nodes.add(node_id)
                _LOG.error("node %d does not take part: %s", node_id, reason)
            elif back and back.node_id == UNKNOWN_NODE and back.is_described_by(profile):
                back.node_id, back.local_rank, back.present = node_id, local_rank, True
            elif back is not None:
                back.node_id, back.local_rank, back.profile = node_id, local_rank, profile
                back.present, back.excluded, back.measured = True, "", False
                back.failures_in_a_row = 0
                back.forget_times()
                _LOG.warning("%s is back", back.label)
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
        self._begun = bool(self.workers)
        self.assign_tiers(first_new)
        if not started:
            if self.workers and not any(worker.trains for worker in self.workers):
                raise UsageError("workers: all have role=evaluate; remove it from at least one")
            for worker in self.workers:
                if reason := self._mismatch(worker.profile, worker.local_rank):
                    raise UsageError(f"worker {worker.label} {reason}")

    def _measure_speeds(self, grid: Grid, first_new: int) -> None:
        known = [w for w in self.active if w.profile.device != UNKNOWN_DEVICE]
        needed = any(not w.profile.tier or self._decides_steps(w.profile) for w in known)
        due, self._speeds_are_due = self._speeds_are_due, False
        if self.step_policy is None or not due or not (needed or self.clock == "device"):
            return
        unknown = [w for w in known if not w.profile.seconds_per_step]
        if self.clock == "wall":  # those that were measured compute meanwhile, as in a round
            groups = [[*unknown, *(w for w in self.active if w.measured)]] if unknown else []
        else:
            groups = [[worker] for worker in unknown]
        speeds: dict[Address, float | str] = {}
        for group in groups:
            _LOG.info("measuring the seconds per step: %s", ", ".join(w.label for w in group))
            speeds |= query_speeds(grid, {w.address: w.own_batch(self.batch_size) for w in group})
        reasons = []
        for worker in unknown:
            seconds = speeds[worker.address]
            if isinstance(seconds, float):
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
                worker.measured = True
            else:
                reasons.append(f"{worker.label}: {seconds}")
        if reasons:
            what = "no speed is known of %s; each counts as the fastest (gamma 1)"
            _LOG.warning(f"{what}; say it with seconds-per-step", "; ".join(reasons))
        self.assign_tiers(first_new)

    def _decides_steps(self, profile: WorkerProfile) -> bool:
        """Return whether the steps of a worker whose tier is named come from its speed."""
        policy = self.step_policy
        if policy is None or not policy.needs_speeds or profile.steps:
            return False
        return profile.tier == "slow" or policy.needs_fast_speeds

    def take_speeds(self, measured: Iterable[tuple[Worker, float, int]]) -> None:
        """Take seconds per step of so many samples, where the speeds of rounds count."""
        for worker, seconds, size in measured:
            counts = worker.measured and self.clock == "wall"
            if counts and size == worker.own_batch(self.batch_size):
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
        self.assign_tiers()

    def note_times(self, outcomes: Sequence["Outcome"], batch_size: int) -> None:
        """Take the times of a round; a failed order says nothing of its worker's speed."""
        for outcome in outcomes:
            report, worker = outcome.report, outcome.worker
            if report is not None and report.num_examples and report.compute_seconds > 0:
                worker.epoch_samples += report.num_examples
                worker.epoch_seconds += report.compute_seconds
                size = worker.own_batch(batch_size)
                if self.step_policy is not None and self.step_policy.follows_speeds:
                    seconds = worker.epoch_seconds * size / worker.epoch_samples
                    worker.training_seconds_per_step = seconds
                    continue
                seconds = report.compute_seconds * size / report.num_examples
                old = worker.training_seconds_per_step or seconds
                worker.training_seconds_per_step = moving_average(old, seconds)

    def follow_speeds(self, fall: float, rise: float) -> None:
        """Take the speeds measured while training if some gamma left its dead band.

        Call it between epochs: steps and tiers follow.
        """
        for worker in self.workers:
            worker.epoch_samples, worker.epoch_seconds = 0, 0.0
        timed = [worker for worker in self.active if worker.training_seconds_per_step]
        measured = [worker.training_seconds_per_step for worker in timed]
        used = [worker.profile.seconds_per_step or None for worker in timed]
        sizes = [worker.own_batch(self.batch_size) for worker in timed]
        if not speeds_changed(used, measured, fall, rise, sizes):
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
        self.assign_tiers()
        _LOG.info("speeds changed: %s", "; ".join(f"{w.label}: {w.speed}" for w in timed))

    def _mismatch(self, profile: WorkerProfile, local_rank: int | None) -> str:
        """Return what keeps a worker from training with the others; empty if nothing does."""
        if self.no_hosts and local_rank is not None:
            return (
                f"is behind a node with several devices, and {self.no_hosts}; "
                "start one SuperNode for each device"
            )
        if own_batch := profile.batch_size:
            if 0 < self.num_samples < own_batch:
                return (
                    f"has batch={own_batch}, more than the {self.num_samples} samples there are; "
                    "use a smaller one"
                )
            if self.step_policy is not None and self.step_policy.chooses_batches:
                return (
                    f"has batch={own_batch}, but the algorithm (as dlb) chooses every worker's "
                    "batch by its speed; leave it out"
                )
        for fingerprint, difference, way_out in _MUST_BE_EQUAL:
            own, known = getattr(profile, fingerprint), [("the server", getattr(self, fingerprint))]
            known += [(w.label, getattr(w.profile, fingerprint)) for w in self.workers]
            first, theirs = next((pair for pair in known if pair[1]), ("", own))
            if own and own != theirs:
                return f"{difference} than {first}; {way_out}"
        return ""

    def assign_tiers(self, first: int = 0) -> None:
        """Give workers from index `first` on their tier and their speed ratio, among those there.

        An unnamed worker's tier follows its samples per second. All get both when an epoch is
        planned; within one nothing changes but for new workers.
        """
        there = self.active
        seconds = [worker.profile.seconds_per_step or None for worker in there]
        sizes = [worker.own_batch(self.batch_size) for worker in there]
        of_fastest = sizes[fastest_worker(seconds, sizes) or 0] if there else 1
        for worker, ratio, size in zip(there, speed_ratios(seconds, sizes), sizes, strict=True):
            if worker.index < first:
                continue
            worker.speed_ratio = ratio
            named = worker.profile.tier
            # Without a known speed an unnamed worker counts as gamma 1.
            worker.fast = named == "fast" or (
                not named and (ratio is None or ratio * (size / of_fastest) > self.fast_threshold)
            )
