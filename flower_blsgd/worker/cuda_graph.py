"""Local steps as CUDA graphs: captured once per batch size, then replayed."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .step import first_cause, host_randomness, preserve_training_state

_LOG = logging.getLogger(__name__)

_WARM_UP_STEPS = 2
"""Steps before the checked one, in which libraries choose their algorithms."""

_MOST_GRAPHS = 8
"""Largest number of cached graphs; `dlb` uses new batch sizes every epoch."""

Step = Callable[[Tensor, Tensor | None], Tensor]
"""(indices, weights of the losses) -> losses of a step with seeded random generators."""

Body = Callable[[torch.Generator], None]
"""A step on fixed tensors, with the random generator for augmentation."""


def capture_for(device: torch.device, on_device: bool, fused: bool, name: str) -> "Capture | None":
    """Return the `Capture` of a device; None if its steps run eagerly.

    On a GPU, capturing needs data that are `on_device` and a `fused` optimizer. Otherwise, one line
    is logged.
    """
    if device.type != "cuda":
        return None
    if on_device and fused:
        return Capture(device)
    _LOG.warning(
        "worker %s: steps are not captured as a CUDA graph: the data are not tensors on the GPU, "
        "or the model has sparse gradients or parameters that are not floating point "
        "(cuda-graph = false avoids this message)",
        name,
    )
    return None


class GraphedSteps:
    """Cache of one captured graph per batch size, which replaces the launches of single kernels.

    A graph uses fixed addresses. Samples, weights, the optimizer's state and its learning rate keep
    theirs, and new values are copied into them (see ``in_place`` of `model_io.load_momentum`). A
    replay repeats the work of the device but runs no Python code, so a step must do the same every
    time. A step runs eagerly, with one line in the log, if it reads values from tensors, draws
    random numbers on the host, or replaces a buffer by a new tensor. Other dependencies on host
    state, such as the model's own counters, cannot be detected; such models need ``cuda-graph =
    false``.

    Warm-up and capture do not change weights, buffers, momentum or random generators.

    Parameters
    ----------
    step : callable
        ``(indices, generator, weights=weights) -> losses`` of a step that trains the model.
    model, optimizer : torch.nn.Module, torch.optim.Optimizer
        The model and its optimizer, whose state must exist, see `model_io.begin_state`.
    capture : Capture
        The device's `Capture`.
    name : str
        Name of this worker in log lines.
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

        The next step overwrites the returned losses. None if the step cannot be captured.
        """
        key = len(indices), weighted
        if self._capture is not None and key not in self._captured:
            self._capture_step(indices, weighted, self._capture)
        if key not in self._captured:
            return None
        graph, step = self._captured[key] = self._captured.pop(key)  # most recently used last
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

        with preserve_training_state(self._model, self._optimizer):
            before, buffers = host_randomness(), list(self._model.buffers())
            for _ in range(_WARM_UP_STEPS):
                capture.warm_up(body)  # raises errors of the model
            try:
                capture.check(body)
                if host_randomness() != before:
                    raise RuntimeError("it draws random numbers on the host")
                if list(map(id, buffers)) != list(map(id, self._model.buffers())):
                    raise RuntimeError("it replaces a buffer by a new tensor")
                graph = capture.graph(body, self._optimizer)
            except Exception as error:  # CUDA raises many kinds
                self._capture = None
                _LOG.warning(
                    "worker %s: a step cannot be captured as a CUDA graph; running eagerly: %s",
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
    """CUDA graph of a device with the random generators of its kernels."""

    def __init__(self, device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.augmentation, self.dropout = torch.Generator(device), torch.Generator(device)
        with warnings.catch_warnings():  # newer torch registers them itself, with a warning
            warnings.simplefilter("ignore")
            for generator in (self.augmentation, self.dropout):
                self.graph.register_generator_state(generator)

    def seed(self, seed: int) -> None:
        """Seed both generators like those of an eager step."""
        self.augmentation.manual_seed(seed)
        self.dropout.manual_seed(seed)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


class Capture:
    """Capture of steps on one CUDA device, into graphs that share a memory pool.

    Sharing is safe because no graph reads data that another one left in the pool: results are
    copied into the caller's tensors, and every step has its own gradients.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def warm_up(self, body: Body) -> None:
        """Run a step on the capture stream, to which torch binds memory and gradients."""
        with self._on_own_stream():
            body(torch.Generator(self._device))

    def check(self, body: Body) -> None:
        """Run a step and raise RuntimeError if the host waits for the device in it.

        During a capture, such a wait would abort the capture, and torch's allocator does not
        recover from that.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # torch warns that this mode is incomplete
            warnings.simplefilter("ignore")
            try:
                torch.cuda.set_sync_debug_mode("error")
                self.warm_up(body)
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def graph(self, body: Body, optimizer: torch.optim.Optimizer) -> Graph:
        """Capture a step with separate generators; raise if CUDA cannot capture it."""
        graph = Graph(self._device)
        default = torch.cuda.default_generators[self._device.index]
        default_state = default.graphsafe_get_state()
        # Draws from the default generator (dropout) are captured with one of this graph's, because
        # a failed capture leaves a generator unusable and eager steps need the default one.
        default.graphsafe_set_state(graph.dropout)
        # torch requires this flag during a capture, and warns about it otherwise.
        groups = [group for group in optimizer.param_groups if "capturable" in group]
        try:
            for group in groups:
                group["capturable"] = True
            with (
                self._on_own_stream(),  # also restores the stream, which torch does not on errors
                torch.cuda.graph(
                    graph.graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",  # ignore other threads, such as Flower's
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
        """Start a new memory pool with the next graph."""
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
