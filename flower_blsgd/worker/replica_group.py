"""Where the workers of a process meet, so that one of them computes the orders of all."""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Work = TypeVar("Work")
Report = TypeVar("Report")

WAIT_SECONDS = 0.25
"""How long the first of a round waits for the others."""

_TWICE = 2
_LOOK_SECONDS = 0.5
"""A handler must notice a signal soon, so it never blocks longer in one call."""


_LOCAL = threading.local()


class InterruptedElsewhereError(RuntimeError):
    """The worker that computed for all was interrupted."""


@dataclass(eq=False)
class _Entry(Generic[Work, Report]):
    """What one worker hands in."""

    member: int
    shape: Hashable
    work: Work
    future: "Future[Report]" = field(default_factory=Future)
    batch: "_Batch[Work, Report] | None" = None


@dataclass(eq=False)
class _Batch(Generic[Work, Report]):
    """Those of a round that are computed together, and whose thread does it."""

    entries: "list[_Entry[Work, Report]]"
    owner: "_Entry[Work, Report] | None" = None


class ReplicaGroup(Generic[Work, Report]):
    """Workers, a thread each, that hand in their work and have it computed together.

    The work of a round is begun when all members that are expected have handed in theirs, or a
    short time after the first has. Work of equal shape is computed together, by the thread of one
    of those that wait for it. All members are expected but those that are still computing, those
    that left or twice in a row were waited for in vain, and those whose thread waits here already
    for another member, as where nodes take turns; who comes is expected again.

    Nobody waits for ever: whoever is interrupted takes back its work, or fails those that it
    computes for, and what computing raises reaches each of them.

    Parameters
    ----------
    together : callable
        ``(works) -> reports``, in the order of the members' numbers; at least two works, of equal
        shape. Several threads may call it at once, with different works.
    wait_seconds : float
        How long the first of a round waits for others.
    """

    def __init__(
        self,
        together: Callable[[Sequence[Work]], Sequence[Report]],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._together = together
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._absences: dict[int, int] = {}  # of each member, in a row
        self._threads: dict[int, object] = {}  # in which each member was seen last
        self._away: set[int] = set()  # they compute by themselves
        self._computing: set[int] = set()
        self._gathered: list[_Entry[Work, Report]] = []
        self._closes_at = 0.0
        self._phase: Hashable = None

    def join(self, member: int) -> None:
        """Expect a member from now on."""
        with self._changed:
            self._absences.setdefault(member, 0)
            self._threads[member] = _this_thread()

    def leave(self, member: int) -> None:
        """Do not expect a member until it comes: it computes by itself."""
        with self._changed:
            self._away.add(member)
            self._close_if_due()

    def run(
        self,
        member: int,
        shape: Hashable,
        work: Work,
        alone: Callable[[], Report],
        phase: Hashable = None,
    ) -> Report:
        """Hand in work, wait until it is computed, and return its report.

        Parameters
        ----------
        member : int
            Who; it hands in one work at a time.
        shape : hashable
            Only what is equal is computed together.
        work : Work
            What.
        alone : callable
            Computes this work where no other fits.
        phase : hashable, optional
            When it changes, all members that did not leave are expected again.

        Raises
        ------
        InterruptedElsewhereError
            If the thread that computed for this one was interrupted.
        Exception
            Whatever computing raised.
        """
        entry: _Entry[Work, Report] = _Entry(member, shape, work)
        try:
            batch = self._meet(entry, phase)
            if batch.owner is not entry:
                return self._result_of(entry)
            if len(batch.entries) == 1:
                return self._finish(batch, [alone()])
            return self._finish(batch, self._together([each.work for each in batch.entries]))
        except BaseException as error:
            self._give_up(entry, error)
            raise

    def _meet(self, entry: _Entry[Work, Report], phase: Hashable) -> _Batch[Work, Report]:
        """Wait until a round is complete, or time is over; the first who notices computes."""
        with self._changed:
            if phase != self._phase:
                self._phase, self._absences = phase, dict.fromkeys(self._absences, 0)
            self._absences[entry.member] = 0
            self._threads[entry.member] = _this_thread()
            self._away.discard(entry.member)
            if not self._gathered:
                self._closes_at = time.monotonic() + self._wait_seconds
            self._gathered.append(entry)
            self._close_if_due()
            while entry.batch is None:
                left = self._closes_at - time.monotonic()
                self._changed.wait(min(max(left, 0.0), _LOOK_SECONDS))
                self._close_if_due()
            if entry.batch.owner is None:
                entry.batch.owner = entry
            return entry.batch

    def _close_if_due(self) -> None:
        """Let those that have met begin, if all are there or time is over."""
        if not self._gathered:
            return
        present = {entry.member for entry in self._gathered}
        expected = {member for member, missed in self._absences.items() if missed < _TWICE}
        waiting = {self._threads[member] for member in present}
        busy = {member for member, thread in self._threads.items() if thread in waiting}
        absent = expected - present - self._computing - self._away - busy
        if absent and time.monotonic() < self._closes_at:
            return
        for member in absent:
            self._absences[member] += 1
        batches: dict[Hashable, _Batch[Work, Report]] = {}
        for entry in sorted(self._gathered, key=lambda entry: entry.member):
            entry.batch = batches.setdefault(entry.shape, _Batch([]))
            entry.batch.entries.append(entry)
        self._computing |= present
        self._gathered = []
        self._changed.notify_all()

    def _result_of(self, entry: _Entry[Work, Report]) -> Report:
        while True:
            with contextlib.suppress(TimeoutError):
                return entry.future.result(timeout=_LOOK_SECONDS)
            if entry.future.done():  # it was done just then, or a TimeoutError is what it raised
                return entry.future.result()

    def _finish(self, batch: _Batch[Work, Report], reports: Sequence[Report]) -> Report:
        """Give everybody its report, and return the owner's."""
        found: dict[_Entry[Work, Report], Report] = dict(zip(batch.entries, reports, strict=True))
        self._release(batch)  # first: who has its report may come back at once
        for entry, report in found.items():
            entry.future.set_result(report)
        assert batch.owner is not None
        return found[batch.owner]

    def _give_up(self, entry: _Entry[Work, Report], error: BaseException) -> None:
        """Take an entry back, or pass on what ended the thread that computes for others."""
        with self._changed:
            batch = entry.batch
            if batch is None or batch.owner is None:  # interrupted before anything began
                holder = self._gathered if batch is None else batch.entries
                if entry in holder:
                    holder.remove(entry)
                self._computing.discard(entry.member)
                self._close_if_due()
                return
        if batch.owner is not entry:
            return
        self._release(batch)
        if not isinstance(error, Exception):
            error = InterruptedElsewhereError(
                f"the worker that computed for this one was interrupted: {type(error).__name__}"
            )
        for each in batch.entries:
            if each is not entry and not each.future.done():
                each.future.set_exception(error)

    def _release(self, batch: _Batch[Work, Report]) -> None:
        with self._changed:
            self._computing -= {entry.member for entry in batch.entries}


def _this_thread() -> object:
    """Return what stands for the calling thread; its number may be an ended thread's as well."""
    if not hasattr(_LOCAL, "token"):
        _LOCAL.token = object()
    token: object = _LOCAL.token
    return token
