"""What grids have in common whose replies come to a mailbox."""

from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from .mailbox import Mailbox


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
