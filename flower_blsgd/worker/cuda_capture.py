"""The calls that record CUDA work and launch it again; nothing else here needs a GPU."""

import contextlib
import threading
import warnings
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

    def check(self, body: Body) -> None:
        """Do it once more, and raise if the host waits for the device in it.

        Nobody else may use the device meanwhile.
        """
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
        self._stream = _capture_stream(self._device)
        self._pool: Any = None

    def warm_up(self, body: Body, steps: int) -> None:
        """Do it on the stream that will be recorded: torch binds memory and gradients to it."""
        generator = torch.Generator(self._device)
        with self._on_own_stream():
            for _ in range(steps):
                body(generator)

    def check(self, body: Body) -> None:
        """Do it while torch raises where the host waits, in the whole process.

        Found while recording, that would end the recording, and torch's allocator does not get
        over a recording that failed.

        Raises
        ------
        RuntimeError
            If the host waits for the device in the body, as far as torch sees it.
        """
        generator = torch.Generator(self._device)
        before = torch.cuda.get_sync_debug_mode()
        with self._on_own_stream():
            try:
                _set_sync_debug_mode("error")
                body(generator)
            finally:
                _set_sync_debug_mode(before)

    def record(self, body: Body, optimizer: torch.optim.Optimizer) -> "CudaRecording":
        """Record a graph that has its own random numbers.

        Raises
        ------
        RuntimeError
            If the body does what CUDA does not record.
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


_STREAMS: dict[torch.device, "torch.cuda.Stream"] = {}
_ONE_STREAM = threading.Lock()


def _capture_stream(device: torch.device) -> "torch.cuda.Stream":
    """Return the stream that all of this process record on, one after another.

    torch has 32 streams and gives them out in turn: of one more for each worker, some would be
    those on which others compute.
    """
    with _ONE_STREAM:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _STREAMS[device]


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # torch says that it does not see everything
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
