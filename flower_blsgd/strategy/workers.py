"""Workers of a run: ranked once, and recognized when they reconnect.

A worker whose node is gone keeps its index. It gets no orders until it returns.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..algorithm.local_steps import (
    FAST_SPEED_RATIO,
    Clock,
    Participant,
    fastest_worker,
    speed_ratios,
    speeds_changed,
)
from ..errors import UsageError
from ..fields import from_record, to_record
from ..protocol import Failure, WorkerProfile
from .messages import Address
from .patience import moving_average

_LOG = logging.getLogger(__name__)

MOST_FAILURES = 3
"""A worker with this many failed orders in a row gets no order until the next epoch is planned, and
then only if it answers a query."""

_MUST_BE_EQUAL = (
    ("data_fingerprint", "has different training data", "point both at the same data set"),
    (
        "model_fingerprint",
        "has a different model or different frozen weights",
        "create it alike in every process: seed frozen weights, and use the same task and versions",
    ),
)

DEAD_BAND = 0.1, 0.25
"""With ``rebalance``, falls and rises of gamma up to these shares are ignored."""

UNKNOWN_NODE = -1

STARTING = ", starting"
"""End of the kind of a failure to answer the first query."""


@dataclass
class Worker:
    """One worker of the run.

    - `index`: rank in every sum and every draw; it never changes.
    - `node_id`: a SuperNode gets a new one when it restarts, unless its key is registered.
      `UNKNOWN_NODE` for a worker of a checkpoint, or with a `start_failure`, until it connects.
    - `profile`: last answer to a profile query, with the speed that the run measured, if
      `measured`.
    - `excluded`: reason why its last orders failed, if it is excluded for that; else empty.
    - `fast`: tier, as named, else by speed; `speed_ratio`: gamma, if the speeds are known.
    - `training_seconds_per_step`: seconds per step of its orders: a moving average or, for a policy
      that follows speeds, the mean of the last epoch with an order; 0 before the first.
    - `epoch_samples`, `epoch_seconds`: samples trained on in this epoch, and seconds of computing;
      `follow_speeds` resets them.
    - `local_rank`: rank within a node with several devices; None if the node is this worker.
    - `no_momentum`: reason why its momentum is missing in the last checkpoint; else empty.
    - `failures`: kinds of its failures, in order of time.
    - `start_failure`: reason why it did not answer its first query, if so.
    - `failures_in_a_row`: failed orders since the last successful one.
    - `momentum_zeroed`: whether its momentum was set to zero because it was not finite.
    - `fresh`: whether its process may have to start, because it failed or reconnected since its
      last reply.
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
    start_failure: str | None = None  # missing in older checkpoints
    failures_in_a_row: int = 0
    momentum_zeroed: bool = field(default=False, metadata={"wire": False})
    fresh: bool = field(default=False, metadata={"wire": False})

    def note_failure(self, kind: str) -> bool:
        """Record a failure, and return whether it is the first of its kind."""
        self.fresh = True
        self.failures.append(kind)
        return self.failures.count(kind) == 1

    def note_time(self, seconds: float, samples: int, batch_size: int, per_epoch: bool) -> None:
        """Record the seconds of computing of one order with this number of samples.

        `per_epoch` averages over the epoch instead of the last orders.
        """
        self.epoch_samples += samples
        self.epoch_seconds += seconds
        size = self.own_batch(batch_size)
        if per_epoch:
            self.training_seconds_per_step = self.epoch_seconds * size / self.epoch_samples
        else:
            newest = seconds * size / samples
            old = self.training_seconds_per_step or newest
            self.training_seconds_per_step = moving_average(old, newest)

    def forget_times(self) -> None:
        """Reset the times of its orders."""
        self.training_seconds_per_step = self.epoch_seconds = 0.0
        self.epoch_samples = 0

    def note_failed_order(self, kind: str, reason: str) -> bool:
        """Record a failed order, and exclude the worker after too many in a row."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= MOST_FAILURES:
            self.excluded = reason
        if self.failures_in_a_row == MOST_FAILURES:
            what = "worker %s failed %d times in a row and is left out until the next epoch: %s"
            _LOG.error(what, self.label, MOST_FAILURES, reason)
        return self.note_failure(kind)

    def comes_back(self, profile: WorkerProfile, address: Address) -> None:
        """Take part again, at an address that may be another one.

        An equal worker of a checkpoint, or of a node that was gone, keeps its speed.
        """
        is_other_node = self.node_id not in (UNKNOWN_NODE, address[0])
        if is_other_node or not self.is_described_by(profile):
            self.profile, self.excluded, self.measured = profile, "", False
            self.failures_in_a_row = 0
            self.forget_times()
        if self.node_id != UNKNOWN_NODE:
            self.fresh = True
            _LOG.warning("%s is back", self.label)
        self.node_id, self.local_rank = address
        self.present = True

    @property
    def trains(self) -> bool:
        """Whether the worker trains; otherwise it evaluates."""
        return self.profile.role == "train"

    @property
    def never_started(self) -> str:
        """Reason why the worker has never started; empty if it has."""
        return self.start_failure if self.start_failure and self.node_id == UNKNOWN_NODE else ""

    @property
    def address(self) -> Address:
        """Current node id and local rank."""
        return self.node_id, self.local_rank

    @property
    def label(self) -> str:
        """Name in logs and results, such as ``fast-0 (cpu:0)``."""
        kind = ("fast" if self.fast else "slow") if self.trains else "evaluate"
        return f"{self.profile.name or f'{kind}-{self.index}'} ({self.profile.device})"

    @property
    def speed(self) -> str:
        """Speed as text; empty if unknown."""
        if self.speed_ratio is None or not self.profile.seconds_per_step:
            return ""
        source = "measured" if self.measured else "given"
        own = f" of {self.profile.batch_size}" if self.profile.batch_size else ""
        seconds = f"{self.profile.seconds_per_step:.2g} s a step{own} {source}"
        return f"{seconds}, gamma {self.speed_ratio:.2f}"

    def is_described_by(self, profile: WorkerProfile) -> bool:
        """Return whether a profile is that of this worker, except for a measured speed."""
        if self.measured:
            profile = replace(
                profile,
                seconds_per_step=self.profile.seconds_per_step,
                seconds_per_step_alone=self.profile.seconds_per_step_alone,
            )
        return profile == self.profile

    def own_batch(self, batch_size: int) -> int:
        """Return the worker's batch size, by default that of the run."""
        return self.profile.batch_size or batch_size

    def samples_per_second(self, batch_size: int) -> float:
        """Return the samples per second of training; 0 if unknown."""
        seconds = self.profile.seconds_per_step
        return self.own_batch(batch_size) / seconds if seconds else 0.0

    def participant(self, batch_size: int) -> Participant:
        """Return the worker as step policies and samplers see it."""
        given = self.profile.steps or None, self.profile.batch_size or None
        return Participant(self.fast, batch_size, self.speed_ratio, *given)


