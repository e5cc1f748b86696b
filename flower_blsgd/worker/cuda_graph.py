"""A whole local step as one launch: captured once per batch size as a CUDA graph, then replayed."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .step import first_cause, host_randomness, undone

_LOG = logging.getLogger(__name__)

_WARM_UP_STEPS = 2
"""Steps before the one that is checked; in them libraries choose their algorithms."""

_MOST_GRAPHS = 8
"""Batch sizes that stay captured, with and without weights: `dlb` has new ones every epoch."""

Step = Callable[[Tensor, Tensor | None], Tensor]
"""(indices, weights of the losses) -> losses of a step, its random generators seeded."""

Body = Callable[[torch.Generator], None]
"""A step on fixed tensors; what is random in augmenting is drawn from this generator."""


def capture_for(device: torch.device, on_device: bool, fused: bool, name: str) -> "Capture | None":
    """Return the `Capture` of a device; None where steps are done eagerly.

    One line in the log tells of a GPU whose steps cannot be captured: those of data that are not
    `on_device`, and of models whose optimizer is not `fused` into one kernel.
    """
    if device.type != "cuda":
        return None
    if on_device and fused:
        return Capture(device)
    _LOG.warning(
        "worker %s: steps are not captured as a CUDA graph: the data are not tensors on the GPU, "
        "or the model has sparse gradients or parameters that are not floating point "
        "(cuda-graph = false says the same, without this line)",
        name,
    )
    return None


class GraphedSteps:
    """Captures a step for each batch size: Python launches one graph instead of every kernel.

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
    step : callable
        ``(indices, generator, weights=weights) -> losses`` of a step that trains the model.
    model, optimizer : torch.nn.Module, torch.optim.Optimizer
        The optimizer's state is all there, see `model_io.begin_state`.
    capture : Capture
        What captures.
    name : str
        How the log calls this worker.
    """

    def __init__(
        self,
        step: Callable[..., Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        capture: "Capture",
        name: str,
    ) -> None:
        self._step, self._model, self._optimizer = step, model, optimizer
        self._capture: Capture | None = capture
        self._name = name
        self._captured: dict[tuple[int, bool], tuple[Graph, Step]] = {}

    def prepared(self, indices: Tensor, seed: int, weighted: bool) -> Step | None:
        """Return a captured step for batches of this size, with or without weights.

        The losses that it returns are overwritten by the next one. None where it cannot be
        captured.
        """
        key = len(indices), weighted
        if self._capture is not None and key not in self._captured:
            self._capture_step(indices, weighted, self._capture)
        if key not in self._captured:
            return None
        graph, step = self._captured[key] = self._captured.pop(key)  # the last one used is last
        graph.seed(seed)
        return step

    def release(self) -> None:
        """Forget all graphs and their memory."""
        self._captured.clear()
        if self._capture is not None:
            self._capture.release()

    def _capture_step(self, indices: Tensor, weighted: bool, capture: "Capture") -> None:
        if len(self._captured) == _MOST_GRAPHS:
            del self._captured[next(iter(self._captured))]
        own_indices = indices.clone()
        losses = torch.zeros(len(indices), device=indices.device)
        own_weights = torch.ones_like(losses) if weighted else None

        def body(generator: torch.Generator) -> None:
            losses.copy_(self._step(own_indices, generator, weights=own_weights))

        with undone(self._model, self._optimizer):
            before, buffers = host_randomness(), list(self._model.buffers())
            for _ in range(_WARM_UP_STEPS):
                capture.warm_up(body)  # a mistake in the model is raised here
            try:
                capture.check(body)
                if host_randomness() != before:
                    raise RuntimeError("it draws random numbers on the host")
                if list(map(id, buffers)) != list(map(id, self._model.buffers())):
                    raise RuntimeError("it puts a new tensor in the place of a buffer")
                graph = capture.graph(body, self._optimizer)
            except Exception as error:  # of CUDA's many
                self._capture = None
                _LOG.warning(
                    "worker %s: a step cannot be captured as a CUDA graph, it goes on without: %s",
                    self._name,
                    first_cause(error),
                )
                return

        def replay(indices: Tensor, weights: Tensor | None) -> Tensor:
            own_indices.copy_(indices)
            if own_weights is not None and weights is not None:
                own_weights.copy_(weights)
            graph.replay()
            return losses

        self._captured[len(indices), weighted] = graph, replay


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
        """Seed both generators as those of an eager step are seeded."""
        self.augmentation.manual_seed(seed)
        self.dropout.manual_seed(seed)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
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
        """Run a step on the stream of the capture: torch binds memory and gradients to it."""
        with self._on_own_stream():
            body(torch.Generator(self._device))

    def check(self, body: Body) -> None:
        """Run a step once more, and raise RuntimeError if the host waits for the device in it.

        Found while capturing, that would end the capture, and torch's allocator does not get
        over a capture that failed.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # torch says that it does not see everything
            warnings.simplefilter("ignore")
            try:
                torch.cuda.set_sync_debug_mode("error")
                self.warm_up(body)
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def graph(self, body: Body, optimizer: torch.optim.Optimizer) -> Graph:
        """Capture a step with generators of its own; raise whatever CUDA does not capture."""
        graph = Graph(self._device)
        default = torch.cuda.default_generators[self._device.index]
        default_state = default.graphsafe_get_state()
        # What draws from the default generator (dropout) is captured with one of this graph's: a
        # capture that fails leaves a generator unusable, and eager steps still need the default.
        default.graphsafe_set_state(graph.dropout)
        # torch wants to know that a step is captured, and outside a capture warns of it.
        groups = [group for group in optimizer.param_groups if "capturable" in group]
        try:
            for group in groups:
                group["capturable"] = True
            with (
                self._on_own_stream(),  # also puts the stream back, which torch forgets on errors
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
            for group in groups:
                group["capturable"] = False
        self._pool = graph.graph.pool()
        return graph

    def release(self) -> None:
        """Let the next graph begin a new memory pool."""
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
