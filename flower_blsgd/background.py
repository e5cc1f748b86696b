"""Work beside the training: values computed ahead, and books written behind."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from flwr.app import Message

T = TypeVar("T")

_MOST_KEPT = 1000
"""Pieces of work; with more the caller waits, so that memory stays bounded."""


class Later(Generic[T]):
    """A value that is computed once: beside other work, or by the first who asks for it.

    Parameters
    ----------
    compute : callable
        Returns the value. What it raises, everybody who asks gets.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._lock = threading.Lock()
        self._values: list[T] = []
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Compute it in a thread of its own, from now on."""
        if not self._lock.acquire(blocking=False):
            return  # somebody does
        try:  # the thread has the lock from the start: who asks waits for it
            threading.Thread(target=self._begun, name="blsgd-later", daemon=True).start()
        except BaseException:
            self._lock.release()
            raise

    def settle(self) -> None:
        """Return when it is computed; what that raises is kept for those who ask."""
        with self._lock:
            self._settle()

    def _begun(self) -> None:
        try:
            self._settle()
        finally:
            self._lock.release()

    def _settle(self) -> None:
        if self._compute is None:
            return
        try:
            self._values.append(self._compute())
        except Exception as error:
            self._error = error
        self._compute = None  # and what it holds

    def result(self) -> T:
        """Return the value; waits, or computes it here if nobody has begun."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._values[0]


class Readers:
    """Values that are read from something that will change: all of them before it does."""

    def __init__(self) -> None:
        self._values: list[Later[Any]] = []

    def add(self, read: Callable[[], T]) -> Later[T]:
        """Return a value that is read when `begin`, `settle`, or who wants it, comes first."""
        value = Later(read)
        self._values.append(value)
        return value

    def begin(self) -> None:
        """Begin to read, beside other work."""
        with contextlib.suppress(RuntimeError):  # no thread is to be had: `settle` reads
            for value in self._values:
                value.begin()

    def settle(self) -> None:
        """Return when all is read: what it is read from may change now."""
        for value in self._values:
            value.settle()
        self._values.clear()


class Background:
    """Does work in one thread, in the order in which it was given, when the time has come.

    Nothing is lost: a piece that raises does not stop those behind it. The first error is raised
    by the next call of `put`, `start` or `flush`, and no second time.

    Parameters
    ----------
    own_thread : bool (default: True)
        False does each piece where it is put, at once, and raises its error there.
    """

    def __init__(self, own_thread: bool = True) -> None:
        self._own_thread = own_thread
        self._changed = threading.Condition()
        self._kept: deque[Callable[[], object]] = deque()
        self._allowed = 0  # so many of those kept may be done now
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Keep a piece of work until `start`; waits, and starts it all, if too much is kept."""
        self._raise_error()
        if not self._own_thread:
            work()
            return
        while len(self._kept) >= _MOST_KEPT:
            self.start()
            with self._changed:
                self._changed.wait_for(lambda: len(self._kept) < _MOST_KEPT)
        with self._changed:
            self._kept.append(work)

    def start(self) -> None:
        """Begin to do what was put so far."""
        self._raise_error()
        with self._changed:
            self._allowed = len(self._kept)
            if self._thread is None and self._allowed:
                thread = threading.Thread(target=self._serve, name="blsgd-books", daemon=True)
                thread.start()  # first: without a thread `flush` does the work
                self._thread = thread
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when all work is done.

        Raises
        ------
        BaseException
            The first that a piece of work raised and no call has raised yet.
        """
        if self._thread is None and self._kept:
            self._do_here()
        with self._changed:
            self._allowed = len(self._kept)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._kept and not self._busy)
        self._raise_error()

    def close(self) -> None:
        """Let the thread end when what was started is done. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._allowed or self._closed)
                if not self._allowed:
                    self._thread = None
                    return
                work = self._taken()
            self._do(work)
            del work  # and what it holds
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _do_here(self) -> None:
        while self._kept:
            with self._changed:
                self._allowed = len(self._kept)
                work = self._taken()
            try:
                self._do(work)
            finally:
                self._busy = False

    def _taken(self) -> Callable[[], object]:
        self._allowed -= 1
        self._busy = True
        return self._kept.popleft()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # it belongs to whoever gave the work
            self._error = self._error or error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class TellingWhenSent(list[Message]):
    """Messages that call a function once when a grid has gone through them.

    A grid sends as it goes through them, or just after: from then on the workers compute, and
    what else this process has to do makes none of them wait.

    Parameters
    ----------
    messages : iterable of Message
        The messages.
    sent : callable
        Called once.
    """

    def __init__(self, messages: Iterable[Message], sent: Callable[[], None]) -> None:
        super().__init__(messages)
        self._sent: Callable[[], None] | None = sent

    def __iter__(self) -> Iterator[Message]:
        """Go through the messages."""
        yield from super().__iter__()
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent()
