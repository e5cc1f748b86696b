"""Messages to nodes with one or several workers, and the workers' replies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..protocol import Failure, HostOrders, HostReply

Read = TypeVar("Read")

Address = tuple[int, int | None]
"""Node id, and the local rank within a node that has several devices."""


def node_messages(
    contents: Iterable[tuple[Address, RecordDict]],
    message_type: str,
    to_host: Callable[[dict[int, RecordDict]], HostOrders] = HostOrders,
) -> list[Message]:
    """Return one message per node from the contents for its workers.

    `to_host` builds the message to a node with several devices from the contents by local rank.
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
    """Send messages, wait for at most `timeout` seconds, and return the replies by node id."""
    received = grid.send_and_receive(messages, timeout=timeout) if messages else []
    sent = (message.metadata for message in messages)
    node_of = {one.message_id: one.dst_node_id for one in sent if one.message_id}
    return {node_asked(reply, node_of): reply for reply in received}


def node_asked(reply: Message, node_of: Mapping[str, int]) -> int:
    """Return the node that a reply is of: Flower itself answers for a node that is gone.

    `node_of` are the nodes by the ids of the messages sent to them.
    """
    metadata = reply.metadata
    return node_of.get(metadata.reply_to_message_id, metadata.src_node_id)


def answer_of(reply: Message | None) -> RecordDict | Failure:
    """Return the reply of a node, or its failure; None is a node that did not answer in time."""
    if reply is None:
        return Failure("late", "it did not answer in time")
    return Failure.of(reply.error) if reply.has_error() else reply.content


def read_answer(
    reply: Message | None, local_rank: int | None, read: Callable[[RecordDict], Read]
) -> Read | Failure:
    """Return one worker's part of the reply of its node, converted by `read`, or its failure.

    `local_rank` is the worker's rank within a node with several devices. An exception in `read` is
    a failure of this worker.
    """
    try:
        answer = answer_of(reply)
        if local_rank is not None and isinstance(answer, RecordDict):
            host = HostReply.from_content(answer)
            missing = Failure("unusable reply", "it is missing in the reply of its node")
            answer = host.parts.get(local_rank) or host.failures.get(local_rank, missing)
        return answer if isinstance(answer, Failure) else read(answer)
    except Exception as error:
        return Failure.of(error)
