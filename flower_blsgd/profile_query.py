"""Ask nodes who they are, and how fast."""

import logging
import math
from collections.abc import Sequence

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .protocol import QUERY_PROFILE, ProfileQuery, WorkerProfile
from .wire import ProtocolError

_LOG = logging.getLogger(__name__)

UNKNOWN_DEVICE = "unknown device"
"""Stands for the device of a node that cannot say who it is."""

_NO_HANDLER = "No query function registered"
_TIMEOUT_SECONDS = 600.0


def ask_profiles(
    grid: Grid, node_ids: Sequence[int]
) -> tuple[list[tuple[int, WorkerProfile]], list[int]]:
    """Return the profiles of the nodes that gave one, and the nodes whose process died."""
    replies = _ask(grid, node_ids, ProfileQuery())
    for node_id in node_ids:
        if node_id not in replies:
            _LOG.error("node %d does not take part: it did not say who it is in time", node_id)
    profiles = [(node_id, _profile_in(reply)) for node_id, reply in replies.items()]
    died = [
        node_id
        for node_id, reply in replies.items()
        if reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    ]
    return [(node_id, profile) for node_id, profile in profiles if profile is not None], died


def ask_speeds(
    grid: Grid, node_ids: Sequence[int], batch_size: int, seconds: float = 1.0
) -> dict[int, float | str]:
    """Let nodes measure their seconds per step, all at the same time, for about `seconds`.

    Returns
    -------
    dict
        By node id: the seconds, or why they are not known.
    """
    query = ProfileQuery(calibrate=True, batch_size=batch_size, seconds=seconds)
    replies = _ask(grid, node_ids, query)
    return {node_id: _speed_in(replies.get(node_id)) for node_id in node_ids}


def _ask(grid: Grid, node_ids: Sequence[int], query: ProfileQuery) -> dict[int, Message]:
    messages = [Message(query.to_records(), node_id, QUERY_PROFILE) for node_id in node_ids]
    replies = grid.send_and_receive(messages, timeout=_TIMEOUT_SECONDS)
    return {reply.metadata.src_node_id: reply for reply in replies}


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
        return WorkerProfile(device=UNKNOWN_DEVICE)
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


def _speed_in(reply: Message | None) -> float | str:
    if reply is None:
        return "it did not answer in time"
    if reply.has_error():
        reason = (reply.error.reason or "").strip() or f"error {reply.error.code}"
        return reason.splitlines()[-1]
    try:
        seconds = WorkerProfile.list_from_reply(reply)[0].seconds_per_step
    except ProtocolError as error:
        return str(error)
    if not (math.isfinite(seconds) and seconds > 0):
        return "its ClientApp does not measure; give seconds-per-step in its node config"
    return seconds
