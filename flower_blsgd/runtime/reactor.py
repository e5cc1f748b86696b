"""One thread that waits for the answers of many worker processes."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

_TICK_SECONDS = 0.2
_JOIN_SECONDS = 10.0


class Reactor:
    """Calls back when something can be read; safe between threads.

    A thread for each process would wake up, and fight for the interpreter, once per message.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ticks: list[Callable[[], None]] = []
        self._wake: socket.socket | None = None

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call back, from the reactor's thread, as long as this can be read."""
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, on_readable)
            if self._thread is None:
                self._wake, theirs = socket.socketpair()
                self._selector.register(theirs, selectors.EVENT_READ, None)
                self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
                self._thread.start()

    def forget(self, fd: int) -> None:
        """Call back no more; a call that is under way may still end."""
        with self._lock, contextlib.suppress(KeyError, ValueError):
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

    def _serve(self, end: socket.socket) -> None:
        with end, self._selector:
            while True:
                events = self._selector.select(_TICK_SECONDS)
                for key, _ in events:
                    if key.data is None:  # `close` was called
                        return
                    key.data()
                if not events:
                    for tick in self._ticks:
                        tick()
