"""A node's side of a session: messages come in, the app answers, replies go out."""

import ctypes
import logging
import queue
import threading
import traceback

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from ..app_call import handler_of
from ..flower_internals import RAISED, inside_lifespan
from ..shared_arrays import takes_views
from .connection import ClientConnection
from .frames import Frame, FrameError, Kind
from .held_models import HeldModels
from .invitation import Farewell, Invitation
from .letters import message_in, reply_pieces
from .parents import die_with_supernode
from .session_end import run_at_session_end, session_begins

_LOG = logging.getLogger(__name__)

_WAIT_SECONDS = 0.5
"""No wait of a handler is longer: Flower ends a node with a signal that only runs in between."""

_IDLE_SECONDS = 0.05
_UNWIND_SECONDS = 0.4


class SessionOverError(BaseException):
    """Raised in the app's code when its session ends while it works."""


class Session:
    """Serves one session, from its invitation to its end.

    Parameters
    ----------
    app : ClientApp
        What answers the messages.
    invitation : Message
        The message that opened the session.
    context : Context
        The node's.
    """

    def __init__(self, app: ClientApp, invitation: Message, context: Context) -> None:
        self._opened_by = invitation
        self._node_id = context.node_id
        self._superlink = str(context.node_config.get("superlink", ""))
        self._handle = handler_of(inside_lifespan(app), context)
        self._views = takes_views(app)
        self._held = HeldModels("float32", self._views)
        self._over = threading.Event()
        self._farewell = Farewell(connected=False, reason="no answer")
        self._work: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replies: dict[str, list[bytes]] = {}
        """By the message that was taken; empty while there is none."""
        self._worker = threading.Thread(target=self._serve_work, name="client-app", daemon=True)

    def serve(self) -> Farewell:
        """Serve until the server ends the session, or is gone for good."""
        try:
            invitation = Invitation.from_message(self._opened_by)
        except FrameError as error:
            return Farewell(connected=False, reason=str(error))
        self._held = HeldModels(invitation.wire_dtype, self._views)
        die_with_supernode()
        session_begins()
        self._connection = ClientConnection(
            invitation, self._node_id, self._superlink, self._take, self._holding
        )
        network = threading.Thread(target=self._keep_connected, name="stream", daemon=True)
        self._worker.start()
        network.start()
        try:
            while not self._over.wait(_WAIT_SECONDS):
                pass
        finally:  # also when Flower ends the node: SystemExit
            self._connection.close()
            self._interrupt_work()
            run_at_session_end()
        return self._farewell

    def _keep_connected(self) -> None:
        try:
            self._farewell = self._connection.run()
        except Exception as error:
            _LOG.exception("the stream broke")
            self._farewell = Farewell(
                self._connection.connected, f"{type(error).__name__}: {error}"
            )
        finally:
            self._over.set()

    def _holding(self) -> tuple[list[str], list[bytes]]:
        """Return the ids of messages that need not be sent again, and the replies that must."""
        replies = dict(self._replies)
        return list(replies), [piece for reply in replies.values() for piece in reply]

    def _take(self, frame: Frame) -> None:
        if frame.kind is not Kind.MESSAGE:
            raise FrameError(f"a server does not send {frame.kind.name} here")
        message = message_in(frame, self._opened_by, self._node_id, self._held)
        awaited = frame.header.get("awaited")
        for answered in set(self._replies).difference(awaited if isinstance(awaited, list) else ()):
            del self._replies[answered]
        message_id = message.metadata.message_id
        if message_id not in self._replies:
            self._replies[message_id] = []
            self._work.put(message)

    def _serve_work(self) -> None:
        try:
            while (message := self._work.get()) is not None:
                message_id = message.metadata.message_id
                pieces = self._answer(message)
                del message
                if message_id in self._replies:  # else nobody waits for it any more
                    self._replies[message_id] = pieces
                    self._connection.send(pieces)
        except SessionOverError:
            pass

    def _answer(self, message: Message) -> list[bytes]:
        try:
            return reply_pieces(self._handle(message), self._held)
        except SessionOverError:
            raise
        except BaseException:  # such as SystemExit: the server would wait for ever
            error = Error(RAISED, traceback.format_exc())
            return reply_pieces(Message(error, reply_to=message), self._held)

    def _interrupt_work(self) -> None:
        """Stop the app's code where it is; if it does not stop, the process ends around it."""
        self._work.put(None)
        self._worker.join(_IDLE_SECONDS)
        if self._worker.is_alive() and self._worker.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._worker.ident), ctypes.py_object(SessionOverError)
            )
            self._worker.join(_UNWIND_SECONDS)
