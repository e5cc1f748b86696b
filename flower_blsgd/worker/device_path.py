"""Which of the ways to compute a step a device takes."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .batches import BatchSource
from .compiled_model import CompiledModel, CompiledSteps
from .cuda_capture import Capture, CudaCapture
from .cuda_graph import GraphedSteps
from .micro_batches import check_micro_batches
from .optimizers import can_fuse
from .precision import Precision, check_precision
from .steps import Augment, EagerSteps, SampleLoss, Step, Steps

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DevicePath:
    """How steps are computed on one device.

    Parameters
    ----------
    device : torch.device
        Where.
    precision : {"float32", "tf32", "bfloat16"}
        Of the forward pass.
    channels_last : bool
        Of images and filters.
    compile : bool
        Whether torch.compile is tried.
    fused : bool
        Whether one kernel updates all parameters.
    capture : Capture, optional
        What records steps, where they are recorded.
    name : str
        How the log calls this worker.
    micro_batch_size : int (default: 0)
        The most samples of a piece of a batch; 0: it stays whole.
    """

    device: torch.device
    precision: Precision
    channels_last: bool
    compile: bool
    fused: bool
    capture: Capture | None
    name: str
    micro_batch_size: int = 0

    @property
    def learning_rate(self) -> float | Tensor:
        """What the optimizer begins with; a recorded step reads it from a tensor."""
        return 1.0 if self.capture is None else torch.tensor(1.0, device=self.device)

    @property
    def state_stays(self) -> bool:
        """Whether what the optimizer keeps is made beforehand, and never moves."""
        return self.fused or self.capture is not None

    def steps(
        self,
        model: nn.Module,
        source: BatchSource,
        loss: SampleLoss,
        augment: Augment | None,
        optimizer: torch.optim.Optimizer,
    ) -> Steps:
        """Return what computes them."""
        step = Step(
            model,
            CompiledModel(model) if self.compile else model,
            source,
            loss,
            optimizer,
            self.device,
            augment,
            self.precision,
            self.channels_last,
            self.micro_batch_size,
        )
        eager = CompiledSteps(step, self.name) if self.compile else EagerSteps(step)
        if self.capture is None:
            return eager
        return GraphedSteps(step, eager, self.capture, self.name)


def device_path(
    model: nn.Module,
    source: BatchSource,
    device: torch.device,
    *,
    precision: str,
    channels_last: bool,
    compile: bool,
    cuda_graph: bool,
    name: str,
    micro_batch_size: int = 0,
) -> DevicePath:
    """Return the fastest way that the settings, the model and the data allow.

    One line in the log tells of a GPU whose steps cannot be recorded.

    Raises
    ------
    UsageError
        If the device does not compute that precisely, or the model does not allow pieces.
    """
    check_micro_batches(model, micro_batch_size)
    checked = check_precision(precision, device)
    fused = can_fuse(model, device)
    capture = capture_for(device) if cuda_graph else None
    if capture is not None and (obstacle := _obstacle(source, device, fused)):
        _LOG.warning(
            "worker %s: steps are not recorded as a CUDA graph: %s (cuda-graph = false says the "
            "same, without this line)",
            name,
            obstacle,
        )
        capture = None
    return DevicePath(
        device, checked, channels_last, compile, fused, capture, name, micro_batch_size
    )


def capture_for(device: torch.device) -> Capture | None:
    """Return what records steps there; None if nothing can."""
    return CudaCapture(device) if device.type == "cuda" else None


def _obstacle(source: BatchSource, device: torch.device, fused: bool) -> str:
    if not source.on_device:
        return (
            "the host makes every batch; only a pair of tensors, as far as there is memory for "
            "it, is on the GPU"
        )
    if device.type == "cuda" and not fused:
        return "the model has sparse gradients, or parameters that are not floating point"
    return ""
