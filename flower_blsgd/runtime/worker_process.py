"""The program that a worker process of the local grid runs.

``python -m flower_blsgd.runtime.worker_process LIFELINE_FD PARENT_PID SOCKET_FD...``

It serves messages with the user's ClientApp, as a SuperNode does: on every socket, one at a time,
for one node or several; several sockets are served side by side, each by a thread. It ends when a
socket closes or when the lifeline does: the kernel closes the lifeline even if the parent is
killed while a message is being handled.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from .app_call import Handler, handler_of
from .channel import Channel
from .devices import WorkerSpec
from .flower_internals import NOT_LOADED, RAISED, load_client_app, release_records_at_once
from .pinning import side_stream
from .shared_arrays import Packer, Parcel, share_views, takes_views
from .shared_pool import Pool

Answer = tuple[Message, RecordDict]
"""A reply, and the state that the node keeps in shared memory."""


@dataclass(frozen=True)
class Job:
    """What a worker process is for; the first thing that it receives.

    Parameters
    ----------
    worker : WorkerSpec
        The device of all its nodes.
    contexts : mapping of int to Context
        Its nodes.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.
    sys_path : tuple of str
        Where the parent finds modules: what it can import, the app can.
    has_setup : bool
        Whether a function follows that is called before the app is loaded.
    """

    worker: WorkerSpec
    contexts: Mapping[int, Context]
    client_app: str
    app_dir: Path
    sys_path: tuple[str, ...] = ()
    has_setup: bool = False


def main() -> None:
    """Serve until the parent is gone or says that it is over."""
    lifeline_fd, parent, *socket_fds = (int(argument) for argument in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the parent decides
    _die_with_parent(lifeline_fd, parent)
    release_records_at_once()
    pool = Pool()
    channels = [
        Channel(socket.socket(fileno=fd), views=True, new_memory=pool.new_memory)
        for fd in socket_fds
    ]
    try:
        job: Job = channels[0].receive()
        handlers = _handlers(job, channels)
    except EOFError:
        return
    for channel in channels[1:]:
        threading.Thread(
            target=_serve_beside, args=(channel, job, handlers, pool), daemon=True
        ).start()
    _serve(channels[0], job, handlers, pool)


def _serve_beside(channel: Channel, job: Job, handlers: Mapping[int, Handler], pool: Pool) -> None:
    try:
        with side_stream(job.worker):
            _serve(channel, job, handlers, pool)
    except BaseException:  # a thread that ends alone would leave its messages without answers
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(channel: Channel, job: Job, handlers: Mapping[int, Handler], pool: Pool) -> None:
    while True:
        try:
            message: Message = channel.receive()
        except (EOFError, OSError):
            return
        node_id = message.metadata.dst_node_id
        reply = handlers[node_id](message)
        parcel = _packed(reply, message, job.contexts[node_id], pool)
        del message, reply  # the sender may use their memory again
        try:
            channel.send(parcel)
        except OSError:  # the parent is gone
            return
        del parcel


def _packed(reply: Message, message: Message, context: Context, pool: Pool) -> Parcel:
    try:
        return Packer(pool).pack((reply, _shared_state(context, pool)))
    except Exception as error:  # it holds something that has no bytes, or memory is short
        reason = f"the reply cannot be sent: {error}"
        failure = Message(Error(RAISED, reason), reply_to=message)
        return Packer(pool).pack((failure, RecordDict()))


def _shared_state(context: Context, pool: Pool) -> RecordDict:
    """Move what the node keeps as views, such as momentum, into memory that the parent sees."""
    shared = RecordDict()
    for name, record in list(context.state.array_records.items()):
        moved = share_views(record, pool)
        if moved is not None:
            context.state[name] = shared[name] = moved
    return shared


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


def _handlers(job: Job, channels: Sequence[Channel]) -> dict[int, Handler]:
    """Return each node's message handler; one that only reports the error if nothing loads."""
    # At the end: a module in the user's folder must not take the place of a library's.
    sys.path += [folder for folder in job.sys_path if folder not in sys.path]
    try:
        if job.has_setup:
            channels[0].receive()()
        app = load_client_app(job.client_app, job.app_dir)
    except EOFError:
        raise
    except Exception:
        reason = traceback.format_exc()

        def refuse(message: Message) -> Message:
            return Message(Error(NOT_LOADED, reason), reply_to=message)

        return dict.fromkeys(job.contexts, refuse)
    for channel in channels:
        channel.views = takes_views(app)
    return {node_id: handler_of(app, context) for node_id, context in job.contexts.items()}


if __name__ == "__main__":
    main()
