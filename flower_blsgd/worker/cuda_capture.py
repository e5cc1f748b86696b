"""The calls that record CUDA work and launch it again; nothing else here needs a GPU."""

import contextlib
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

Body = Callable[[torch.Generator], None]
"""A step that draws what is random in augmenting from this generator."""


class Recording(Protocol):
    """A step that was recorded."""

    def seed(self, seed: int) -> None:
        """Begin its random numbers."""
        ...

    def replay(self) -> None:
        """Do it again, on what is in its tensors now."""
        ...


class Capture(Protocol):
    """What records steps on one device."""

    def warm_up(self, body: Body, steps: int) -> None:
        """Do it a few times, so that nothing is done for the first time while it is recorded."""
        ...

    def record(self, body: Body, optimizer: torch.optim.Optimizer) -> Recording:
        """Record it. Whatever cannot be recorded raises."""
        ...

    def release(self) -> None:
        """Forget the memory that recordings share."""
        ...


class CudaCapture:
    """Records CUDA graphs that share one pool of memory.

    Sharing is safe since a recorded step leaves nothing in the pool that another one reads: what
    it returns is copied into a tensor of the caller's, and its gradients are its own.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", _index(device))
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def warm_up(self, body: Body, steps: int) -> None:
        """Do it on the stream that will be recorded: torch binds memory and gradients to it."""
        generator = torch.Generator(self._device)
        with self._on_own_stream():
            for _ in range(steps):
                body(generator)

    def record(self, body: Body, optimizer: torch.optim.Optimizer) -> "CudaRecording":
        """Record a graph that has its own random numbers.

        Raises
        ------
        RuntimeError
            If the host must wait for the device in the body, or CUDA refuses something else.
        """
        recording = CudaRecording(self._device)
        default = torch.cuda.default_generators[self._device.index]
        default_state = default.graphsafe_get_state()
        # What draws from the default generator (dropout) is recorded with a generator of this
        # graph's. So workers that compute side by side in threads do not share one, and where
        # recording fails, which leaves a generator unusable, the default one is not hurt.
        default.graphsafe_set_state(recording.dropout)
        try:
            with (
                self._on_own_stream(),  # also puts the stream back, which torch forgets on errors
                _capturable(optimizer),
                torch.cuda.graph(
                    recording.graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",  # others may allocate meanwhile
                ),
            ):
                body(recording.augmentation)
        finally:
            default.graphsafe_set_state(default_state)
        self._pool = recording.graph.pool()
        return recording

    def release(self) -> None:
        """Let the next graph begin a new pool."""
        self._pool = None

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


class CudaRecording:
    """A CUDA graph with the generators that its kernels read.

    Parameters
    ----------
    device : torch.device
        With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.augmentation, self.dropout = torch.Generator(device), torch.Generator(device)
        with warnings.catch_warnings():  # newer torch finds them by itself, and says so
            warnings.simplefilter("ignore")
            for generator in (self.augmentation, self.dropout):
                self.graph.register_generator_state(generator)

    def seed(self, seed: int) -> None:
        """Begin both, as `EagerSteps` and torch's default generator begin."""
        self.augmentation.manual_seed(seed)
        self.dropout.manual_seed(seed)

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()


class Gate:
    """Lets a recording be alone: no other thread of the process computes on CUDA meanwhile.

    Random numbers drawn elsewhere, and torch's default generator itself, would disturb it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computing = 0
        self._waiting = 0
        self._recording = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Wait until nobody records, or waits to; then others compute too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._recording and not self._waiting)
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
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._recording and not self._computing)
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


_GATES: dict[str, Gate] = defaultdict(Gate)


def gate_of(device: torch.device) -> Gate:
    """Return the gate that this process has for devices of this kind."""
    return _GATES[device.type]


@contextlib.contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say that a step may be recorded; outside a recording torch would warn of it.

    The state of a fused optimizer is on the device in any case.
    """
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
