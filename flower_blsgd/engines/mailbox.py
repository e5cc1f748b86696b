"""A thread-safe buffer for replies, and the base class of the grids that use it."""

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Self

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from .features import GridFeatures

_SLICE_SECONDS = 1.0
"""Waits are counted in slices, so that suspending the machine adds at most one slice."""


class Mailbox:
    """Thread-safe buffer of replies, by the id of the message that they answer.

    It has no reference to the grid, so worker threads that hold it do not keep an unused grid
    alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._expected: set[str] = set()
        self._replies: dict[str, tuple[float, Message]] = {}
        self._late: dict[str, int] = {}

    def expect(self, message_id: str) -> None:
        """Keep the reply to this message when it arrives."""
        with self._lock:
            self._expected.add(message_id)

    def receive(self, reply: Message) -> None:
        """Store a reply if it is expected; drop it otherwise."""
        message_id = reply.metadata.reply_to_message_id
        with self._lock:
            self._late.pop(message_id, None)
            if message_id in self._expected:
                self._expected.discard(message_id)
                self._replies[message_id] = time.perf_counter(), reply
                self._lock.notify_all()

    def expects(self, message_id: str) -> bool:
        """Return whether the reply to this message is still expected."""
        with self._lock:
            return message_id in self._expected

    def wait(self, message_ids: Sequence[str], timeout: float | None) -> float:
        """Wait until all these replies have arrived, at most `timeout` seconds.

        Time during which the machine was suspended does not count. Returns the time of
        `time.perf_counter` at which the last one arrived, or now if one is missing.
        """
        left = math.inf if timeout is None else timeout
        with self._lock:
            while left > 0 and not all(i in self._replies for i in message_ids):
                begun = time.monotonic()
                most = min(left, _SLICE_SECONDS)
                notified = self._lock.wait(most)
                left -= min(time.monotonic() - begun, most) if notified else most
            arrived = [self._replies[i][0] for i in message_ids if i in self._replies]
        return max(arrived) if 0 < len(arrived) == len(message_ids) else time.perf_counter()

    def forget(self, message_ids: Sequence[str]) -> None:
        """Drop these replies, whether they have arrived or arrive later."""
        with self._lock:
            self._expected.difference_update(message_ids)
        self.take(message_ids)

    def give_up(self, node_of: Mapping[str, int]) -> bool:
        """Mark the replies that have not arrived as late, and return whether there are any.

        `node_of` has the node of each message, by message id.
        """
        with self._lock:
            late = {i: node_id for i, node_id in node_of.items() if i in self._expected}
            self._expected.difference_update(late)
            self._late |= late
        return bool(late)

    def settle(self, node_id: int, working_on: Collection[str] = ()) -> None:
        """Forget the late messages of a node, except those that it still works on."""
        with self._lock:
            late = self._late.items()
            self._late = {i: node for i, node in late if node != node_id or i in working_on}

    @property
    def late(self) -> dict[str, int]:
        """Nodes of the late messages that have not been answered since, by message id."""
        with self._lock:
            return dict(self._late)

    def take(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived, each once."""
        with self._lock:
            return [self._replies.pop(i)[1] for i in message_ids if i in self._replies]


class MailboxGrid(Grid, GridFeatures):
    """Base class of grids that wait for replies at a mailbox instead of polling."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this grid. May be called twice."""

    @property
    def connected_nodes(self) -> Collection[int]:
        """All nodes of this grid."""
        return set(self.get_node_ids())

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message (deprecated in Flower; use ``Message(...)``)."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, each once."""
        return self._mailbox.take(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies, at most `timeout` seconds.

        Replies that arrive later are dropped.
        """
        return self.receive(self.send(messages), timeout)[0]

    def send(self, messages: Iterable[Message]) -> Mapping[str, int]:
        """Push messages, and return the node of each, by message id."""
        messages = list(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        return dict(zip(self.push_messages(messages), nodes, strict=True))

    def receive(
        self, node_of: Mapping[str, int], timeout: float | None = None
    ) -> tuple[list[Message], float]:
        """Wait for the replies to sent messages, at most `timeout` seconds.

        Returns the replies, and for how many seconds all of them had been there before this call.
        Replies that arrive later are dropped.
        """
        ids, began = list(node_of), time.perf_counter()
        arrived_at = self._mailbox.wait(ids, timeout)
        self.give_up(node_of)
        return self._mailbox.take(ids), max(0.0, began - arrived_at)

    def forget(self, node_of: Mapping[str, int]) -> None:
        """Drop the replies to sent messages, also those that arrive later."""
        self._mailbox.forget(list(node_of))

    def give_up(self, node_of: Mapping[str, int]) -> None:
        """Stop waiting for the replies to these messages, and stop late workers if the grid can."""
        if self._mailbox.give_up(node_of):
            self._stop_late()

    def _stop_late(self) -> None:
        """Stop workers that work on late messages. By default they continue."""
