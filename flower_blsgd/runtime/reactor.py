"""One thread that waits for the answers of many worker processes."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable

_LOG = logging.getLogger(__name__)

_TICK_SECONDS = 0.2
_JOIN_SECONDS = 10.0


class Reactor:
    """Calls back when something can be read; safe between threads.

    A thread for each process would wake up, and fight for the interpreter, once per message.
    """

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._lock = threading.RLock()  # a grid that is collected may come in anywhere
        self._thread: threading.Thread | None = None
        self._ticks: list[Callable[[], None]] = []
        self._wake: socket.socket | None = None

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call back, from the reactor's thread, as long as this can be read."""
        with self._lock:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                self._wake, theirs = socket.socketpair()
                self._selector.register(theirs, selectors.EVENT_READ, None)
                self._thread = threading.Thread(
                    target=_serve, args=(self._selector, theirs, self._ticks), daemon=True
                )
                self._thread.start()
            self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def forget(self, fd: int) -> None:
        """Call back no more; a call that is under way may still end."""
        with self._lock, contextlib.suppress(KeyError, ValueError):
            if self._selector is not None:
                self._selector.unregister(fd)

    def add_tick(self, tick: Callable[[], None]) -> None:
        """Call this several times a second as well."""
        self._ticks.append(tick)

    def close(self) -> None:
        """End the thread, and wait for it."""
        with self._lock:
            thread, wake = self._thread, self._wake
            self._wake = None
        if wake is not None:
            wake.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)


def _serve(
    selector: selectors.BaseSelector, end: socket.socket, ticks: Iterable[Callable[[], None]]
) -> None:
    with end, selector:
        next_tick = time.monotonic()
        while _attend(selector):
            if time.monotonic() >= next_tick:
                for tick in ticks:
                    _call(tick)
                next_tick = time.monotonic() + _TICK_SECONDS


def _attend(selector: selectors.BaseSelector) -> bool:
    """Call back all that can be read; False if `close` was called."""
    # Nothing of it stays in a variable of the loop: a process that died would be kept with it.
    for key, _ in selector.select(_TICK_SECONDS):
        if key.data is None:
            return False
        _call(key.data)
    return True


def _call(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:  # one that fails must not take the others along
        _LOG.exception("a worker process could not be attended to")
