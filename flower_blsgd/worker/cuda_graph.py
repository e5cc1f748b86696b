"""A whole local step as one launch: recorded once per batch size, then replayed."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cuda_capture import Capture, Recording
from .rehearsal import host_randomness, rehearsal, same_randomness
from .steps import EagerSteps, Step, brief

_LOG = logging.getLogger(__name__)

_WARM_UP_STEPS = 3
"""torch's advice; libraries choose their algorithms in the first ones. The last one is checked."""

_MOST_GRAPHS = 8
"""Batch sizes that stay recorded: with `dlb` there is a new one after every epoch."""


@dataclass(frozen=True)
class _Graph:
    recording: Recording
    indices: Tensor
    losses: Tensor


class GraphedSteps:
    """Replays recorded steps: Python and the driver launch one graph instead of every kernel.

    A graph works on fixed addresses: samples, weights, the optimizer's state and its learning rate
    stay where they are, and what changes is copied into them (see ``in_place`` of
    `model_state.load_momentum`). It repeats what the device did when it was recorded and no line
    of Python, so a step must do the same every time. One that reads numbers out of tensors, draws
    random ones on the host, or puts a new tensor in the place of a buffer instead of writing to it,
    is done eagerly, and one line in the log says so. What cannot be seen from here is a step that
    depends on anything else on the host, such as a counter of its own; ``cuda-graph = false`` is
    for those.

    Recording leaves no trace: weights, buffers and momentum are those before it.

    Parameters
    ----------
    step : Step
        What a step is; its optimizer's state is all there, see `optimizers.begin_state`.
    eager : EagerSteps
        How it is done where it cannot be recorded.
    capture : Capture
        What records.
    name : str
        How the log calls this worker.
    """

    def __init__(self, step: Step, eager: EagerSteps, capture: Capture, name: str) -> None:
        self._step, self.eager, self._name = step, eager, name
        self._capture: Capture | None = capture
        self._graphs: OrderedDict[int, _Graph] = OrderedDict()
        self._seed = 0
        self._current: _Graph | None = None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those that are recorded, the one used last at the end."""
        return tuple(self._graphs)

    def is_ready(self, batch_size: int) -> bool:
        """Return whether `prepare` has nothing to record for it."""
        if self._capture is None:
            return self.eager.is_ready(batch_size)
        return batch_size in self._graphs

    def prepare(self, indices: Tensor) -> None:
        """Record a step for this batch size, unless that is done or cannot be done."""
        size = len(indices)
        if self._capture is not None and size not in self._graphs:
            self._record(indices, self._capture)
        self._current = self._graphs.get(size)
        if self._current is None:
            self.eager.prepare(indices)
        else:
            self._graphs.move_to_end(size)

    def seed(self, seed: int) -> None:
        """Begin the random numbers of an order of the batch size that was prepared last."""
        if self._current is None:
            self.eager.seed(seed)
        else:
            self._current.recording.seed(seed)

    def __call__(self, indices: Tensor) -> Tensor:
        """Do one step; the losses are overwritten by the next one."""
        if self._current is None:
            return self.eager(indices)
        self._current.indices.copy_(indices)
        self._current.recording.replay()
        return self._current.losses

    def release(self) -> None:
        """Forget all graphs and their memory."""
        self._graphs.clear()
        self._current = None
        if self._capture is not None:
            self._capture.release()
        self.eager.release()

    def _record(self, indices: Tensor, capture: Capture) -> None:
        size = len(indices)
        if len(self._graphs) == _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        own_indices = indices.clone()
        losses = torch.zeros(size, device=indices.device)

        def body(generator: torch.Generator) -> None:
            losses.copy_(self._step(own_indices, generator, keep_casts=False))

        self.eager.prepare(indices)
        with rehearsal(self._step.model, self._step.optimizer):
            before, buffers = host_randomness(), list(self._step.model.buffers())
            capture.warm_up(body, _WARM_UP_STEPS - 1)  # a mistake in the model is raised here
            try:
                capture.check(body)
                if not same_randomness(before, host_randomness()):
                    raise RuntimeError("it draws random numbers on the host")
                if not _same_tensors(buffers, list(self._step.model.buffers())):
                    raise RuntimeError("it puts a new tensor in the place of a buffer")
                recording = capture.record(body, self._step.optimizer)
            except Exception as error:  # of CUDA's many
                self._capture = None
                _LOG.warning(
                    "worker %s: a step cannot be recorded as a CUDA graph, it goes on without: %s",
                    self._name,
                    brief(error),
                )
                return
        self._graphs[size] = _Graph(recording, own_indices, losses)


def _same_tensors(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return [id(tensor) for tensor in some] == [id(tensor) for tensor in others]
