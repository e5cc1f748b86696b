"""Replies that wait until they are taken, and what all grids that have them share."""

import threading
from collections.abc import Iterable, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class Mailbox:
    """Replies by the id of the message that they answer; safe between threads.

    It does not know the grid, so that worker threads, which hold it, do not keep a forgotten
    grid alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: set[str] = set()
        self._replies: dict[str, Message] = {}
        self._waiting: list[tuple[set[str], threading.Event]] = []

    def expect(self, message_id: str) -> None:
        """Keep the reply to this message when it comes."""
        with self._lock:
            self._expected.add(message_id)

    def receive(self, reply: Message) -> None:
        """Take a reply; one that nobody expects is dropped."""
        message_id = reply.metadata.reply_to_message_id
        with self._lock:
            if message_id in self._expected:
                self._expected.discard(message_id)
                self._replies[message_id] = reply
                for missing, complete in self._waiting:
                    missing.discard(message_id)
                    if not missing:
                        complete.set()

    def expects(self, message_id: str) -> bool:
        """Whether somebody still waits for the reply to this message."""
        with self._lock:
            return message_id in self._expected

    def wait(self, message_ids: Sequence[str], timeout: float | None) -> None:
        """Wait until all these replies are there, at most `timeout` seconds."""
        complete = threading.Event()  # one wake-up for all of them
        with self._lock:
            missing = {message_id for message_id in message_ids if message_id not in self._replies}
            if not missing:
                return
            self._waiting.append((missing, complete))
        try:
            complete.wait(timeout)
        finally:
            with self._lock:
                self._waiting.remove((missing, complete))

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop these replies if they come later."""
        with self._lock:
            self._expected.difference_update(message_ids)

    def take(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there, each once."""
        with self._lock:
            return [self._replies.pop(i) for i in message_ids if i in self._replies]


class MailboxGrid(Grid):
    """A Flower grid that waits at a mailbox instead of asking again and again.

    Parameters
    ----------
    mailbox : Mailbox
        Where `push_messages` expects replies.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

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
        """Return the replies that are there; each is returned once."""
        return self._mailbox.take(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies, at most `timeout` seconds.

        A reply that comes later is dropped.
        """
        ids = list(self.push_messages(messages))
        self._mailbox.wait(ids, timeout)
        self._mailbox.forget(ids)
        return self._mailbox.take(ids)
