"""Messages to nodes of one or several workers: their profiles, and speeds where needed."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ..protocol import (
    HOST,
    QUERY_PROFILE,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    WorkerProfile,
)
from ..protocol.records import ProtocolError

_LOG = logging.getLogger(__name__)

UNKNOWN_DEVICE = "unknown device"
"""Device of a node whose ClientApp does not answer the profile query."""

_NO_HANDLER = "No query function registered"

Address = tuple[int, int | None]
"""Node id, and the local rank within a node that has several devices."""


def node_messages(
    contents: Iterable[tuple[Address, RecordDict]],
    message_type: str,
    to_host: Callable[[dict[int, RecordDict]], HostOrders] = HostOrders,
) -> list[Message]:
    """Return one message to each node, whatever number of workers it has.

    Parameters
    ----------
    contents : iterable of (Address, RecordDict)
        What each worker is sent, in worker order.
    message_type : str
        Of the messages.
    to_host : callable
        Returns the one message for all workers of a node with several devices, from their
        contents by local rank.
    """
    messages = []
    of_hosts: dict[int, dict[int, RecordDict]] = {}
    for (node_id, local_rank), content in contents:
        if local_rank is None:
            messages.append(Message(content, node_id, message_type))
        else:
            of_hosts.setdefault(node_id, {})[local_rank] = content
    for node_id, by_rank in of_hosts.items():
        messages.append(Message(to_host(by_rank).to_records(), node_id, message_type))
    return messages


def replies_to(
    grid: Grid, messages: Sequence[Message], timeout: float = 600.0
) -> dict[int, Message]:
    """Send messages, wait for at most so many seconds, and return the replies by node id."""
    received = grid.send_and_receive(messages, timeout=timeout) if messages else []
    return {reply.metadata.src_node_id: reply for reply in received}


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


def query_profiles(
    grid: Grid, node_ids: Sequence[int], retry: bool = True
) -> dict[Address, WorkerProfile]:
    """Query the profiles of nodes, and return those of the workers found.

    A node that fails, does not answer in time or answers something else is logged and left out. A
    ClientApp without a handler for the query counts as one fast worker, with a warning. One whose
    process died is queried once more: it starts again under the same node id.
    """
    content = ProfileQuery().to_records()
    replies = replies_to(grid, [Message(content, node_id, QUERY_PROFILE) for node_id in node_ids])
    found: dict[Address, WorkerProfile] = {}
    for node_id in node_ids:
        answer = answer_of(replies.get(node_id), None)
        if isinstance(answer, RecordDict):
            found |= _workers_in(replies[node_id])
        elif answer.code == ErrorCode.CLIENT_APP_CRASHED and retry:
            found |= query_profiles(grid, [node_id], retry=False)
        elif _NO_HANDLER in answer.reason:
            found[node_id, None] = WorkerProfile(device=UNKNOWN_DEVICE)
            _LOG.warning(
                "node %d has no profile and counts as one fast worker; add "
                'app.query("profile")(flower_blsgd.answer_profile) to its ClientApp',
                node_id,
            )
        else:
            reason = answer.reason.rstrip() or answer.brief
            _LOG.error("node %d does not take part: %s", node_id, reason)
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
    messages = []
    for node_id, local_ranks in ranks.items():
        query = ProfileQuery(True, batch_size, seconds, tuple(local_ranks))
        messages.append(Message(query.to_records(), node_id, QUERY_PROFILE))
    replies = replies_to(grid, messages)
    return {
        (node_id, local_rank): _speed_in(replies.get(node_id), local_rank)
        for node_id, local_rank in workers
    }


def _workers_in(reply: Message) -> dict[Address, WorkerProfile]:
    node_id = reply.metadata.src_node_id
    try:
        is_host = HOST in reply.content.config_records
        failures = HostReply.from_content(reply.content).failures if is_host else {}
        for local_rank, failure in failures.items():
            reason = failure.reason.rstrip() or failure.brief
            _LOG.error("device %d of node %d does not take part: %s", local_rank, node_id, reason)
        profiles = WorkerProfile.by_local_rank(reply)
    except ProtocolError as error:
        _LOG.error("node %d does not take part: %s", node_id, error)
        return {}
    return {(node_id, rank): profile for rank, profile in profiles.items()}


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
