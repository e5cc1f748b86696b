"""Who the workers of a run are: asked once, ranked once, known again when they come back."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .algorithm.local_steps import FAST_SPEED_RATIO, Participant, speed_ratios
from .errors import UsageError
from .protocol import CONFIG, QUERY_PROFILE, WorkerProfile
from .wire import ProtocolError

_LOG = logging.getLogger(__name__)

_NO_HANDLER = "No query function registered"
_POLL_SECONDS = 0.5
_PROFILE_TIMEOUT_SECONDS = 600.0


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
    """

    index: int
    node_id: int
    profile: WorkerProfile
    present: bool = True
    excluded: str = ""
    fast: bool = True
    speed_ratio: float | None = None

    @property
    def label(self) -> str:
        """How logs and results call it, such as ``fast-0 (cpu:0)``."""
        tier = "fast" if self.fast else "slow"
        return f"{self.profile.name or f'{tier}-{self.index}'} ({self.profile.device})"

    def participant(self, batch_size: int) -> Participant:
        """Return what the mathematics needs to know of it."""
        return Participant(self.fast, batch_size, self.speed_ratio, self.profile.steps or None)


def rank_key(profile: WorkerProfile) -> tuple[bool, int, float, str]:
    """Return the key that workers are ranked by: never a node id, never a measured speed.

    Named slow ones last; then by partition id, else by name, else by device.
    """
    slow = profile.tier == "slow"
    if profile.partition_id >= 0:
        return slow, 0, profile.partition_id, ""
    if profile.name:
        return slow, 1, 0, profile.name
    return slow, 2, 0, profile.device


class Roster:
    """Keeps the workers of a run in worker order.

    Parameters
    ----------
    min_workers : int
        Nodes to wait for before the first round, >= 1.
    """

    def __init__(self, min_workers: int) -> None:
        self._min_workers = min_workers
        self.workers: list[Worker] = []
        self._silent_nodes: set[int] = set()
        self._told_of_twins = False

    @classmethod
    def of_profiles(cls, profiles: Sequence[WorkerProfile]) -> "Roster":
        """Return the roster that nodes with these profiles would make."""
        roster = cls(len(profiles))
        roster._admit(list(enumerate(profiles)))
        return roster

    @property
    def active(self) -> list[Worker]:
        """The workers that can be given an order now, in worker order."""
        return [worker for worker in self.workers if worker.present and not worker.excluded]

    def update(self, grid: Grid) -> None:
        """Notice nodes that came or went, and ask the new ones who they are.

        The first call waits until enough nodes are connected. A node without an answer is asked
        again when it connects anew.
        """
        online = self._wait(grid) if not self.workers else set(grid.get_node_ids())
        for worker in self.workers:
            worker.present = worker.node_id in online
        known = {worker.node_id for worker in self.workers} | self._silent_nodes
        if new := sorted(online - known):
            answers, died = _ask(grid, new)
            if died:  # its process starts again under the same node id: once more
                answers += _ask(grid, died)[0]
            self._admit(answers)
            self._silent_nodes |= set(new) - {worker.node_id for worker in self.workers}

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

    def _admit(self, answers: Sequence[tuple[int, WorkerProfile]]) -> None:
        began = bool(self.workers)
        for node_id, profile in sorted(answers, key=lambda a: (rank_key(a[1]), a[0])):
            identity = rank_key(profile)[1:]
            twins = [w for w in self.workers if rank_key(w.profile)[1:] == identity]
            back = next((w for w in twins if not w.present), None)
            if began and (reason := self._other_data(profile)):
                _LOG.error("node %d does not take part: %s", node_id, reason)
            elif back is not None:
                back.node_id, back.present, back.profile, back.excluded = node_id, True, profile, ""
                _LOG.info("%s is back", back.label)
            else:
                if twins:
                    self._tell_of_twins(profile)
                self.workers.append(Worker(len(self.workers), node_id, profile))
        self._assign_tiers()
        if not began:
            for worker in self.workers:
                if reason := self._other_data(worker.profile):
                    raise UsageError(f"worker {worker.label} {reason}")

    def _tell_of_twins(self, profile: WorkerProfile) -> None:
        if not self._told_of_twins:
            self._told_of_twins = True
            _LOG.warning(
                "two nodes cannot be told apart (%s): this run cannot be repeated bit for bit; "
                "give each node name='...' or partition-id=N in its node config",
                profile.name or profile.device,
            )

    def _other_data(self, profile: WorkerProfile) -> str:
        """Return what is wrong with a worker's data; empty if nothing is."""
        first = next((w for w in self.workers if w.profile.data_fingerprint), None)
        if first is None or profile.data_fingerprint in ("", first.profile.data_fingerprint):
            return ""
        return f"holds other training data than {first.label}; point both at the same data set"

    def _assign_tiers(self) -> None:
        seconds = [worker.profile.seconds_per_step or None for worker in self.workers]
        for worker, ratio in zip(self.workers, speed_ratios(seconds), strict=True):
            worker.speed_ratio = ratio
            named = worker.profile.tier
            # Without a known speed an unnamed worker counts as gamma 1.
            worker.fast = named == "fast" or (
                not named and (ratio is None or ratio > FAST_SPEED_RATIO)
            )


def _ask(grid: Grid, node_ids: Sequence[int]) -> tuple[list[tuple[int, WorkerProfile]], list[int]]:
    """Return the profiles of the nodes that gave one, and the nodes whose process died."""
    messages = [
        Message(RecordDict({CONFIG: ConfigRecord()}), node_id, QUERY_PROFILE)
        for node_id in node_ids
    ]
    replies = list(grid.send_and_receive(messages, timeout=_PROFILE_TIMEOUT_SECONDS))
    answered = {reply.metadata.src_node_id for reply in replies}
    for node_id in node_ids:
        if node_id not in answered:
            _LOG.error("node %d does not take part: it did not say who it is in time", node_id)
    profiles = [(reply.metadata.src_node_id, _profile_in(reply)) for reply in replies]
    died = [
        reply.metadata.src_node_id
        for reply in replies
        if reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    ]
    return [(node_id, profile) for node_id, profile in profiles if profile is not None], died


def _profile_in(reply: Message) -> WorkerProfile | None:
    node_id = reply.metadata.src_node_id
    if reply.has_error():
        reason = reply.error.reason or f"error {reply.error.code}"
        if _NO_HANDLER not in reason:
            _LOG.error("node %d does not take part: %s", node_id, reason.rstrip())
            return None
        _LOG.warning(
            "node %d does not say who it is and counts as one fast worker; add "
            'app.query("profile")(flower_blsgd.answer_profile) to its ClientApp',
            node_id,
        )
        return WorkerProfile(device="unknown device")
    try:
        profiles = WorkerProfile.list_from_reply(reply)
    except ProtocolError as error:
        _LOG.error("node %d does not take part: %s", node_id, error)
        return None
    if len(profiles) > 1:
        _LOG.error(
            "node %d does not take part: it offers %d devices, and a node with more than one "
            "is not supported yet; start one SuperNode per device",
            node_id,
            len(profiles),
        )
        return None
    return profiles[0]
