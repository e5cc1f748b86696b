"""Where replies wait until they are asked for."""

import threading
from collections.abc import Iterable, Sequence

from flwr.app import Message


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
