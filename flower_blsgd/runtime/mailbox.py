"""Where replies wait until they are asked for."""

import threading
import time
from collections.abc import Iterable, Sequence

from flwr.app import Message


class Mailbox:
    """Replies by the id of the message that they answer; safe between threads.

    It does not know the grid, so that worker threads, which hold it, do not keep a forgotten
    grid alive.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: set[str] = set()
        self._replies: dict[str, Message] = {}

    def expect(self, message_id: str) -> None:
        """Keep the reply to this message when it comes."""
        with self._changed:
            self._expected.add(message_id)

    def receive(self, reply: Message) -> None:
        """Take a reply; one that nobody expects is dropped."""
        message_id = reply.metadata.reply_to_message_id
        with self._changed:
            if message_id in self._expected:
                self._expected.discard(message_id)
                self._replies[message_id] = reply
                self._changed.notify_all()

    def expects(self, message_id: str) -> bool:
        """Whether somebody still waits for the reply to this message."""
        with self._changed:
            return message_id in self._expected

    def wait(self, message_ids: Sequence[str], timeout: float | None) -> None:
        """Wait until all these replies are there, at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while any(message_id not in self._replies for message_id in message_ids):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop these replies if they come later."""
        with self._changed:
            self._expected.difference_update(message_ids)

    def take(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there, each once."""
        with self._changed:
            return [self._replies.pop(i) for i in message_ids if i in self._replies]
