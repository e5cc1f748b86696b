"""How a recording of CUDA work and the other threads of its process stay apart."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

LOOK_SECONDS = 0.5
"""A handler must notice a signal soon, so it never blocks longer in one call."""


class Gate:
    """Lets a recording be alone: no other thread of the process works on CUDA meanwhile.

    Random numbers drawn elsewhere, torch's default generator itself, and waiting for the device
    (see `CudaCapture.check`) would disturb it or be disturbed.

    A thread passes one gate at a time, and takes no lock inside that others hold at a gate.

    Parameters
    ----------
    always_open : bool (default: False)
        Where nobody records: everybody passes at once.
    """

    def __init__(self, always_open: bool = False) -> None:
        self._always_open = always_open
        self._changed = threading.Condition()
        self._computing = 0
        self._waiting = 0
        self._recording = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Wait until nobody records, or waits to; then others compute too."""
        if self._always_open:
            yield
            return
        with self._changed:
            self._wait_until(lambda: not self._recording and not self._waiting)
            self._computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._computing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Wait until nobody computes or records; then be alone."""
        if self._always_open:
            yield
            return
        with self._changed:
            self._waiting += 1
            try:
                self._wait_until(lambda: not self._recording and not self._computing)
                self._recording = True
            finally:  # also where a signal ended the waiting
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._recording = False
                self._changed.notify_all()

    def _wait_until(self, free: Callable[[], bool]) -> None:
        while not self._changed.wait_for(free, LOOK_SECONDS):
            pass


_GATES = {"cpu": Gate(always_open=True)}


def gate_of(device: str | torch.device) -> Gate:
    """Return the gate that this process has for devices of this kind; on CPUs it is open."""
    kind = torch.device(device).type
    return _GATES.get(kind) or _GATES.setdefault(kind, Gate())
