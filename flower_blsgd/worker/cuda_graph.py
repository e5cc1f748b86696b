"""A whole local step as one launch: captured once per batch size as a CUDA graph, then replayed."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .step import Steps, first_line, host_randomness, same_randomness, undone

_LOG = logging.getLogger(__name__)

_WARM_UP_STEPS = 2
"""Before the one that is checked; libraries choose their algorithms in the first ones."""

_MOST_GRAPHS = 8
"""Batch sizes that stay captured: with `dlb` there is a new one after every epoch."""

Body = Callable[[torch.Generator], None]
"""A step on fixed tensors; what is random in augmenting is drawn from this generator."""


class _CapturedStep(NamedTuple):
    graph: "Graph"
    indices: Tensor
    losses: Tensor


class GraphedSteps(Steps):
    """Replays captured steps: Python and the driver launch one graph instead of every kernel.

    A graph works on fixed addresses: samples, weights, the optimizer's state and its learning rate
    stay where they are, and what changes is copied into them (see ``in_place`` of
    `model_io.load_momentum`). It repeats what the device did when it was captured and no line
    of Python, so a step must do the same every time. One that reads numbers out of tensors, draws
    random ones on the host, or puts a new tensor in the place of a buffer instead of writing to it,
    is done eagerly, and one line in the log says so. What cannot be seen from here is a step that
    depends on anything else on the host, such as a counter of its own; ``cuda-graph = false`` is
    for those.

    Warm-up and capture are undone: weights, buffers, momentum and random numbers are those before.

    Parameters
    ----------
    eager : Steps
        How steps are done where they cannot be captured. The state of their optimizer is all
        there, see `optimizers.begin_state`.
    capture : Capture
        What captures.
    name : str
        How the log calls this worker.
    """

    def __init__(self, eager: Steps, capture: "Capture", name: str) -> None:
        super().__init__(eager.step)
        self._eager, self._name = eager, name
        self._capture: Capture | None = capture
        self._captured: dict[int, _CapturedStep] = {}
        self._current: _CapturedStep | None = None

    @property
    def eager(self) -> Steps:
        """The same computed eagerly."""
        return self._eager

    def prepare(self, indices: Tensor) -> None:
        """Capture a step for this batch size, unless that is done or cannot be done."""
        size = len(indices)
        if self._capture is not None and size not in self._captured:
            self._capture_step(indices, self._capture)
        self._current = self._captured.pop(size, None)
        if self._current is None:
            self._eager.prepare(indices)
        else:
            self._captured[size] = self._current  # the one used last is at the end

    def seed(self, seed: int) -> None:
        """Begin the random numbers of an order of the batch size that was prepared last."""
        (self._eager if self._current is None else self._current.graph).seed(seed)

    def __call__(self, indices: Tensor) -> Tensor:
        """Do one step; the losses are overwritten by the next one."""
        if self._current is None:
            return self._eager(indices)
        self._current.indices.copy_(indices)
        self._current.graph.replay()
        return self._current.losses

    def release(self) -> None:
        """Forget all graphs and their memory."""
        self._captured.clear()
        self._current = None
        if self._capture is not None:
            self._capture.release()
        self._eager.release()

    def _capture_step(self, indices: Tensor, capture: "Capture") -> None:
        if len(self._captured) == _MOST_GRAPHS:
            del self._captured[next(iter(self._captured))]
        own_indices = indices.clone()
        losses = torch.zeros(len(indices), device=indices.device)
        model, optimizer = self.step.model, self.step.optimizer

        def body(generator: torch.Generator) -> None:
            losses.copy_(self._eager.step(own_indices, generator, keep_casts=False))

        self._eager.prepare(indices)
        with undone(model, optimizer):
            before, buffers = host_randomness(), list(model.buffers())
            for _ in range(_WARM_UP_STEPS):
                capture.warm_up(body)  # a mistake in the model is raised here
            try:
                capture.check(body)
                if not same_randomness(before, host_randomness()):
                    raise RuntimeError("it draws random numbers on the host")
                if [id(buffer) for buffer in buffers] != [id(buffer) for buffer in model.buffers()]:
                    raise RuntimeError("it puts a new tensor in the place of a buffer")
                graph = capture.graph(body, optimizer)
            except Exception as error:  # of CUDA's many
                self._capture = None
                _LOG.warning(
                    "worker %s: a step cannot be captured as a CUDA graph, it goes on without: %s",
                    self._name,
                    first_line(error),
                )
                return
        self._captured[len(indices)] = _CapturedStep(graph, own_indices, losses)


class Graph:
    """A CUDA graph on a device, with the generators that its kernels read."""

    def __init__(self, device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.augmentation, self.dropout = torch.Generator(device), torch.Generator(device)
        with warnings.catch_warnings():  # newer torch finds them by itself, and says so
            warnings.simplefilter("ignore")
            for generator in (self.augmentation, self.dropout):
                self.graph.register_generator_state(generator)

    def seed(self, seed: int) -> None:
        """Begin both, as `Steps` and torch's default generator begin."""
        self.augmentation.manual_seed(seed)
        self.dropout.manual_seed(seed)

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()


class Capture:
    """Captures steps on one CUDA device, into graphs that share a pool of memory.

    Sharing is safe since a captured step leaves nothing in the pool that another one reads: what
    it returns is copied into a tensor of the caller's, and its gradients are its own.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def warm_up(self, body: Body) -> None:
        """Do it on the stream that will be captured: torch binds memory and gradients to it."""
        with self._on_own_stream():
            body(torch.Generator(self._device))

    def check(self, body: Body) -> None:
        """Do it once more, and raise RuntimeError if the host waits for the device in it.

        Found while capturing, that would end the capture, and torch's allocator does not get
        over a capture that failed.
        """
        before = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            self.warm_up(body)
        finally:
            _set_sync_debug_mode(before)

    def graph(self, body: Body, optimizer: torch.optim.Optimizer) -> Graph:
        """Capture it, with random numbers of its own; raise whatever CUDA does not capture."""
        graph = Graph(self._device)
        default = torch.cuda.default_generators[self._device.index]
        default_state = default.graphsafe_get_state()
        # What draws from the default generator (dropout) is captured with one of this graph's: a
        # capture that fails leaves a generator unusable, and eager steps still need the default.
        default.graphsafe_set_state(graph.dropout)
        try:
            with (
                self._on_own_stream(),  # also puts the stream back, which torch forgets on errors
                _capturable(optimizer),
                torch.cuda.graph(
                    graph.graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",  # what Flower's threads do is not captured
                ),
            ):
                body(graph.augmentation)
        finally:
            default.graphsafe_set_state(default_state)
        self._pool = graph.graph.pool()
        return graph

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


@contextlib.contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say that a step may be captured: torch wants to know, and outside a capture warns of it."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # torch says that it does not see everything
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
