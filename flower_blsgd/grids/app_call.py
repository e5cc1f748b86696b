"""Call a ClientApp so that there is always a reply, and give it arrays as it wants them."""

import copy
import errno
import sys
import traceback
from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from ..errors import UsageError
from .array_records import record_of
from .flower_internals import RAISED, answer_without_mods
from .stream.session import SESSION_MESSAGE

Handler = Callable[[Message], Message]

OUT_OF_MEMORY = 1001
"""Error code of a reply, in addition to Flower's codes, which are below 1000."""

_VIEWS = "blsgd_accepts_views"


def accept_views(app: ClientApp) -> None:
    """Let a ClientApp receive arrays that are views on shared memory, instead of copies.

    It must neither write to them nor keep them beyond the call, except in its own copies.
    """
    app.__dict__[_VIEWS] = True


def takes_views(app: ClientApp) -> bool:
    """Return whether `accept_views` was called for this app."""
    return bool(app.__dict__.get(_VIEWS))


def serve_sessions(app: ClientApp) -> ClientApp:
    """Let a ClientApp take its messages over a stream, where the ServerApp opens one.

    Its functions stay as they are: each message on the stream calls the app as Flower would,
    mods included, and ``context.state`` lives on; a lifespan is entered once, around all of
    them. The calls come from one thread, which is not the main one. Where the session ends while
    the app works, what it does is interrupted by an exception that is no ``Exception``.

    Parameters
    ----------
    app : ClientApp
        With ``@app.train()`` and its like; it is changed in place.

    Returns
    -------
    ClientApp
        The same app.

    Raises
    ------
    ValueError
        If the app was made with ``client_fn``.

    Examples
    --------
    ::

        app = ClientApp()
        flower_blsgd.serve_sessions(app)
    """

    def serve(message: Message, context: Context) -> Message:
        from .stream.client import serve_session  # gRPC, which no other engine needs

        return serve_session(app, message, context)

    answer_without_mods(app, SESSION_MESSAGE, serve)
    return app


def handler_of(app: ClientApp, context: Context) -> Handler:
    """Return a function that answers a node's messages: the app's reply, or an error reply.

    An error reply has the traceback, or for a `UsageError` its own one line. What a call that
    failed left in the node's state is not kept.
    """

    def handle(message: Message) -> Message:
        before = _snapshot(context.state)
        try:
            return _checked(app(message, context), message)
        except BaseException as error:
            context.state = before  # as in Flower's simulation
            if not isinstance(error, Exception):  # it was interrupted
                raise
            return Message(error_of(error), reply_to=message)

    return handle


def error_of(error: BaseException, summary: str = "") -> Error:
    """Return the error of a reply: the traceback, or for a `UsageError` its own one line.

    `summary` is a last line that comes after the traceback.
    """
    reason = str(error)
    if not isinstance(error, UsageError):
        reason = "".join(traceback.format_exception(error)).rstrip("\n")
    lines = "\n".join(filter(None, [reason, summary]))
    text = lines.encode(errors="backslashreplace").decode()  # protobuf refuses surrogates
    return Error(OUT_OF_MEMORY if _is_out_of_memory(error) else RAISED, text)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError if torch is None else MemoryError | torch.OutOfMemoryError):
        return True
    # torch's allocator for CPUs raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _snapshot(state: RecordDict) -> RecordDict:
    """Return a copy that keeps what records hold, but for the elements of arrays."""
    return RecordDict(
        {
            name: record_of(dict(record))
            if isinstance(record, ArrayRecord)
            else copy.deepcopy(record)
            for name, record in state.items()
        }
    )


def _checked(reply: object, message: Message) -> Message:
    """Return the reply if it is one to this message; else the sender would wait for ever."""
    if not isinstance(reply, Message):
        raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        raise ValueError("the ClientApp returned a Message that is no reply (reply_to=message)")
    return reply
