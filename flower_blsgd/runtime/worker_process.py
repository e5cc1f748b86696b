"""The program that a worker process of the local grid runs.

``python -m flower_blsgd.runtime.worker_process CONTROL_FD LIFELINE_FD PARENT_PID``

It serves messages from the control socket, one at a time, with the user's ClientApp, as a
SuperNode does. It ends when the control socket closes or when the lifeline does: the kernel
closes the lifeline even if the parent is killed while a message is being handled.
"""

import fcntl
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from .devices import WorkerSpec
from .flower_internals import NOT_LOADED, RAISED, load_client_app


@dataclass(frozen=True)
class Job:
    """What a worker process is for; the first thing that it receives."""

    worker: WorkerSpec
    client_app: str
    app_dir: Path
    context: Context


def main() -> None:
    """Serve until the parent is gone or says that it is over."""
    control_fd, lifeline_fd, parent = (int(argument) for argument in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the parent decides
    _die_with_parent(lifeline_fd, parent)
    control = Connection(control_fd)
    try:
        job: Job = control.recv()
    except EOFError:
        return
    handle = _loaded(job)
    while True:
        try:
            message: Message = control.recv()
        except EOFError:
            return
        reply = handle(message)
        try:
            control.send(reply)
        except OSError:  # the parent is gone
            return
        except Exception as error:  # it holds something that has no bytes
            reason = f"the reply cannot be sent: {error}"
            control.send(Message(Error(RAISED, reason), reply_to=message))


def _die_with_parent(lifeline_fd: int, parent: int) -> None:
    """End this process as soon as the lifeline closes, or it has another parent."""

    def wait_for_the_end() -> None:
        # Nothing is ever written: the lifeline is readable when the parent is gone. A fork of
        # the parent may hold it open, so its process id is looked at as well.
        while os.getppid() == parent and not select.select([lifeline_fd], [], [], 1.0)[0]:
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    if sys.platform == "linux":
        # A handler may keep the interpreter's lock for long, and then no thread of ours runs.
        # The kernel's own signal on the pipe ends us all the same.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)


def _loaded(job: Job) -> Callable[[Message], Message]:
    """Return the message handler; one that only reports the error if the app does not load."""
    try:
        app = load_client_app(job.client_app, job.app_dir)
    except Exception:
        reason = traceback.format_exc()

        def refuse(message: Message) -> Message:
            return Message(Error(NOT_LOADED, reason), reply_to=message)

        return refuse
    context = job.context

    def handle(message: Message) -> Message:
        before = RecordDict(dict(context.state))
        try:
            return _checked(app(message, context), message)
        except Exception:
            context.state = before  # what a failed call left is not kept, as in Flower's simulation
            return Message(Error(RAISED, traceback.format_exc()), reply_to=message)

    return handle


def _checked(reply: object, message: Message) -> Message:
    """Return the reply if it is one to this message; else the sender would wait for ever."""
    if not isinstance(reply, Message):
        raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        raise ValueError("the ClientApp returned a Message that is no reply (reply_to=message)")
    return reply


if __name__ == "__main__":
    main()
