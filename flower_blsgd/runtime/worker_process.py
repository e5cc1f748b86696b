"""The program of a worker process: serve one node's messages with the user's ClientApp.

``python -m flower_blsgd.runtime.worker_process CONTROL_FD LIFELINE_FD PARENT_PID``, or a fork of
the template process. It ends when the control socket closes or when the lifeline does: the kernel
closes the lifeline even if the server's process is killed while a message is being handled.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from .app_call import Handler, handler_of, takes_views
from .flower_internals import NOT_LOADED, RAISED, load_client_app, release_records_at_once
from .shared_memory import BufferPool, Channel, Packer, Payload, share_views

Answer = tuple[Message, RecordDict]
"""A reply, and the state that the node keeps in shared memory."""


@dataclass(frozen=True)
class Job:
    """What a worker process is for; the first thing that it receives.

    Parameters
    ----------
    context : Context
        The node's.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.
    sys_path : tuple of str
        Where the server finds modules: what it can import, the app can.
    has_setup : bool
        Whether a function follows that is called before the app is loaded.
    """

    context: Context
    client_app: str
    app_dir: Path
    sys_path: tuple[str, ...] = ()
    has_setup: bool = False


def serve(control_fd: int, lifeline_fd: int, parent: int) -> None:
    """Answer messages until the server closes the control socket, or is gone.

    Parameters
    ----------
    control_fd : int
        File descriptor of a socket, taken over.
    lifeline_fd : int
        Of a pipe whose other end the server's process holds, and nobody else.
    parent : int
        Process id of this process's parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the server decides
    _die_with_parent(lifeline_fd, parent)
    release_records_at_once()
    pool = BufferPool()
    channel = Channel(socket.socket(fileno=control_fd), new_memory=pool.new_memory)
    try:
        job: Job = channel.receive()
        handle = _load(job, channel)
    except (EOFError, OSError):
        return
    while True:
        try:
            message: Message = channel.receive()
        except (EOFError, OSError):
            return
        reply = handle(message)
        payload = _packed(reply, message, job.context, pool)
        del message, reply  # the server may use their memory again
        try:
            channel.send(payload)
        except OSError:  # the server is gone
            return
        del payload


def _load(job: Job, channel: Channel) -> Handler:
    """Return the node's message handler; one that only reports the error if nothing loads."""
    # At the end: a module in the user's folder must not take the place of a library's.
    sys.path += [folder for folder in job.sys_path if folder not in sys.path]
    try:
        if job.has_setup:
            channel.receive()()
        app = load_client_app(job.client_app, job.app_dir)
    except EOFError:
        raise
    except Exception:
        reason = traceback.format_exc()

        def refuse(message: Message) -> Message:
            return Message(Error(NOT_LOADED, reason), reply_to=message)

        return refuse
    channel.views = takes_views(app)
    return handler_of(app, job.context)


def _packed(reply: Message, message: Message, context: Context, pool: BufferPool) -> Payload:
    try:
        return Packer(pool).pack((reply, _shared_state(context, pool)))
    except Exception as error:  # it holds something that has no bytes, or memory is short
        reason = f"the reply cannot be sent: {error}"
        failure = Message(Error(RAISED, reason), reply_to=message)
        return Packer(pool).pack((failure, RecordDict()))


def _shared_state(context: Context, pool: BufferPool) -> RecordDict:
    """Move what the node keeps as views, such as momentum, into memory that the server sees."""
    shared = RecordDict()
    for name, record in list(context.state.array_records.items()):
        moved = share_views(record, pool)
        if moved is not None:
            context.state[name] = shared[name] = moved
    return shared


def _die_with_parent(lifeline_fd: int, parent: int) -> None:
    """End this process as soon as the lifeline closes, or it has another parent."""

    def wait_for_the_end() -> None:
        # Nothing is ever written: the lifeline is readable when the server is gone. A fork of
        # the server may hold it open, so the parent's process id is looked at as well.
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


if __name__ == "__main__":
    serve(*(int(argument) for argument in sys.argv[1:]))
