"""A process and its parent: which of them handles a signal, and how one ends with the other."""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# --- the end of a parent ------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_MILLISECONDS = 200


def signal_at_parents_end(number: signal.Signals) -> None:
    """Have the kernel send this child a signal when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_with(
    process_ids: Iterable[int], end: Callable[[], object], files: Iterable[int] = ()
) -> None:
    """Call `end` in a thread when one of these processes ends, or a file becomes readable."""
    events = select.poll()
    for file in files:
        events.register(file, select.POLLIN)
    polled = []
    for process_id in process_ids:
        try:
            events.register(os.pidfd_open(process_id), select.POLLIN)
        except (AttributeError, OSError):  # not on Linux, an old kernel, or it has ended
            polled.append(process_id)

    def watch() -> None:
        while not events.poll(_POLL_MILLISECONDS if polled else None):
            if not all(map(_is_alive, polled)):
                break
        end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except PermissionError:
        pass
    except ProcessLookupError:
        return False
    return True


# --- signals ------------------------------------------------------------------------------------

SERVERS_OWN = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
"""Signals that may reach all processes; the server alone handles them."""

INTERRUPTED = threading.Event()
"""Set in a worker's process before a SIGINT that shall interrupt its program."""


def _leave_to_server(number: int, frame: object) -> None:
    """Handle a signal; unlike with SIG_IGN, programs that the worker starts are not deaf to it."""
    if number == signal.SIGINT and INTERRUPTED.is_set():
        raise KeyboardInterrupt


def leave_signals_to_server() -> None:
    """Leave signals to the server in this worker's process, but not in its forks."""
    restore_in_forks({n: signal.signal(n, _leave_to_server) for n in SERVERS_OWN})


def restore_in_forks(handlers: Mapping[signal.Signals, Any]) -> None:
    """Give forks of this process these handlers of signals, from their beginning.

    A signal whose handler has been changed since this call keeps it.
    """
    thread = threading.local()
    here = {number: signal.getsignal(number) for number in handlers}

    def block() -> None:
        thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, thread.mask)

    def restore_in_child() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is here[number]:
                signal.signal(number, handler)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore_in_child)