def rank_key(
    profile: WorkerProfile, local_rank: int | None = None
) -> tuple[int, int, float, str, int]:
    """Return the sort key of a worker, independent of node ids and measured speeds.

    Named slow workers follow the others. Workers that evaluate are last, so that they do not change
    the draws of the others. Within these groups the order is by partition id, then name, then
    device, then the rank within a node with several devices.
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
    """Workers of a run in worker order, with their presence, tiers and speeds.

    A worker without a named tier is fast if its samples per second are more than `fast_threshold`
    of the fastest worker's. `batch_size` is the run's samples per step; with `chooses_batches`, the
    step policy chooses all batch sizes, and no worker can set one. `no_hosts` is the reason why
    nodes with several devices cannot take part; empty if they can. `num_samples` is N, the limit of
    every batch size; 0 if unknown. Every worker must match the fingerprints of the server's data
    and model, which are empty if unknown.

    `begun` tells whether the first workers are registered. `refused_nodes` have a `mismatch`.
    `start_seconds` is the duration of the first query, including the start of processes.
    """

    fast_threshold: float = FAST_SPEED_RATIO
    batch_size: int = 1
    chooses_batches: bool = False
    no_hosts: str = ""
    num_samples: int = 0
    data_fingerprint: str = ""
    model_fingerprint: str = ""

    def __post_init__(self) -> None:
        self.workers: list[Worker] = []
        self.begun = False
        self.refused_nodes: set[int] = set()
        self.start_seconds = 0.0
        self._warned_of_duplicates = False

    @classmethod
    def of_profiles(
        cls,
        profiles: Sequence[WorkerProfile],
        fast_threshold: float = FAST_SPEED_RATIO,
        batch_size: int = 1,
    ) -> "WorkerRegistry":
        """Return the registry of nodes with these profiles; node ids count from 0."""
        registry = cls(fast_threshold, batch_size)
        registry.register({(node, None): profile for node, profile in enumerate(profiles)})
        return registry

    @property
    def active(self) -> list[Worker]:
        """Workers that can train now, in worker order."""
        return [worker for worker in self.active_or_excluded if not worker.excluded]

    @property
    def active_or_excluded(self) -> list[Worker]:
        """Active workers and those left out until the next epoch, in worker order."""
        return [w for w in self.workers if w.present and w.trains]

    @property
    def evaluating(self) -> list[Worker]:
        """Workers with ``role=evaluate`` that can evaluate now, in worker order."""
        return [w for w in self.workers if w.present and not w.excluded and not w.trains]

    @property
    def restart_seconds(self) -> float | None:
        """Start time of a process, if the process of an active worker may be starting."""
        return self.start_seconds if any(worker.fresh for worker in self.active) else None

    def seconds_per_step_alone(self, clock: Clock) -> dict[int, float]:
        """Return the known seconds per step of each worker alone, by index.

        Speeds measured on the wall clock are left out, because then all workers compute together.
        """
        alone = {}
        for worker in self.workers:
            seconds = worker.profile.seconds_per_step_alone
            if not seconds and (clock == "device" or not worker.measured):
                seconds = worker.profile.seconds_per_step
            if seconds:
                alone[worker.index] = seconds
        return alone

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers for a checkpoint."""
        rows = ({**to_record(w), "profile": to_record(w.profile)} for w in self.workers)
        return {"workers": list(rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the workers. They are absent until their nodes connect."""
        self.workers = [
            Worker(
                **from_record(Worker, row),
                node_id=UNKNOWN_NODE,
                present=False,
                profile=WorkerProfile.from_record(row["profile"]),
            )
            for row in state["workers"]
        ]

    def register(
        self,
        found: Mapping[Address, WorkerProfile],
        failed: Sequence[tuple[WorkerProfile, int | None, Failure]] = (),
    ) -> None:
        """Add new workers, and recognize workers that return; these keep their index.

        A worker of a checkpoint also keeps its speed, unless its profile has changed. UsageError if
        a worker cannot take part and is one of the first, or one of a checkpoint. `failed` has the
        profile, as far as it is known, the local rank and the failure of workers that did not
        start.
        """
        first_new = len(self.workers)
        started, resumed = self.begun, first_new > 0 and not self.begun
        ranked = sorted((rank_key(p, rank), node, rank) for (node, rank), p in found.items())
        for _, node_id, local_rank in ranked:
            profile = found[node_id, local_rank]
            same, back = self._known(profile, local_rank)
            reason = self.mismatch(profile, local_rank)
            if reason and resumed and back:
                raise UsageError(f"the run cannot be resumed: node {node_id} {reason}")
            if reason and (started or resumed):
                self.refused_nodes.add(node_id)
                _LOG.error("node %d does not take part: %s", node_id, reason)
            elif back is not None:
                back.comes_back(profile, (node_id, local_rank))
            else:
                if same and not self._warned_of_duplicates:
                    self._warned_of_duplicates = True
                    _LOG.warning(
                        "two nodes cannot be told apart (%s): repeated runs may differ; give each "
                        "node name='...' or partition-id=N in its node config",
                        profile.name or profile.device,
                    )
                index = len(self.workers)
                self.workers.append(Worker(index, node_id, profile, local_rank=local_rank))
        self.begun = bool(self.workers)
        for profile, local_rank, failure in failed:
            self._note_start_failure(profile, local_rank, failure)
        self.assign_tiers(first_new)
        if not started:
            if self.workers and not any(worker.trains for worker in self.workers):
                raise UsageError("workers: all have role=evaluate; remove it from at least one")
            for worker in self.workers:
                if reason := self.mismatch(worker.profile, worker.local_rank):
                    raise UsageError(f"worker {worker.label} {reason}")

    def _note_start_failure(
        self, profile: WorkerProfile, local_rank: int | None, failure: Failure
    ) -> None:
        """Record the failure of a worker at its start."""
        _, worker = self._known(profile, local_rank)
        if worker is None:
            index, fast = len(self.workers), profile.tier != "slow"
            worker = Worker(index, UNKNOWN_NODE, profile, False, "", fast, local_rank=local_rank)
            self.workers.append(worker)
        worker.start_failure = failure.brief
        worker.note_failure(f"{failure.kind}{STARTING}")
        reason = failure.reason.rstrip() or failure.brief
        _LOG.error("%s does not take part: %s", worker.label, reason)

    def _known(
        self, profile: WorkerProfile, local_rank: int | None
    ) -> tuple[list[Worker], Worker | None]:
        """Return the workers with the identity of a profile, and the first that is absent."""
        identity = rank_key(profile, local_rank)[1:]
        same = [w for w in self.workers if rank_key(w.profile, w.local_rank)[1:] == identity]
        return same, next((worker for worker in same if not worker.present), None)

    def follow_speeds(self, fall: float, rise: float) -> None:
        """Adopt the speeds measured in training if some gamma has left the dead band.

        Call it between epochs, because it changes steps and tiers.
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
            # Keep a given speed, which is that of the worker alone.
            given = 0.0 if worker.measured else known.seconds_per_step
            worker.profile = replace(
                known,
                seconds_per_step=worker.training_seconds_per_step,
                seconds_per_step_alone=known.seconds_per_step_alone or given,
            )
            worker.measured = True
        self.assign_tiers()
        _LOG.info("speeds changed: %s", "; ".join(f"{w.label}: {w.speed}" for w in timed))

    def mismatch(self, profile: WorkerProfile, local_rank: int | None) -> str:
        """Return the reason why a worker cannot train with the others; empty if it can."""
        if self.no_hosts and local_rank is not None:
            return (
                f"is behind a node with several devices, and {self.no_hosts}; "
                "start one SuperNode for each device"
            )
        if own_batch := profile.batch_size:
            if 0 < self.num_samples < own_batch:
                return (
                    f"has batch={own_batch}, more than the {self.num_samples} training samples; "
                    "use a smaller batch"
                )
            if self.chooses_batches:
                return (
                    f"has batch={own_batch}, but this algorithm chooses every worker's batch by "
                    "its speed; remove it"
                )
        for fingerprint, difference, fix in _MUST_BE_EQUAL:
            own = getattr(profile, fingerprint)
            known = [("the server", getattr(self, fingerprint))]
            for worker in self.workers:
                theirs = getattr(worker.profile, fingerprint)
                if worker.node_id != UNKNOWN_NODE:
                    known.append((worker.label, theirs))
                elif fingerprint == "data_fingerprint":  # that of models was another in 0.1.0
                    known.insert(0, ("in the checkpoint", theirs))
            given = [pair for pair in known if pair[1]]
            of_server = [pair for pair in given if pair[0] == "the server"]
            for name, theirs in [*given[:1], *of_server]:
                if own and own != theirs:
                    return f"{difference} than {name}; {fix}"
        return ""

    def assign_tiers(self, first: int = 0) -> None:
        """Set the tier and the speed ratio of active workers from index `first` on.

        A tier that is not named follows from the samples per second. Call it for all workers when
        an epoch is planned, and within an epoch only for new ones.
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
            # An unknown speed counts as gamma 1.
            worker.fast = named == "fast" or (
                not named and (ratio is None or ratio * (size / of_fastest) > self.fast_threshold)
            )
