"""The program that a worker process of the local grid runs.

``python -m flower_blsgd.runtime.worker_process CONTROL_FD LIFELINE_FD``

It serves messages from the control socket, one at a time, with the user's ClientApp, as a
SuperNode does. It ends when the control socket closes or when the lifeline does: the kernel
closes the lifeline even if the parent is killed while a message is being handled.
"""

import os
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
from .pinning import pin_to_cores


@dataclass(frozen=True)
class Job:
    """What a worker process is for; the first thing that it receives."""

    worker: WorkerSpec
    client_app: str
    app_dir: Path
    context: Context


def main() -> None:
    """Serve until the parent is gone or says that it is over."""
    control_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the parent decides
    threading.Thread(target=_die_with_parent, args=(lifeline_fd,), daemon=True).start()
    control = Connection(control_fd)
    job: Job = control.recv()
    pin_to_cores(job.worker)
    handle = _loaded(job)
    while True:
        try:
            message: Message = control.recv()
        except EOFError:
            return
        control.send(handle(message))


def _die_with_parent(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)  # nothing is ever written: this returns when the parent is gone
    os._exit(1)


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
        try:
            return app(message, context)
        except Exception:
            # As Flower does, the state of a failed call is not kept.
            context.state = RecordDict()
            return Message(Error(RAISED, traceback.format_exc()), reply_to=message)

    return handle


if __name__ == "__main__":
    main()
