"""Query the nodes: which workers they are, and their seconds per step where settings need them."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ..algorithm.local_steps import Clock, StepPolicy
from ..protocol import HOST, QUERY_PROFILE, Failure, HostReply, ProfileQuery, WorkerProfile
from ..protocol.records import ProtocolError

_LOG = logging.getLogger(__name__)

UNKNOWN_DEVICE = "unknown device"
"""Device of a node whose ClientApp does not answer the profile query."""

_NO_HANDLER = "No query function registered"
_TIMEOUT_SECONDS = 600.0

Address = tuple[int, int | None]
"""Node id, and the local rank within a node that has several devices."""


def query_profiles(
    grid: Grid, node_ids: Sequence[int], retry: bool = True
) -> dict[Address, WorkerProfile]:
    """Query the profiles of nodes, and return those of the workers found.

    A node that fails, does not answer in time or answers something else is logged and left out. A
    ClientApp without a handler for the query counts as one fast worker, with a warning. One whose
    process died is queried once more: it starts again under the same node id.
    """
    replies = _send_queries(grid, dict.fromkeys(node_ids, ProfileQuery()))
    for node_id in node_ids:
        if node_id not in replies:
            _LOG.error("node %d does not take part: no answer in time", node_id)
    found: dict[Address, WorkerProfile] = {}
    for reply in replies.values():
        found |= _workers_in(reply)
    died = [
        node_id
        for node_id, reply in replies.items()
        if reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    ]
    if died and retry:
        found |= query_profiles(grid, died, retry=False)
    return found


def query_speeds(
    grid: Grid, workers: Sequence[Address], batch_size: int, seconds: float = 1.0
) -> dict[Address, float | str]:
    """Let workers measure their seconds per step, all at the same time.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    workers : sequence of (int, int or None)
        Those that measure.
    batch_size : int
        Samples per step.
    seconds : float (default: 1.0)
        About how long each measures.

    Returns
    -------
    dict
        By worker: the seconds per step, or why they are not known.
    """
    ranks: dict[int, list[int]] = {}
    for node_id, local_rank in workers:
        ranks.setdefault(node_id, []).extend([] if local_rank is None else [local_rank])
    queries = {
        node_id: ProfileQuery(True, batch_size, seconds, tuple(local_ranks))
        for node_id, local_ranks in ranks.items()
    }
    replies = _send_queries(grid, queries)
    return {
        (node_id, local_rank): _speed_in(replies.get(node_id), local_rank)
        for node_id, local_rank in workers
    }


def _send_queries(grid: Grid, queries: Mapping[int, ProfileQuery]) -> dict[int, Message]:
    messages = [
        Message(query.to_records(), node_id, QUERY_PROFILE) for node_id, query in queries.items()
    ]
    replies = grid.send_and_receive(messages, timeout=_TIMEOUT_SECONDS)
    return {reply.metadata.src_node_id: reply for reply in replies}


def _workers_in(reply: Message) -> dict[Address, WorkerProfile]:
    node_id = reply.metadata.src_node_id
    if reply.has_error():
        reason = reply.error.reason or f"error {reply.error.code}"
        if _NO_HANDLER not in reason:
            _LOG.error("node %d does not take part: %s", node_id, reason.rstrip())
            return {}
        _LOG.warning(
            "node %d has no profile and counts as one fast worker; add "
            'app.query("profile")(flower_blsgd.answer_profile) to its ClientApp',
            node_id,
        )
        return {(node_id, None): WorkerProfile(device=UNKNOWN_DEVICE)}
    try:
        is_host = HOST in reply.content.config_records
        failures = HostReply.from_content(reply.content).failures if is_host else {}
        for local_rank, failure in failures.items():
            reason = failure.reason.rstrip() or f"error {failure.code}"
            _LOG.error("device %d of node %d does not take part: %s", local_rank, node_id, reason)
        profiles = WorkerProfile.by_local_rank(reply)
    except ProtocolError as error:
        _LOG.error("node %d does not take part: %s", node_id, error)
        return {}
    return {(node_id, rank): profile for rank, profile in profiles.items()}


def answer_of(reply: Message | None, local_rank: int | None) -> RecordDict | Failure:
    """Return what one worker answered to a message to its node, or why there is nothing.

    Parameters
    ----------
    reply : Message, optional
        That of the node; None if it did not answer in time.
    local_rank : int, optional
        The worker's rank within a node that has several devices.

    Raises
    ------
    ProtocolError
        If the reply is not one of such a node.
    """
    if reply is None:
        return Failure(0, "it did not answer in time")
    if reply.has_error():
        return Failure(reply.error.code, reply.error.reason or "")
    if local_rank is None:
        return reply.content
    host = HostReply.from_content(reply.content)
    missing = Failure(0, "its node's reply does not mention it")
    return host.parts.get(local_rank) or host.failures.get(local_rank, missing)


def _speed_in(reply: Message | None, local_rank: int | None) -> float | str:
    try:
        answer = answer_of(reply, local_rank)
        if isinstance(answer, Failure):
            return answer.brief
        assert reply is not None
        profile = WorkerProfile.by_local_rank(reply).get(local_rank)
    except ProtocolError as error:
        return str(error)
    seconds = 0.0 if profile is None else profile.seconds_per_step
    if not (math.isfinite(seconds) and seconds > 0):
        return "its ClientApp does not measure; give seconds-per-step in its node config"
    return seconds


@dataclass(frozen=True)
class SpeedRule:
    """Decides whose seconds per step are measured before training, and how.

    Parameters
    ----------
    batch_size : int
        Samples per step.
    policy : StepPolicy
        Says whose steps come from speeds.
    clock : {"wall", "device"} (default: "wall")
        ``"wall"`` measures all at once, as they train; ``"device"`` one after another, each as
        if it had the machine for itself, and always.
    """

    batch_size: int
    policy: StepPolicy
    clock: Clock = "wall"

    def decides_steps(self, profile: WorkerProfile) -> bool:
        """Return whether the steps of a worker whose tier is named come from its speed."""
        needed = profile.tier == "slow" or self.policy.needs_fast_speeds
        return self.policy.needs_speeds and needed and not profile.steps

    def applies(self, profiles: Sequence[WorkerProfile]) -> bool:
        """Return whether the tier or the steps of any of these workers come from its speed."""
        return self.clock == "device" or any(
            profile.device != UNKNOWN_DEVICE and (not profile.tier or self.decides_steps(profile))
            for profile in profiles
        )

    def measure(
        self, grid: Grid, workers: Sequence[Address], others: Sequence[Address]
    ) -> dict[Address, float | str]:
        """Return the seconds per step by worker, or why they are not known.

        The `others` were measured before: on the wall clock they compute meanwhile, as they do
        in a round.
        """
        if self.clock == "wall":
            _LOG.info("measuring the seconds per step of %d workers at once", len(workers))
            found = query_speeds(grid, [*workers, *others], self.batch_size)
            return {worker: found[worker] for worker in workers}
        _LOG.info("measuring the seconds per step of %d workers one by one", len(workers))
        alone: dict[Address, float | str] = {}
        for worker in workers:
            alone |= query_speeds(grid, [worker], self.batch_size)
        return alone


def assume_speeds(profiles: Sequence[WorkerProfile]) -> list[WorkerProfile]:
    """Fill in tiers and speeds that are still to be measured, so that the fewest runs are refused.

    Unnamed workers may turn out to be of either tier, but the fastest of all is fast.
    """
    named = {profile.tier for profile in profiles}
    missing = [tier for tier in ("fast", "slow") if tier not in named]
    known = [profile.seconds_per_step for profile in profiles if profile.seconds_per_step > 0]
    assumed = min(known, default=1.0)
    filled = []
    for profile in profiles:
        tier = profile.tier or (missing.pop(0) if missing else "fast")
        seconds = profile.seconds_per_step or assumed
        filled.append(replace(profile, tier=tier, seconds_per_step=seconds))
    return filled
