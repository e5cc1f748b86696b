"""Messages to nodes of one or several workers: their profiles, and speeds where needed."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..grids.worker_spec import Tier
from ..protocol import (
    HOST,
    QUERY_PROFILE,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    ProtocolError,
    WorkerProfile,
)
from ..protocol.records import by_rank

_LOG = logging.getLogger(__name__)

UNKNOWN_DEVICE = "unknown device"
"""Device of a node whose ClientApp does not answer the profile query."""

_NOT_MEASURED = "its ClientApp does not measure; give seconds-per-step in its node config"

Read = TypeVar("Read")

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
    for node_id, own in of_hosts.items():
        messages.append(Message(to_host(own).to_records(), node_id, message_type))
    return messages


def replies_to(
    grid: Grid, messages: Sequence[Message], timeout: float | None = 600.0
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
    """
    if reply is None:
        return Failure("late", "it did not answer in time")
    if reply.has_error():
        return Failure.of(reply.error)
    if local_rank is None:
        return reply.content
    try:
        host = HostReply.from_content(reply.content)
    except ProtocolError as error:
        return Failure.of(error)
    missing = Failure("unusable reply", "its node's reply does not mention it")
    return host.parts.get(local_rank) or host.failures.get(local_rank, missing)


def read_answer(
    reply: Message | None, local_rank: int | None, read: Callable[[RecordDict], Read]
) -> Read | Failure:
    """Return what `read` makes of one worker's answer, or why there is nothing; see `answer_of`.

    Whatever a node sends, it costs no more than the share of its own workers.
    """
    try:
        answer = answer_of(reply, local_rank)
        return answer if isinstance(answer, Failure) else read(answer)
    except Exception as error:
        return Failure.of(error)


def query_profiles(
    grid: Grid, node_ids: Sequence[int], *, seconds: float = 600.0, level: int = logging.ERROR
) -> dict[Address, WorkerProfile]:
    """Query the profiles of nodes, and return those of the workers found.

    A worker that fails, does not answer within so many seconds or answers something else is
    logged, at this level, and left out. ClientApps without a handler for the query count as one
    fast worker each, with one warning. A node with a process that died is queried once more: it
    starts again under the same node id.
    """
    content = ProfileQuery().to_records()
    replies: dict[int, Message] = {}
    queried = list(node_ids)
    for _ in range(2):
        messages = [Message(content, node_id, QUERY_PROFILE) for node_id in queried]
        replies |= replies_to(grid, messages, seconds)
        answers = {
            (node_id, rank): answer
            for node_id in node_ids
            for rank, answer in _profiles_in(replies.get(node_id)).items()
        }
        failures = {address: a for address, a in answers.items() if isinstance(a, Failure)}
        queried = sorted({node for (node, _), f in failures.items() if f.kind == "died"})
    found = {address: a for address, a in answers.items() if isinstance(a, WorkerProfile)}
    no_handler = [address for address, f in failures.items() if f.kind == "no handler"]
    if no_handler:
        found |= dict.fromkeys(no_handler, WorkerProfile(device=UNKNOWN_DEVICE))
        _LOG.log(
            min(level, logging.WARNING),
            "no profile and so no speed is known of %s: each counts as one fast worker (gamma 1); "
            'add app.query("profile")(flower_blsgd.answer_profile) to the ClientApp',
            ", ".join(f"node {node_id}" for node_id, _ in no_handler),
        )
    for (node_id, rank), failure in failures.items():
        if (node_id, rank) not in no_handler:
            reason = failure.reason.rstrip() or failure.brief
            who = f"node {node_id}" if rank is None else f"device {rank} of node {node_id}"
            _LOG.log(level, "%s does not take part: %s", who, reason)
    return found


def _profiles_in(reply: Message | None) -> dict[int | None, WorkerProfile | Failure]:
    """Return the profile of each worker behind a node, by local rank, or why there is none."""
    answer = answer_of(reply, None)
    ranks: Iterable[int | None] = (None,)
    if isinstance(answer, RecordDict) and HOST in answer.config_records:
        ranks = by_rank(answer)[0] or ranks
    return {rank: read_answer(reply, rank, WorkerProfile.from_content) for rank in ranks}


def query_speeds(
    grid: Grid, batch_sizes: Mapping[Address, int], seconds: float = 1.0
) -> dict[Address, float | str]:
    """Let workers measure their seconds per step, all at the same time.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    batch_sizes : mapping of (int, int or None) to int
        Samples per step of each worker that measures.
    seconds : float (default: 1.0)
        About how long each measures.

    Returns
    -------
    dict
        By worker: the seconds per step, or why they are not known.
    """
    contents = {
        size: ProfileQuery(True, size, seconds).to_records() for size in batch_sizes.values()
    }
    queries = [(address, contents[size]) for address, size in batch_sizes.items()]
    messages = node_messages(queries, QUERY_PROFILE)
    replies = replies_to(grid, messages)
    speeds: dict[Address, float | str] = {}
    for node_id, rank in batch_sizes:
        profile = read_answer(replies.get(node_id), rank, WorkerProfile.from_content)
        if isinstance(profile, Failure):
            speeds[node_id, rank] = profile.brief
        else:
            speeds[node_id, rank] = profile.seconds_per_step or _NOT_MEASURED
    return speeds


def assume_speeds(profiles: Sequence[WorkerProfile]) -> list[WorkerProfile]:
    """Fill in tiers and speeds that are still to be measured, so that the fewest runs are refused.

    Unnamed workers may turn out to be of either tier, but the fastest of all is fast.
    """
    named = {profile.tier for profile in profiles if profile.role == "train"}
    tiers: tuple[Tier, ...] = ("fast", "slow")
    missing = [tier for tier in tiers if tier not in named]
    known = [profile.seconds_per_step for profile in profiles if profile.seconds_per_step > 0]
    assumed = min(known, default=1.0)
    filled = []
    for profile in profiles:
        wanted = missing if profile.role == "train" else []
        tier = profile.tier or (wanted.pop(0) if wanted else "fast")
        seconds = profile.seconds_per_step or assumed
        filled.append(replace(profile, tier=tier, seconds_per_step=seconds))
    return filled
