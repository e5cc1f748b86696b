"""Ask nodes who they are, and how fast."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .protocol import HOST, QUERY_PROFILE, Failure, HostReply, ProfileQuery, WorkerProfile
from .wire import ProtocolError

_LOG = logging.getLogger(__name__)

UNKNOWN_DEVICE = "unknown device"
"""Stands for the device of a node that cannot say who it is."""

_NO_HANDLER = "No query function registered"
_TIMEOUT_SECONDS = 600.0


Address = tuple[int, int | None]
"""Node id, and the place within a node that has several devices."""


@dataclass(frozen=True)
class Introduction:
    """A worker said who it is.

    Parameters
    ----------
    node_id : int
        Its node.
    place : int, optional
        Its place within a node that has several devices.
    profile : WorkerProfile
        What it said.
    """

    node_id: int
    place: int | None
    profile: WorkerProfile


def ask_profiles(grid: Grid, node_ids: Sequence[int]) -> tuple[list[Introduction], list[int]]:
    """Return the workers of the nodes that answered, and the nodes whose process died."""
    replies = _ask(grid, {node_id: ProfileQuery() for node_id in node_ids})
    for node_id in node_ids:
        if node_id not in replies:
            _LOG.error("node %d does not take part: it did not say who it is in time", node_id)
    found = [worker for reply in replies.values() for worker in _introductions_in(reply)]
    died = [
        node_id
        for node_id, reply in replies.items()
        if reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    ]
    return found, died


def ask_speeds(
    grid: Grid, node_ids: Sequence[int], batch_size: int, seconds: float = 1.0
) -> dict[int, float | str]:
    """Let ordinary nodes measure their seconds per step; see `ask_worker_speeds`.

    Returns
    -------
    dict
        By node id: the seconds, or why they are not known.
    """
    found = ask_worker_speeds(grid, [(node_id, None) for node_id in node_ids], batch_size, seconds)
    return {node_id: speed for (node_id, _), speed in found.items()}


def ask_worker_speeds(
    grid: Grid, workers: Sequence[Address], batch_size: int, seconds: float = 1.0
) -> dict[Address, float | str]:
    """Let workers measure their seconds per step, all at the same time, for about `seconds`.

    Returns
    -------
    dict
        By worker: the seconds, or why they are not known.
    """
    places: dict[int, list[int]] = {}
    for node_id, place in workers:
        places.setdefault(node_id, []).extend([] if place is None else [place])
    queries = {
        node_id: ProfileQuery(True, batch_size, seconds, tuple(behind))
        for node_id, behind in places.items()
    }
    replies = _ask(grid, queries)
    return {(node_id, place): _speed_in(replies.get(node_id), place) for node_id, place in workers}


def _ask(grid: Grid, queries: Mapping[int, ProfileQuery]) -> dict[int, Message]:
    messages = [
        Message(query.to_records(), node_id, QUERY_PROFILE) for node_id, query in queries.items()
    ]
    replies = grid.send_and_receive(messages, timeout=_TIMEOUT_SECONDS)
    return {reply.metadata.src_node_id: reply for reply in replies}


def _introductions_in(reply: Message) -> list[Introduction]:
    node_id = reply.metadata.src_node_id
    if reply.has_error():
        reason = reply.error.reason or f"error {reply.error.code}"
        if _NO_HANDLER not in reason:
            _LOG.error("node %d does not take part: %s", node_id, reason.rstrip())
            return []
        _LOG.warning(
            "node %d does not say who it is and counts as one fast worker; add "
            'app.query("profile")(flower_blsgd.answer_profile) to its ClientApp',
            node_id,
        )
        return [Introduction(node_id, None, WorkerProfile(device=UNKNOWN_DEVICE))]
    try:
        for place, failure in _failures_in(reply).items():
            _LOG.error(
                "device %d of node %d does not take part: %s",
                place,
                node_id,
                failure.reason.rstrip() or f"error {failure.code}",
            )
        profiles = WorkerProfile.by_place(reply)
    except ProtocolError as error:
        _LOG.error("node %d does not take part: %s", node_id, error)
        return []
    return [Introduction(node_id, place, profile) for place, profile in profiles.items()]


def _failures_in(reply: Message) -> Mapping[int | None, Failure]:
    """Return which devices of a node with several did not answer."""
    if HOST not in reply.content.config_records:
        return {}
    return dict(HostReply.from_content(reply.content).failures.items())


def _speed_in(reply: Message | None, place: int | None) -> float | str:
    if reply is None:
        return "it did not answer in time"
    if reply.has_error():
        return Failure(reply.error.code, reply.error.reason or "").brief
    try:
        failures = _failures_in(reply)
        if place in failures:
            return failures[place].brief
        profile = WorkerProfile.by_place(reply).get(place)
    except ProtocolError as error:
        return str(error)
    seconds = 0.0 if profile is None else profile.seconds_per_step
    if not (math.isfinite(seconds) and seconds > 0):
        return "its ClientApp does not measure; give seconds-per-step in its node config"
    return seconds
