"""Calls of a ClientApp: every message gets a reply, and arrays arrive as views or copies."""

import copy
import sys
import threading
import traceback
from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from ..errors import UsageError, is_out_of_memory
from .array_records import record_of
from .internals import RAISED, filled_unchecked, skip_mods

Handler = Callable[[Message], Message]
Program = Callable[[Context], None]

OUT_OF_MEMORY = 1001
"""Error code of a reply, in addition to Flower's codes, which are below 1000."""

PROCESS_ENDS = 1002
"""Error code of a reply after which the worker's process ends and a new one starts."""

REFUSED = 1003
"""Error code of a reply with a `UsageError`."""

OWN_QUERIES = "query.profile", "query.momentum"  # mods expect the messages of a strategy
_DEFERRED = threading.local()
_VIEWS = "blsgd_accepts_views"
_PROGRAM = "blsgd_main_program"


class ProcessEndsError(UsageError):
    """Error of a message whose handler's process is about to end."""


def accept_views(app: ClientApp) -> None:
    """Let a ClientApp receive arrays that are views of shared memory, instead of copies.

    Provisional: may change in any minor version.

    The app must not write to them or keep them after the call; it may keep copies.
    """
    app.__dict__[_VIEWS] = True


def takes_views(app: ClientApp) -> bool:
    """Return whether `accept_views` was called for this app."""
    return bool(app.__dict__.get(_VIEWS))


def set_main_program(app: ClientApp, program_of: Callable[[Context], Program | None]) -> None:
    """Let a program run in the main thread of a worker's process, while another thread answers.

    This holds on the local grid and in a stream; `program_of` returns None for a node without a
    program. If the program raises an exception, the process ends after its current reply, which
    should be a `ProcessEndsError`, and the grid starts it again. After the program has returned,
    messages are still answered.
    """
    app.__dict__[_PROGRAM] = program_of


def main_program_of(app: ClientApp, context: Context) -> Program | None:
    """Return the program of a node, see `set_main_program`; None without one."""
    program_of: Callable[[Context], Program | None] | None = app.__dict__.get(_PROGRAM)
    return program_of(context) if program_of else None


def after_reply(work: Callable[[], None]) -> None:
    """Let work, which must not raise, be done after the reply to the current message was sent.

    Only the local grid and streams do it.
    """
    _DEFERRED.work = work


def do_deferred_work() -> None:
    """Do the work of `after_reply` in this thread, if there is any."""
    work: Callable[[], None] | None = _DEFERRED.__dict__.pop("work", None)
    if work is not None:
        work()


def handler_of(app: ClientApp, context: Context) -> Handler:
    """Return a function that answers a node's messages with the app's reply or an error reply.

    If a call fails, the node's state is restored to what it was before.
    """
    skip_mods(app, OWN_QUERIES)

    def handle(message: Message) -> Message:
        before = _snapshot(context.state)
        try:
            return _checked(app(message, context), message)
        except BaseException as error:
            context.state = before  # as in Flower's simulation
            if not isinstance(error, Exception):  # the call was interrupted
                raise
            return Message(error_of(error), reply_to=message)

    return handle


def error_of(error: BaseException) -> Error:
    """Return the error of a reply: a traceback, or the message of a `UsageError`.

    If the accelerator no longer works in this process, the process has to end.
    """
    is_usage = isinstance(error, UsageError)
    reason = str(error) if is_usage else "".join(traceback.format_exception(error)).rstrip("\n")
    text = reason.encode(errors="backslashreplace").decode()  # protobuf refuses surrogates
    if isinstance(error, ProcessEndsError) or _accelerator_is_lost():
        return Error(PROCESS_ENDS, text)
    if is_usage:
        return Error(REFUSED, text)
    return Error(OUT_OF_MEMORY if is_out_of_memory(error) else RAISED, text)


def _accelerator_is_lost() -> bool:
    """Return whether every call of an accelerator fails that this process uses.

    This is so after a failed assertion or an illegal memory access in a kernel of CUDA ("sticky"
    errors), but not after other errors.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return False
    its = torch.accelerator
    try:
        for index in range(its.device_count()):
            if its.memory_reserved(index):  # else this would initialize the device
                with its.device_index(index):  # else CUDA initializes the current device
                    its.synchronize(index)
    except RuntimeError as error:  # another one if the allocator does not know
        return isinstance(error, torch.AcceleratorError)
    return False


def _snapshot(state: RecordDict) -> RecordDict:
    """Return a copy of a node's state that shares the elements of arrays."""
    copies = {
        name: record_of(dict(record)) if isinstance(record, ArrayRecord) else copy.deepcopy(record)
        for name, record in state.items()
    }
    return filled_unchecked(RecordDict(), copies)


def _checked(reply: object, message: Message) -> Message:
    """Return an app's return value if it is a reply to this message; raise otherwise."""
    if not isinstance(reply, Message):
        raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        raise ValueError(
            "the ClientApp returned a Message that is not a reply (use reply_to=message)"
        )
    return reply
