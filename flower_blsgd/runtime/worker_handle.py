"""One node of the local grid: a thread that takes its messages to a worker process."""

import queue
import threading

from flwr.app import Error, Message

from .child_process import ChildDiedError
from .flower_internals import CRASHED, NODE_GONE
from .mailbox import Mailbox
from .process_host import GivenUpError, ProcessHost
from .shared_arrays import Parcel

_JOIN_SECONDS = 10.0


class WorkerHandle:
    """Serves a node's messages, one at a time; every message gets a reply.

    Parameters
    ----------
    node_id : int
        Which node.
    host : ProcessHost
        The process that it is in.
    mailbox : Mailbox
        Takes every reply, error replies included. A message whose reply nobody waits for any
        more is not begun.
    """

    def __init__(self, node_id: int, host: ProcessHost, mailbox: Mailbox) -> None:
        self.host = host
        self._node_id = node_id
        self._mailbox = mailbox
        self._inbox: queue.SimpleQueue[tuple[Message, Parcel] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, message: Message, parcel: Parcel) -> None:
        """Queue a message; the process starts with the first one."""
        if self._closing:
            reason = f"worker {self.host.label} is closed"
            self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        self._inbox.put((message, parcel))

    def begin_close(self) -> None:
        """Take no more messages."""
        self._closing = True
        self._inbox.put(None)

    def finish_close(self) -> None:
        """Wait until the thread is gone."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        while (work := self._inbox.get()) is not None:
            self._answer(*work)
            del work  # what it holds in shared memory can be used again

    def _answer(self, message: Message, parcel: Parcel) -> None:
        if not self._mailbox.expects(message.metadata.message_id):
            return
        try:
            reply = self._reply_to(message, parcel)
        except Exception as error:  # without an answer the sender would wait for ever
            reason = f"worker {self.host.label}: {type(error).__name__}: {error}"
            reply = Message(Error(CRASHED, reason), reply_to=message)
        if not self._closing:
            self._mailbox.receive(reply)

    def _reply_to(self, message: Message, parcel: Parcel) -> Message:
        try:
            return self.host.exchange(self._node_id, parcel)
        except ChildDiedError as death:
            reason = f"worker {self.host.label}: the process {death}"
            return Message(Error(CRASHED, reason), reply_to=message)
        except GivenUpError as refusal:
            return Message(Error(NODE_GONE, str(refusal)), reply_to=message)
